"""Tools: what a model is told of them, how its calls are read, and what they give."""

import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import get_json_schema

from rocm_ext.base.errors import UserError
from rocm_ext.environments import Call, Tools, calls_in


def search(
    query: str,
    most: int = 3,
    kinds: list[str] | None = None,
    order: Literal["date", "name"] = "date",
) -> list:
    """Search the texts
    of a folder.

    Args:
        query: words to look for,
            in any order.
        most: texts at most.
        kinds: kinds of texts.
        order: what comes first. (choices: ["date", "name"])

    Returns:
        Names.
    """
    if query == "?":
        raise LookupError("no such words")
    return [query] * most


def plain(x: float, flag: bool) -> dict[str, int]:
    """Do nothing."""
    return {"x": int(x), "flag": flag}


TOOLS = Tools([search, plain])


def described(a: int, b: str, c: bool, d: list[int], e: float = 1.0) -> int:
    """Describe.

    Args:
        a: first
        b: second
        c: third
        d: fourth
        e: fifth
    """
    return a


@pytest.mark.parametrize("function", [search, described])
def test_schemas_are_those_of_transformers(function):
    """TRL's trainers read its."""
    theirs, ours = get_json_schema(function)["function"], Tools([function]).schemas[0]["function"]
    assert (ours["name"], ours["description"]) == (
        theirs["name"],
        " ".join(theirs["description"].split()),
    )
    assert ours["parameters"].get("required") == theirs["parameters"].get("required")
    assert ours["parameters"]["properties"].keys() == theirs["parameters"]["properties"].keys()
    for name, expected in theirs["parameters"]["properties"].items():
        found = ours["parameters"]["properties"][name]
        assert found["description"].partition(" (choices")[0] == expected["description"]
        assert found.get("enum") == expected.get("enum")
        assert found.get("type") in (
            expected["type"],
            None,
        )  # choices and alternatives say it otherwise


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(a: int): pass", "f has no docstring"), ("def f(a): 'Text.'", "parameter a has no type hint"),
        ("def f(*a: int): 'Text.'", r"takes \*a"), ("def f(a: []): 'Text.'", r"parameter a is \[\]; expected str"),
        ("def f(a: 'Missing'): 'Text.'", "f's parameters cannot be read: NameError: name 'Missing'"),
        ("def f(a: int):\n    'Text.'\n    yield a", "neither asynchronous nor a generator"),
        ("f = type('F', (), {'__call__': lambda self: 1})()", "found <.*F object.*; expected a function"),
        ("import functools\nf = functools.partial(print, 'a')", "tools: "), ("f = getattr", "tools: "),
    ],
)  # fmt: skip
def test_functions_that_no_model_can_read(source, message):
    space: dict = {}
    exec(source, space)
    with pytest.raises(UserError, match=message):
        Tools([space["f"]])
    with pytest.raises(UserError, match="two functions have one name"):
        Tools([search, search])


WRITTEN = {
    "hermes": 'I look.\n<tool_call>\n{"name": "search", "arguments": {"query": "a", "most": 2}}\n</tool_call>',
    "qwen 3.5": "I look.\n<tool_call>\n<function=search>\n<parameter=query>\na\n</parameter>\n<parameter=most>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm": "I look.\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</arg_value>\n<arg_key>most</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "llama 3": '{"name": "search", "parameters": {"query": "a", "most": 2}}',
    "llama 3, marked": '<|python_tag|>{"name": "search", "parameters": {"query": "a", "most": 2}}<|eom_id|>',
    "mistral": '[TOOL_CALLS]search[ARGS]{"query": "a", "most": 2}',
    "mistral 7b": '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a", "most": 2}}]',
    "gpt-oss": '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query":"a","most":2}<|call|>',
    "lfm 2": 'I look.<|tool_call_start|>[search(query="a", most=2)]<|tool_call_end|>',
    "arguments as text": '<tool_call>{"name": "search", "arguments": "{\\"query\\":\\"a\\",\\"most\\":2}"}</tool_call>',
}


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_calls_in_the_notations_of_templates(written):
    content, calls = calls_in(written, TOOLS.schemas)
    assert content in ("", "I look.")
    assert calls == [Call("search", {"query": "a", "most": 2})]
    assert json.loads(TOOLS(calls[0])) == ["a", "a"]


def test_calls_in_reasoning_do_not_count():
    call = '<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>'
    for opening, closing in (("<think>", "</think>"), ("", "</think>"), ("[THINK]", "[/THINK]")):
        thought = f"{opening}I may {call}.{closing}"
        assert calls_in(f"{thought}I will not.", TOOLS.schemas) == (f"{thought}I will not.", [])
        assert calls_in(f"{thought}\n{call}", TOOLS.schemas) == (
            thought,
            [Call("search", {"query": "a"})],
        )
        bare = '{"name": "search", "parameters": {"query": "a"}}'
        assert calls_in(thought + bare, TOOLS.schemas) == (
            thought,
            [Call("search", {"query": "a"})],
        )
    # gpt-oss: the template takes the reasoning of a call as content, and refuses marks in it
    call = ' to=functions.search<|channel|>commentary json<|message|>{"query":"a"}'
    said = "<|channel|>analysis<|message|>I write to=functions.plain.<|end|><|start|>assistant"
    expected = ("I write to=functions.plain.", [Call("search", {"query": "a"})])
    assert calls_in(said + call, TOOLS.schemas) == expected
    said += "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    assert calls_in(said + call, TOOLS.schemas) == (f"{expected[0]}\nI look.", expected[1])
    said = f"<|channel|>analysis<|message|>{expected[0]}<|end|><|start|>assistant<|channel|>final<|message|>2"
    assert calls_in(said, TOOLS.schemas) == (said, [])


def test_ids_are_those_that_mistrals_templates_take():
    ids = [Call("search").message(number)["id"] for number in (0, 12)]
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert len({*ids}) == 2


def test_arguments_without_types():
    """Text stays text where the tool takes no such number; null is null where it takes it."""

    def find(
        year: str | None, kind: Literal["1", "2"], count: int, words: list[str], name: str = ""
    ) -> str:
        """Find."""
        return ""

    schemas = Tools([find]).schemas
    written = {
        "year": "2024",
        "kind": "1",
        "count": "3",
        "words": '["a"]',
        "name": '"x"',
        "more": "4",
    }
    read = {"year": "2024", "kind": "1", "count": 3, "words": ["a"], "name": '"x"', "more": 4}
    for texts, expected in (
        (written, read),
        ({"year": "null", "name": "null"}, {"year": None, "name": "null"}),
    ):
        tags = "".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in texts.items())
        keys = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
            for key, value in texts.items()
        )
        for body in (f"<function=find>{tags}</function>", f"find\n{keys}"):
            assert calls_in(f"<tool_call>{body}</tool_call>", schemas) == (
                "",
                [Call("find", expected)],
            )


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$ref": "#/$defs/Count"}, 3),  # as pydantic writes it
        ({"$ref": "#/nowhere"}, "3"),
        ({"type": "any"}, "3"),
        (5, "3"),
        ({"enum": ["3", "4"]}, "3"),
        ({"anyOf": [{"type": "string"}, {"allOf": [{"$ref": "#/$defs/Count"}, {"const": 3}]}]}, 3),
        ({"$ref": "#/$defs/Itself"}, "3"),
    ],
)
def test_schemas_of_a_program(schema, expected):
    """They are read in the run's own process, so nothing in them may take long or ask the network."""
    many = {f"Many {i}": {"allOf": [{"$ref": f"#/$defs/Many {i + 1}"}] * 2} for i in range(60)}
    kinds = {
        **many,
        "Many 60": {},
        "Count": {"type": "integer"},
        "Itself": {"anyOf": [{"$ref": "#/$defs/Itself"}]},
    }
    parameters = {"type": "object", "properties": {"count": schema}, "$defs": kinds}
    said = "<tool_call><function=find><parameter=count>3</parameter></function></tool_call>"
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    assert calls_in(said, tools) == ("", [Call("find", {"count": expected})])


def test_a_slow_pattern_of_a_program_stops_nothing():
    value = json.dumps(["a" * 50 + "!"])
    parameters = {"type": "object", "properties": {"words": {"items": {"pattern": "^(a+)+$"}}}}
    said = f"<tool_call><function=find><parameter=words>{value}</parameter></function></tool_call>"
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    assert calls_in(said, tools) == ("", [Call("find", {"words": json.loads(value)})])


@pytest.mark.timeout(60)  # a search that begins anew at each of the openers takes minutes
@pytest.mark.parametrize(("begin", "repeated"), [
    ("<tool_call><function=search>", "<parameter=query>\n"), ("<tool_call><function=search>", "<parameter="),
    ("<tool_call>search", "<arg_key>"), ("<tool_call>search", "<arg_key>query</arg_key>"),
    ("<tool_call>search", " "), ("[TOOL_CALLS]search", " "), ("[TOOL_CALLS]search[CALL_ID]a", " "),
])  # fmt: skip
def test_openers_without_an_end_take_no_longer_than_their_text(begin, repeated):
    _, [call] = calls_in(begin + repeated * (500_000 // len(repeated)) + "!", TOOLS.schemas)
    assert TOOLS(call).startswith("error: ")


@pytest.mark.parametrize("value", ["-" * 100_000 + "1", "{1, 2}", "b'a'", "...", "{(1, 2): 3}"])
def test_values_that_json_lacks_are_a_problem(value):
    """Records are JSON."""
    _, [call] = calls_in(
        f"<|tool_call_start|>[search(query={value})]<|tool_call_end|>", TOOLS.schemas
    )
    assert call.problem


def test_a_message_may_have_several_calls_up_to_a_limit():
    text = '<tool_call>{"name": "search", "arguments": {"query": "1"}}</tool_call>'
    content, calls = calls_in(f"First {text} then\n{text}", TOOLS.schemas)
    assert content == "First  then"
    assert [call.name for call in calls] == ["search", "search"]
    # JSON that is an answer
    for answer in ('{"a": 1}', '{"name": "x"}', "42", "", '{"name": "x", "parameters": 3}'):
        assert calls_in(answer, TOOLS.schemas) == (answer, [])
    call = '<tool_call>{"name": "search", "arguments": {"query": "N"}}</tool_call>'
    said = "".join(call.replace("N", str(i)) for i in range(40))
    content, calls = calls_in(said, TOOLS.schemas)
    assert (content, len(calls)) == ("", 33)
    assert calls[31] == Call("search", {"query": "31"})
    assert TOOLS(calls[32]).endswith("at most 32 calls; the last 8 did nothing")


@pytest.mark.parametrize(("call", "said"), [
    (Call("find"), "there is no tool 'find'; the tools are search, plain"),
    (Call("search"), "missing a required argument: 'query'"),
    (Call("search", {"query": 1}), "query: 1 is not of type 'string'"),
    (Call("search", {"query": "?"}), "LookupError: no such words"),
    (Call("", problem="it is cut"), "cannot be read: it is cut"),
])  # fmt: skip
def test_mistakes_are_answers(call, said):
    assert TOOLS(call).startswith("error: ")
    assert said in TOOLS(call)


PIECES = [
    *'<>/[]{}":,|=_ \n1',
    "tool_call",
    "<tool_call>",
    "</tool_call>",
    "name",
    "[TOOL_CALLS]",
    "<function=",
]
PIECES += [
    "<|python_tag|>",
    "to=functions.",
    "<|message|>",
    "<|tool_call_start|>",
    "[ARGS]",
    "<arg_key>",
    '{"name":',
]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_text_is_too_wild(text):
    content, calls = calls_in(text, TOOLS.schemas)
    assert isinstance(content, str)
    for call in calls:
        assert TOOLS(call).startswith("error: ")
