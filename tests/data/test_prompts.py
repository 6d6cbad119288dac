"""Prompts: rows, formats, errors and overlap with held-out prompts."""

import json
import re
from pathlib import Path

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocm_ext.base.errors import UserError
from rocm_ext.data.prompts import Prompt, check_disjoint, prompt_dataset

DATA = Path(__file__).parents[3] / "shared/data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}")


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def user(text):
    return ({"role": "user", "content": text},)


# ---- rows


def test_a_row_becomes_a_prompt_with_its_columns_origin_and_id(write):
    source = write({"prompt": "2 + 2?", "answer": 4, "level": None, "topic": "sums", "id": 7})
    (prompt,) = prompt_dataset(source=source)
    row = {"prompt": "2 + 2?", "answer": 4, "topic": "sums", "id": 7}
    assert prompt == Prompt("7", user("2 + 2?"), row, f"{source}:1")


def test_without_an_id_the_id_is_the_start_of_the_key(write):
    source = write({"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "1"})
    prompts = prompt_dataset(source=source)
    assert [p.id for p in prompts] == [p.key[:16] for p in prompts]
    assert len({p.id for p in prompts}) == 2
    assert all(re.fullmatch("[0-9a-f]{64}", p.key) for p in prompts)


def test_the_key_is_of_the_messages_alone(write):
    one = prompt_dataset(source=write({"prompt": "a", "answer": "1", "id": "x"}, name="1.jsonl"))
    two = prompt_dataset(source=write({"messages": [{"content": "a", "role": "user"}]}, name="2.jsonl"))
    other = prompt_dataset(source=write({"prompt": "a"}, name="3.jsonl"), system_prompt="Be brief.")
    assert one[0].key == two[0].key != other[0].key


def test_the_task_id_serves_as_id_and_id_comes_first(write):
    source = write({"prompt": "a", "task_id": "HumanEval/0"}, {"prompt": "b", "task_id": 1, "id": "one"})
    assert [p.id for p in prompt_dataset(source=source)] == ["HumanEval/0", "one"]


def test_column_map_renames_and_hides_a_column_of_our_name(write):
    source = write({"question": "a", "prompt": "not this", "gold": "1", "uid": 3, "level": 2})
    mapping = {"prompt": "question", "answer": "gold", "id": "uid"}
    (prompt,) = prompt_dataset(source=source, column_map=mapping)
    assert prompt.id == "3"
    assert prompt.row == {"prompt": "a", "answer": "1", "id": 3, "level": 2}


def test_messages_keep_their_turns_and_the_row_has_the_last_as_prompt(write):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2 + 2?"},
    ]
    (prompt,) = prompt_dataset(source=write({"messages": turns, "answer": "4"}), system_prompt="Ignored.")
    assert prompt.messages == tuple(turns)
    assert prompt.row["prompt"] == "And 2 + 2?"


def test_the_system_prompt_comes_first_where_there_is_none(write):
    (prompt,) = prompt_dataset(source=write({"prompt": "a"}), system_prompt="Be brief.")
    assert prompt.messages == ({"role": "system", "content": "Be brief."}, *user("a"))


def test_prompt_and_messages_that_agree_are_one_prompt(write):
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (prompt,) = prompt_dataset(source=write({"prompt": "a", "messages": answered, "answer": "1"}))
    assert prompt.messages == user("a")


def test_column_map_tells_which_of_prompt_and_messages_counts(write):
    source = write({"prompt": "a", "messages": list(user("b"))})
    assert prompt_dataset(source=source, column_map={"prompt": "prompt"})[0].messages == user("a")
    (prompt,) = prompt_dataset(source=source, column_map={"messages": "messages"})
    assert prompt.messages == user("b")
    assert prompt.row["prompt"] == "b"


def test_limit_and_split_take_the_first_rows(write):
    source = write(*({"prompt": str(i)} for i in range(10)))
    assert [p.row["prompt"] for p in prompt_dataset(source=source, limit=3)] == ["0", "1", "2"]
    assert len(prompt_dataset(source=source, limit=30)) == 10
    assert [p.origin for p in prompt_dataset(source=source, split="train[8:]")] == [f"{source}:9", f"{source}:10"]


@pytest.mark.parametrize("suffix", ["json", "csv", "parquet"])
def test_other_files(tmp_path, suffix):
    rows = datasets.Dataset.from_list([{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": None}])
    source = str(tmp_path / f"rows.{suffix}")
    getattr(rows, f"to_{suffix}")(source)
    first, second = prompt_dataset(source=source)
    assert (first.row, second.row) == ({"prompt": "a", "answer": "x"}, {"prompt": "b"})
    expected = f"{source}:2" if suffix == "json" else f"{source}[train] row 1"
    assert second.origin == expected


def test_a_glob_reads_all_files(write, tmp_path):
    paths = [write({"prompt": letter}, name=f"{letter}.jsonl") for letter in "ab"]
    assert [p.origin for p in prompt_dataset(source=str(tmp_path / "*.jsonl"))] == [f"{path}:1" for path in paths]


def test_equal_rows_are_kept_once_and_counted(write, messages):
    source = write({"prompt": "a", "x": 1}, {"x": 1, "prompt": "a"}, {"prompt": "b"}, {"prompt": "a", "x": 1})
    prompts = prompt_dataset(source=source)
    assert [p.origin for p in prompts] == [f"{source}:1", f"{source}:3"]
    assert f"{source}: dropped 2 of 4 rows that repeat others" in "\n".join(messages)


# ---- formats


def test_gsm8k(write):
    answer = "48/2 = <<48/2=24>>24 clips.\n#### 1,024"
    source = write({"question": "How many?", "answer": answer})
    (prompt,) = prompt_dataset(source=source, format="gsm8k")
    assert prompt.messages == user("How many?")
    assert prompt.row == {"prompt": "How many?", "answer": "1,024", "solution": answer}


def test_mbpp_of_google(write):
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    row = {"text": "Write a function that adds one.", "code": "def f(x): ...", "task_id": 11,
           "test_setup_code": "x = 1", "test_list": tests, "challenge_test_list": []}  # fmt: skip
    (prompt,) = prompt_dataset(source=write(row), format="mbpp")
    text = "Write a function that adds one.\n\nYour code should pass these tests:\n\nassert f(1) == 2\nassert f(2) == 3"
    assert prompt.messages == user(text)
    assert prompt.id == "11"
    assert prompt.row == {"task_id": 11, "challenge_test_list": [], "prompt": text, "tests": tests,
                          "test_setup": "x = 1", "solution": "def f(x): ..."}  # fmt: skip


def test_mbpp_sanitized(write):
    row = {"prompt": "Take a root.", "code": "c", "test_imports": ["import math", "import re"],
           "test_list": ["assert g(4) == math.sqrt(4)"], "task_id": 2}  # fmt: skip
    (prompt,) = prompt_dataset(source=write(row), format="mbpp")
    assert prompt.messages[0]["content"].endswith("tests:\n\nassert g(4) == math.sqrt(4)")
    assert prompt.row["test_setup"] == "import math\nimport re"
    assert "test_imports" not in prompt.row


def test_mbpp_with_source_names_the_function(write):
    row = {"task_id": 6, "prompt": "Find the chain.", "entry_point": "chain", "solution": "s", "tests": "def test(): 1"}
    (prompt,) = prompt_dataset(source=write(row), format="mbpp")
    assert prompt.messages == user("Find the chain.\n\nName the function `chain`.")
    assert prompt.row == {**row, "prompt": prompt.messages[0]["content"]}


def test_humaneval(write):
    start = 'def f(x):\n    """Add one."""\n'
    row = {"task_id": "HumanEval/3", "prompt": start, "canonical_solution": "    return x + 1\n",
           "test": "def check(candidate): ...", "entry_point": "f"}  # fmt: skip
    (prompt,) = prompt_dataset(source=write(row), format="humaneval")
    assert f"```python\n{start}```" in prompt.messages[0]["content"]
    assert prompt.id == "HumanEval/3"
    assert prompt.row == {"task_id": "HumanEval/3", "entry_point": "f", "code_prefix": start, "tests": row["test"],
                          "solution": row["canonical_solution"], "prompt": prompt.messages[0]["content"]}  # fmt: skip


def test_column_map_feeds_a_format(write):
    source = write({"problem": "How many?", "gold": "#### 3"})
    (prompt,) = prompt_dataset(source=source, format="gsm8k", column_map={"question": "problem", "answer": "gold"})
    assert prompt.row == {"prompt": "How many?", "answer": "3", "solution": "#### 3"}


@needs_data
def test_the_real_gsm8k():
    prompts = prompt_dataset(source=str(DATA / "gsm8k_train.jsonl"), format="gsm8k")
    assert len(prompts) == 7473
    assert prompts[0].row["answer"] == "72"
    assert all(re.fullmatch(r"-?[\d,]+(\.\d+)?", p.row["answer"]) for p in prompts)


@needs_data
def test_the_real_mbpp():
    prompts = prompt_dataset(source=str(DATA / "mbpp_train.jsonl"), format="mbpp")
    assert len(prompts) == 374
    assert all(f"`{p.row['entry_point']}`" in p.messages[0]["content"] for p in prompts)
    assert prompts[0].id == "601"


# ---- errors


MALFORMED = {
    "no prompt": ({"text": "a"}, {}, r":1: the columns \['text'\] have neither prompt nor messages"),
    "null": ({"prompt": None, "a": 1}, {}, ":1: the columns .* have neither prompt nor messages"),
    "empty": ({"prompt": " \n"}, {}, ":1: prompt is empty"),
    "number": ({"prompt": 3}, {}, ":1: prompt must be text, found int"),
    "list": ({"prompt": list(user("a"))}, {}, "found list; a conversation goes in messages"),
    "surrogate": ({"prompt": "a \ud800 b"}, {}, ":1: prompt is not valid Unicode"),
    "both": ({"prompt": "a", "messages": list(user("b"))}, {}, ":1: prompt and messages differ; set column_map"),
    "answered": (
        {"messages": [*user("a"), {"role": "assistant", "content": "b"}]},
        {},
        ":1: messages must end with a user's turn, found the assistant's",
    ),
    "no turns": ({"messages": []}, {}, ":1: messages is empty"),
    "no list": ({"messages": "a"}, {}, ":1: a conversation must be a list"),
    "role": ({"messages": [{"role": "robot", "content": "a"}]}, {}, ":1: message 0: unknown role 'robot'"),
    "late system": (
        {"messages": [*user("a"), {"role": "system", "content": "b"}, *user("c")]},
        {},
        ":1: a system message must be the first",
    ),
    "empty turn": ({"messages": list(user(""))}, {}, ":1: prompt is empty"),
    "id": ({"prompt": "a", "id": [1]}, {}, r":1: id is \[1\]; expected text or a whole number"),
    "true id": ({"prompt": "a", "task_id": True}, {}, ":1: task_id is True"),
    "empty id": ({"prompt": "a", "id": ""}, {}, ":1: id is ''"),
    "gsm8k": ({"prompt": "a", "answer": "1"}, {"format": "gsm8k"}, ":1: format gsm8k needs question; the columns are"),
    "gsm8k mark": ({"question": "a", "answer": "1"}, {"format": "gsm8k"}, ":1: answer has no ####"),
    "mbpp": ({"prompt": "a", "tests": "b"}, {"format": "mbpp"}, ":1: format mbpp needs entry_point"),
    "mbpp tests": ({"text": "a", "test_list": "b"}, {"format": "mbpp"}, ":1: test_list must be a list of text"),
    "mbpp test": ({"text": "a", "test_list": [1]}, {"format": "mbpp"}, r":1: test_list\[0\] must be a string"),
    "mbpp no tests": ({"text": "a", "test_list": []}, {"format": "mbpp"}, ":1: test_list is empty"),
    "humaneval": ({"prompt": "a", "test": "b"}, {"format": "humaneval"}, ":1: format humaneval needs entry_point"),
    "unknown format": ({"prompt": "a"}, {"format": "gms8k"}, "format 'gms8k' is unknown; did you mean gsm8k?"),
    "column": ({"prompt": "a"}, {"column_map": {"prompt": "q"}}, r"column_map names \['q'\], but the columns of"),
    "map": ({"prompt": "a"}, {"column_map": ["prompt"]}, r"column_map is \['prompt'\]; expected our column -> yours"),
    "limit": ({"prompt": "a"}, {"limit": 0}, "limit is 0; expected a whole number"),
    "bad rows": ({"prompt": "a"}, {"bad_rows": "keep"}, "bad_rows is 'keep'; expected error or drop"),
    "all bad": ({"prompt": ""}, {"bad_rows": "drop"}, ":1: prompt is empty"),
    "system": ({"prompt": "a"}, {"system_prompt": None}, "system_prompt must be a string"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(write, case):
    row, args, message = MALFORMED[case]
    with pytest.raises(UserError, match=message) as caught:
        prompt_dataset(source=write(row), **args)
    assert "\n" not in str(caught.value)


def test_malformed_rows_are_dropped_where_asked(write, messages):
    source = write({"prompt": "a"}, {"prompt": ""}, {"prompt": "b", "id": [1]}, {"prompt": "c"})
    with pytest.raises(UserError, match=r"2 of 4 rows are bad: .*:2: prompt is empty \| .*:3: id is .*bad_rows: drop"):
        prompt_dataset(source=source)
    assert [p.origin for p in prompt_dataset(source=source, bad_rows="drop")] == [f"{source}:1", f"{source}:4"]
    (told,) = messages
    assert "2 of 4 rows" in told
    assert f"{source}:3" in told


def test_an_id_twice_names_both_rows(write):
    source = write({"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}, {"prompt": "c", "id": "1"})
    with pytest.raises(UserError, match=f"{source}:3 has the id '1' of {source}:1; ids must be unique"):
        prompt_dataset(source=source)


def test_one_prompt_with_two_answers_names_both_rows(write):
    source = write({"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"})
    with pytest.raises(UserError, match=f"{source}:2 asks the same as {source}:1, but differs in answer"):
        prompt_dataset(source=source)


# ---- overlap


def prompts_of(*conversations):
    return [
        Prompt(str(i), user(c) if isinstance(c, str) else tuple(c), {}, f"row {i}") for i, c in enumerate(conversations)
    ]


def shot(question):
    return [*user("1 + 1?"), {"role": "assistant", "content": "2"}, *user(question)]


@pytest.mark.parametrize(
    "held_out",
    ["What is  2 + 2?", "WHAT IS 2 + 2?\n", [{"role": "system", "content": "s"}, *user("What is 2 + 2?")],
     shot("what is 2 + 2?")],
)  # fmt: skip
def test_the_same_question_in_other_dress_overlaps(held_out):
    train = prompts_of("unrelated", "What is 2 + 2?")
    with pytest.raises(UserError, match=r"1 of 2 held-out prompts .* first row 1 \(training: row 1\)"):
        check_disjoint(train, prompts_of("another", held_out))


def test_equal_last_turns_of_different_conversations_do_not_overlap():
    go_on = {"role": "user", "content": "Go on."}
    answer = {"role": "assistant", "content": "b"}
    check_disjoint(prompts_of([*user("a"), answer, go_on], "c"), prompts_of([*user("d"), answer, go_on], "e"))
    with pytest.raises(UserError, match="training: row 0"):
        check_disjoint(prompts_of([*user("a"), answer, go_on]), prompts_of([*user("A"), answer, go_on]))


# ---- wild input


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
turn = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "x"]), "content": json_values})
columns = {
    "id": json_values,
    "prompt": json_values | st.text(max_size=4),
    "messages": st.lists(turn | json_values, max_size=3),
    "answer": json_values,
    "question": st.text(max_size=3),
    "test_list": json_values,
}
wild_rows = st.lists(st.fixed_dictionaries({}, optional=columns), min_size=1, max_size=4)
keep_tmp_path = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@keep_tmp_path
@given(rows=wild_rows, format=st.sampled_from([None, None, "gsm8k", "mbpp", "humaneval"]))
def test_any_row_is_a_prompt_or_one_line(write, rows, format):
    try:
        prompts = prompt_dataset(source=write(*rows), format=format)
    except UserError as error:
        if "\n" in str(error):
            pytest.fail(f"several lines: {error}")
        return
    assert len({p.id for p in prompts}) == len({p.key for p in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt.messages[-1] == {"role": "user", "content": prompt.row["prompt"]}
        assert prompt.row["prompt"].strip()
        assert all(value is not None for value in prompt.row.values())


@keep_tmp_path
@given(texts=st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=6), extra=json_values)
def test_texts_come_back_as_they_are_and_never_disjoint_from_themselves(write, texts, extra):
    source = write(*({"prompt": text, "extra": extra} for text in texts))
    prompts = prompt_dataset(source=source)
    assert [p.messages[0]["content"] for p in prompts] == list(dict.fromkeys(texts))
    with pytest.raises(UserError, match="held-out"):
        check_disjoint(prompts, prompts[-1:])
