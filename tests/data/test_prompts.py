"""Prompts: rows, formats, errors and overlap with held-out prompts."""

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocm_ext.base.errors import UserError
from rocm_ext.data.prompts import Prompt, check_disjoint, prompt_dataset
from tests.kit.chats import assistant, user
from tests.kit.lines import one_line_has


def asks(text):
    return (user(text),)


# ---- rows
def test_a_row_becomes_a_prompt_with_its_columns_origin_and_id(rows):
    first = {"prompt": "2 + 2?", "answer": 4, "level": None, "topic": "sums", "id": 7}
    source = rows(
        first, {"prompt": "a", "task_id": "HumanEval/0"}, {"prompt": "b", "task_id": 1, "id": "one"}
    )
    prompt, *others = prompt_dataset(source=source)
    del first["level"]
    assert prompt == Prompt("7", asks("2 + 2?"), first, f"{source}:1")
    assert [p.id for p in others] == ["HumanEval/0", "one"]


def test_without_an_id_the_key_gives_it(rows):
    source = rows({"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "1"})
    prompts = prompt_dataset(source=source)
    assert [p.id for p in prompts] == [p.key[:16] for p in prompts]
    assert all(re.fullmatch("[0-9a-f]{64}", p.key) for p in prompts)
    (same,) = prompt_dataset(
        source=rows({"messages": [{"content": "a", "role": "user"}], "id": "x"}, name="2.jsonl")
    )
    other = prompt_dataset(source=source, system_prompt="Be brief.")
    assert len({same.key, prompts[1].key, *(p.key for p in other)}) == 4
    assert same.key == prompts[0].key


def test_column_map_renames_and_hides_a_column_of_our_name(rows):
    source = rows({"question": "a", "prompt": "not this", "gold": "1", "uid": 3, "level": 2})
    mapping = {"prompt": "question", "answer": "gold", "id": "uid"}
    (prompt,) = prompt_dataset(source=source, column_map=mapping)
    assert prompt.id == "3"
    assert prompt.row == {"prompt": "a", "answer": "1", "id": 3, "level": 2}


def test_prompt_and_messages_are_one_prompt_if_they_agree(rows):
    agree = rows(
        {"prompt": "a", "messages": [user("a"), assistant("b")], "answer": "1"}, name="agree.jsonl"
    )
    differ = rows({"prompt": "a", "messages": [user("b")]})
    for source, column, text in (
        (agree, None, "a"),
        (differ, "prompt", "a"),
        (differ, "messages", "b"),
    ):
        (prompt,) = prompt_dataset(source=source, column_map={column: column} if column else None)
        assert prompt.messages == asks(text)
        assert prompt.row["prompt"] == text


def test_limit_and_split_take_the_first_rows(rows):
    source = rows(*({"prompt": str(i)} for i in range(10)))
    assert [p.row["prompt"] for p in prompt_dataset(source=source, limit=3)] == ["0", "1", "2"]
    assert len(prompt_dataset(source=source, limit=30)) == 10
    assert [p.origin for p in prompt_dataset(source=source, split="train[8:]")] == [
        f"{source}:9",
        f"{source}:10",
    ]


def test_equal_rows_are_kept_once_and_counted(rows, messages):
    source = rows(
        {"prompt": "a", "x": 1}, {"x": 1, "prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "x": 1}
    )
    assert [p.origin for p in prompt_dataset(source=source)] == [f"{source}:1", f"{source}:3"]
    assert f"{source}: dropped 2 of 4 rows that repeat others" in "\n".join(messages)


# ---- formats
def test_gsm8k(rows):
    answer = "48/2 = <<48/2=24>>24 clips.\n#### 1,024"
    expected = {"prompt": "How many?", "answer": "1,024", "solution": answer}
    (prompt,) = prompt_dataset(
        source=rows({"question": "How many?", "answer": answer}), format="gsm8k"
    )
    assert (prompt.messages, prompt.row) == (asks("How many?"), expected)
    columns, source = (
        {"question": "problem", "answer": "gold"},
        rows({"problem": "How many?", "gold": answer}),
    )
    assert prompt_dataset(source=source, format="gsm8k", column_map=columns)[0].row == expected


def test_mbpp_of_google(rows):
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    row = {"text": "Write a function that adds one.", "code": "def f(x): ...", "task_id": 11,
           "test_setup_code": "x = 1", "test_list": tests, "challenge_test_list": []}  # fmt: skip
    (prompt,) = prompt_dataset(source=rows(row), format="mbpp")
    text = "Write a function that adds one.\n\nYour code should pass these tests:\n\nassert f(1) == 2\nassert f(2) == 3"
    assert (prompt.messages, prompt.id) == (asks(text), "11")
    assert prompt.row == {"task_id": 11, "challenge_test_list": [], "prompt": text, "tests": tests,
                          "test_setup": "x = 1", "solution": "def f(x): ..."}  # fmt: skip


def test_mbpp_sanitized_and_with_source(rows):
    row = {"prompt": "Take a root.", "code": "c", "test_imports": ["import math", "import re"],
           "test_list": ["assert g(4) == math.sqrt(4)"], "task_id": 2}  # fmt: skip
    (prompt,) = prompt_dataset(source=rows(row), format="mbpp")
    assert prompt.messages[0]["content"].endswith("tests:\n\nassert g(4) == math.sqrt(4)")
    assert prompt.row["test_setup"] == "import math\nimport re"
    assert "test_imports" not in prompt.row
    row = {
        "task_id": 6,
        "prompt": "Find the chain.",
        "entry_point": "chain",
        "solution": "s",
        "tests": "def test(): 1",
    }
    (prompt,) = prompt_dataset(source=rows(row), format="mbpp")
    assert prompt.messages == asks("Find the chain.\n\nName the function `chain`.")
    assert prompt.row == {**row, "prompt": prompt.messages[0]["content"]}


def test_humaneval(rows):
    start = 'def f(x):\n    """Add one."""\n'
    row = {"task_id": "HumanEval/3", "prompt": start, "canonical_solution": "    return x + 1\n",
           "test": "def check(candidate): ...", "entry_point": "f"}  # fmt: skip
    (prompt,) = prompt_dataset(source=rows(row), format="humaneval")
    assert f"```python\n{start}```" in prompt.messages[0]["content"]
    assert prompt.id == "HumanEval/3"
    assert prompt.row == {"task_id": "HumanEval/3", "entry_point": "f", "code_prefix": start, "tests": row["test"],
                          "solution": row["canonical_solution"], "prompt": prompt.messages[0]["content"]}  # fmt: skip


# ---- errors
BAD_ROWS = [
    ({"prompt": None, "a": 1}, "the columns .* have neither prompt nor messages"),
    ({"prompt": [user("a")]}, "a conversation goes in messages"), ({"prompt": 3}, "prompt must be text, found int"),
    ({"prompt": "a \ud800 b"}, "not valid Unicode"), ({"prompt": "a", "messages": [user("b")]}, "set column_map"),
    ({"messages": [user("a"), assistant("b")]}, "must end with a user's turn, found the assistant's"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [user("a"), {"role": "system", "content": "b"}, user("c")]}, "a system message must be the first"),
    ({"prompt": "a", "id": [1]}, r"id is \[1\]; expected text or a"),
]  # fmt: skip
OF_FORMATS = [
    ("gsm8k", {"question": "a", "answer": "1"}, "answer has no ####"),
    ("mbpp", {"prompt": "a", "tests": "b"}, "format mbpp needs entry_point"),
    ("mbpp", {"text": "a", "test_list": "b"}, "test_list must be a list of text"),
    ("mbpp", {"text": "a", "test_list": [1]}, r"test_list\[0\] must be a string"),
]


@pytest.mark.parametrize(
    ("format", "row", "says"), [(None, *case) for case in BAD_ROWS] + OF_FORMATS, ids=str
)
def test_malformed_rows(rows, format, row, says):
    with pytest.raises(UserError, match=f":1: .*{says}") as caught:
        prompt_dataset(source=rows(row), format=format, bad_rows="error" if "id" in row else "drop")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"format": "gms8k"}, "format 'gms8k' is unknown; did you mean gsm8k"),
        ({"column_map": {"prompt": "q"}}, r"column_map names \['q'\], but the columns of"),
        ({"bad_rows": "keep"}, "expected error or drop"),
    ],
)  # fmt: skip
def test_bad_arguments(rows, arguments, says):
    with pytest.raises(UserError, match=says):
        prompt_dataset(source=rows({"prompt": "a"}), **arguments)


def test_malformed_rows_are_dropped_where_asked(rows, messages):
    source = rows({"prompt": "a"}, {"prompt": ""}, {"prompt": "b", "id": [1]}, {"prompt": "c"})
    with pytest.raises(
        UserError,
        match=r"2 of 4 rows are bad: .*:2: prompt is empty \| .*:3: id is .*bad_rows: drop",
    ):
        prompt_dataset(source=source)
    assert [p.origin for p in prompt_dataset(source=source, bad_rows="drop")] == [
        f"{source}:1",
        f"{source}:4",
    ]
    assert one_line_has(messages, "2 of 4 rows", f"{source}:3")


@pytest.mark.parametrize(
    ("more", "says"),
    [({"prompt": "b", "id": "1"}, "{0}:2 has the id '1' of {0}:1; ids must be unique"),
     ({"prompt": "a", "answer": "2"}, "{0}:2 asks the same as {0}:1, but differs in id, answer")],
)  # fmt: skip
def test_rows_that_contradict_each_other_are_both_named(rows, more, says):
    source = rows({"prompt": "a", "id": 1}, more)
    with pytest.raises(UserError, match=says.format(source)):
        prompt_dataset(source=source)


# ---- overlap
def prompts_of(*conversations):
    chats = [asks(c) if isinstance(c, str) else tuple(c) for c in conversations]
    return [Prompt(str(i), chat, {}, f"row {i}") for i, chat in enumerate(chats)]


@pytest.mark.parametrize(
    "held_out",
    ["WHAT IS  2 + 2?\n", [{"role": "system", "content": "s"}, user("What is 2 + 2?")],
     [user("1 + 1?"), assistant("2"), user("what is 2 + 2?")]],
)  # fmt: skip
def test_the_same_question_in_other_dress_overlaps(held_out):
    train = prompts_of("unrelated", "What is 2 + 2?")
    with pytest.raises(
        UserError, match=r"1 of 2 held-out prompts .* first row 1 \(training: row 1\)"
    ):
        check_disjoint(train, prompts_of("another", held_out))


def test_equal_last_turns_alone_do_not_overlap():
    end = [assistant("b"), user("Go on.")]
    check_disjoint(prompts_of([user("a"), *end], "c"), prompts_of([user("d"), *end], "e"))
    with pytest.raises(UserError, match="training: row 0"):
        check_disjoint(prompts_of([user("a"), *end]), prompts_of([user("A"), *end]))


# ---- wild input
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
turn = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "x"]), "content": json_values}
)
columns = {
    **dict.fromkeys(("id", "answer", "test_list"), json_values), "prompt": json_values | st.text(max_size=4),
    "messages": st.lists(turn | json_values, max_size=3), "question": st.text(max_size=3),
}  # fmt: skip
wild_rows = st.lists(st.fixed_dictionaries({}, optional=columns), min_size=1, max_size=4)
keep_tmp_path = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@keep_tmp_path
@given(wild=wild_rows, format=st.sampled_from([None, None, "gsm8k", "mbpp", "humaneval"]))
def test_any_row_is_a_prompt_or_one_line(rows, wild, format):
    try:
        prompts = prompt_dataset(source=rows(*wild), format=format)
    except UserError as error:
        if "\n" in str(error):
            pytest.fail(f"several lines: {error}")
        return
    assert len({p.id for p in prompts}) == len({p.key for p in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.messages[-1] == user(prompt.row["prompt"])
        assert prompt.row["prompt"].strip()
        assert all(value is not None for value in prompt.row.values())


@keep_tmp_path
@given(
    texts=st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=6), extra=json_values
)
def test_texts_come_back_as_they_are(rows, texts, extra):
    source = rows(*({"prompt": text, "extra": extra} for text in texts))
    prompts = prompt_dataset(source=source)
    assert [p.messages[0]["content"] for p in prompts] == list(dict.fromkeys(texts))
    with pytest.raises(UserError, match="held-out"):
        check_disjoint(prompts, prompts[-1:])
