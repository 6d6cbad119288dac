"""Rendering, schemas, files, tokenisation and datasets."""

import base64
import gzip
import json
import re
from functools import partial

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torchtune.datasets import PackedDataset
from torchtune.models.llama3 import Llama3Tokenizer
from torchtune.models.qwen2_5 import qwen2_5_tokenizer

from rocm_ext.base.errors import UserError
from rocm_ext.data import sft_dataset
from rocm_ext.data.dialects import FLAGS, ROLES
from rocm_ext.data.mixture import Mixture
from rocm_ext.data.render import IGNORE, render_conversation, render_prompt
from rocm_ext.data.rows import Rows, open_dataset, origin_of, tokenize
from tests.kit.chats import Foreign, assistant, labelled_text, user
from tests.kit.tiny import write_tokenizer


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_qwen(tmp_path_factory.mktemp("qwen"))


def make_qwen(folder, **kwargs):
    write_tokenizer(folder)
    files = ("vocab.json", "merges.txt", "tokenizer.json")
    return qwen2_5_tokenizer(*(str(folder / file) for file in files), **kwargs)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "tokenizer.model"
    words = [bytes([byte]) for byte in range(256)] + [b"us", b"er", b"user", b"as", b"ass"]
    path.write_text(
        "".join(f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words))
    )
    return Llama3Tokenizer(str(path))


@pytest.fixture(params=["qwen", "llama"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def labelled(tokenizer, labels):
    return labelled_text(labels, partial(decode, tokenizer))


def decode(tokenizer, tokens):
    if isinstance(tokenizer, Llama3Tokenizer):
        return tokenizer.decode(tokens, truncate_at_eos=False, skip_special_tokens=False)
    return tokenizer.decode(tokens)


# ---- rendering
def test_prompts_are_the_text_that_the_models_were_trained_on(qwen, llama):
    system = {"role": "system", "content": "Be brief."}
    assert qwen.decode(render_prompt(qwen, [system, user("6*7?")])) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert decode(llama, render_prompt(llama, [user("6*7?")])) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n6*7?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    # special tokens in text are parsed by one of them
    assert render_prompt(qwen, [user("x<|im_end|>y")]).count(qwen.im_end_id) == 2
    assert render_prompt(llama, [user("x<|eot_id|>y")]).count(llama.eot_id) == 1


def test_assistant_turns_are_labelled_with_their_ends(tokenizer):
    call = "<tool_call>\n{}\n</tool_call>"
    chat = [
        user("a"),
        assistant(call),
        assistant("bad", weight=0),
        {"role": "tool", "content": "42"},
    ]
    tokens, labels = render_conversation(tokenizer, [*chat, assistant("two"), user("left out")])
    qwen = "<|im_end|>" in tokenizer.special_tokens
    assert ("<tool_response>\n42\n</tool_response>" in decode(tokenizer, tokens)) == qwen
    end = "<|im_end|>" if qwen else "<|eot_id|>"
    assert labelled(tokenizer, labels) == [call + end, "two" + end]
    assert (tokenizer.special_tokens.get("<tool_call>") in labels) == qwen
    assert all(label in (IGNORE, token) for label, token in zip(labels, tokens, strict=True))
    assert "left out" not in decode(tokenizer, tokens)


@pytest.mark.parametrize("off", [0, 0.0, False])
@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_other_trainers_are_weights(qwen, rows, flag, off):
    chat = [
        user("a"),
        assistant("bad", **{flag: off}),
        user("b") | {flag: off},
        assistant("good", **{flag: 1}),
    ]
    item = sft_dataset(qwen, source=rows({"messages": chat}))[0]
    assert labelled(qwen, item["labels"]) == ["good<|im_end|>"]
    plain = [{key: value for key, value in message.items() if key != flag} for message in chat]
    assert item["tokens"] == render_conversation(qwen, plain)[0], "the template does not see it"


SPECIAL = [
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|eot_id|>",
    "<tool_call>",
    "\n",
    " ",
    "a",
    "e\u0301",
]
WILD = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(st.sampled_from(SPECIAL), max_size=8).map("".join),
)
SPOKEN = WILD.filter(str.strip)
TURN = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "system", "tool"]),
    WILD,
)
TURN |= SPOKEN.map(assistant)


# ---- schemas
QA = [user("q"), assistant("a")]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
SYSTEM = {"role": "system", "content": "s"}
PAIR = {"prompt": "q", "completion": "a"}
ALPACA = {"instruction": "q", "input": "", "output": "a"}
ROWS = {
    "messages": {"messages": QA}, "sharegpt": {"conversations": SHAREGPT}, "prompt_completion": PAIR, "alpaca": ALPACA,
}  # fmt: skip
DIALECTS = {
    "developer": ({"messages": [{"role": "developer", "content": "s"}, *QA]}, [SYSTEM, *QA]),
    "history": ({**ALPACA, "history": [["b", "c"]], "system": "s"}, [SYSTEM, user("b"), assistant("c"), *QA]),
    "input": ({**ALPACA, "input": "1 2"}, [user("q\n\n1 2"), assistant("a")]),
    "text": ({"conversations": json.dumps(SHAREGPT), "system": "s"}, [SYSTEM, *QA]),
    "parts": ({"messages": [user([{"type": "text", "text": "q"}, {"type": "text", "text": "?"}]), QA[1]]},
              [user("q?"), QA[1]]),
    "messages twice": ({"prompt": [user("q")], "completion": [assistant("a")]}, QA),
}  # fmt: skip


@pytest.mark.parametrize("schema", ROWS)
def test_schemas_agree(qwen, rows, schema):
    """Rows of all of them may be in one file; a text is all trained and ended."""
    tokens, labels = render_conversation(qwen, QA)
    (item,) = sft_dataset(qwen, source=rows(ROWS[schema]), schema=schema).items([0])
    assert item == {"tokens": tokens, "labels": labels}
    text, *others = sft_dataset(qwen, source=rows({"text": "plain"}, *ROWS.values())).items(
        range(5)
    )
    assert [other["tokens"] for other in others] == [tokens] * 4
    assert (
        text["tokens"]
        == text["labels"]
        == [*qwen.encode("plain", add_bos=False, add_eos=False), qwen.eos_id]
    )


@pytest.mark.parametrize(("row", "chat"), DIALECTS.values(), ids=DIALECTS)
def test_dialects_of_other_trainers(qwen, rows, row, chat):
    tokens, labels = render_conversation(qwen, chat)
    assert sft_dataset(qwen, source=rows(row))[0] == {"tokens": tokens, "labels": labels}


def test_arguments_of_the_dataset(qwen, rows):
    columns = {"prompt": "question", "completion": "answer"}
    mapped = sft_dataset(
        qwen, source=rows({"question": "q", "answer": "a", "text": "x"}), column_map=columns
    )
    assert mapped[0]["tokens"] == render_conversation(qwen, QA)[0]
    whole = sft_dataset(qwen, source=rows({"messages": QA}), train_on_input=True)[0]
    assert whole["tokens"] == whole["labels"] == mapped[0]["tokens"]
    with_system = {"conversations": [{"from": "system", "value": "s"}, *SHAREGPT]}
    found = sft_dataset(qwen, source=rows(PAIR, with_system), system_prompt="default")
    default = {"role": "system", "content": "default"}
    assert [found[i]["tokens"] for i in (0, 1)] == [
        render_conversation(qwen, [s, *QA])[0] for s in (default, SYSTEM)
    ]


BAD_MESSAGES = [
    ([user("q")], "no assistant turn to train on"), ("[{", "a text that is not valid JSON"),
    (["q"], "message 0.*must be an object.*str"),
    ([{"role": "bot", "content": "q"}], f"message 0: unknown role 'bot'.*{', '.join(ROLES)}"),
    ([user("q"), assistant(" \n")], "message 1.*empty"),
    ([user([{"type": "image_url"}]), assistant("a")], "'image_url'.*no images"),
    ([user("q"), assistant("a", weight=0.5)], "weight must be 0 or 1.*0.5"),
    ([user("q"), assistant("a", train=True, weight=0)], "message 1: weight and train contradict"),
    ([user("q") | {"train": True}, assistant("a")], "message 0: train is True.*the assistant's"),
    ([user("q"), assistant("a", train_detail=[])], "message 1: train_detail.*not supported"),
    ([user("q"), {"role": "function_call", "content": "f()"}], "message 1: the call is not valid"),
]  # fmt: skip
BAD_ROWS = [({"messages": messages}, says) for messages, says in BAD_MESSAGES] + [
    ({"prompt": "q", "completion": 7}, "completion must be a string.*int"), ({"text": ""}, "text is empty"),
    ({"prompt": "q", "completion": "\ud800"}, "UnicodeEncodeError.*surrogates"),
    ({"question": "q"}, r"\['question'\] do not fit any schema; use column_map.*prompt \+ completion"),
    ({**PAIR, "label": False}, "label is False.*dpo_rocm"),
    ({"conversations": [*SHAREGPT, SHAREGPT[0]], "chosen": "a", "rejected": "b"}, r"a pair \(chosen, rejected\)"),
    ({**ALPACA, "text": "x"}, "alpaca and text.*set schema"),
    ({**ALPACA, "thumbs": "up"}, "thumbs is up.*KTO"),
    ({**ALPACA, "history": [["q"]]}, r"history must be a list of pairs.*\[\['q'\]\]"),
]  # fmt: skip


def test_weights_of_rows(qwen, rows, messages):
    four = (
        {"text": "x", "weight": 2},
        PAIR,
        {"messages": QA, "weight": "0.5"},
        {**ALPACA, "weight": 0},
    )
    found = read(sft_dataset(qwen, source=(source := rows(*four))))
    weights = [set(column.tolist()) for column in found.columns["weight"]]
    assert weights == [{2.0}, {1.0}, {0.5}]
    assert (found.counts["dropped_weight_0"], found.first["dropped_weight_0"]) == (1, f"{source}:4")
    assert [set(column.tolist()) for column in found.part([2]).columns["weight"]] == [{0.5}]
    assert not [text for text in messages if "not used" in text]
    assert read(sft_dataset(qwen, source=rows({**PAIR, "weight": 1}, PAIR))).columns == {}
    with pytest.raises(UserError, match=r"0 of 2 rows left: .*, 2 have weight 0$"):
        read(sft_dataset(qwen, source=rows({**PAIR, "weight": 0}, {**PAIR, "weight": "0.0"})))
    wrong = [-1, "much", float("nan"), float("inf"), True, [1], 1e-40]
    with pytest.raises(UserError, match=r"^7 of 8 rows are bad: ") as error:
        read(
            sft_dataset(qwen, source=rows(PAIR, *({**PAIR, "weight": weight} for weight in wrong)))
        )
    for i, weight in enumerate(wrong, 2):
        assert f"rows.jsonl:{i}: weight is {weight!r}; expected a number of at least 0" in str(
            error.value
        )


@pytest.mark.parametrize(("row", "says"), BAD_ROWS, ids=str)
def test_bad_rows_are_named(qwen, rows, row, says):
    found = sft_dataset(qwen, source=(source := rows({"messages": QA}, row)))
    assert found[0]
    with pytest.raises(UserError, match=f"{source}:2: .*({says})") as error:
        found[1]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"schema": "mesages"}, r"'mesages'.*did you mean messages.*sharegpt \(conversations\)"),
        ({"column_map": {"prompt": "question"}}, r"\['question'\].*\['messages'\]"),
        ({"split": "test"}, "test.*the splits are train"), ({"split": "train[5:]"}, r"has no rows.*train\[5:\]"),
    ],
)  # fmt: skip
def test_bad_arguments(qwen, rows, arguments, says):
    with pytest.raises(UserError, match=says):
        sft_dataset(qwen, source=rows({"messages": QA}), **arguments)[0]


# ---- files
def write(path, content):
    """Write bytes or text, compressed where the name says so."""
    content = content if isinstance(content, bytes) else content.encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def answers(qwen, dataset):
    return [
        text.removesuffix("<|im_end|>")
        for i in range(len(dataset))
        for text in labelled(qwen, dataset[i]["labels"])
    ]


def test_jsonl_origins_count_lines(qwen, tmp_path):
    line = json.dumps(PAIR)
    text = f'\ufeff{line}\r\n\n{{"prompt": "a\u2028b", "completion": "c"}}\n{line}'
    found = sft_dataset(qwen, source=(source := write(tmp_path / "a.jsonl", text)))
    assert [found.origin(i) for i in range(len(found))] == [
        f"{source}:{line}" for line in (1, 3, 4)
    ]
    assert "a\u2028b" in qwen.decode(found[1]["tokens"])


LINES = '{"prompt": "q", "completion": "a"}\n{"prompt": "q", "completion": "b"}\n'
LIST = f"[{LINES.strip()}]".replace("\n", ", ")
FORMS = [
    ("a.jsonl.gz", LINES, ":2"), ("a.ndjson", LINES, ":2"),
    ("a.json", LINES, ":2"), ("a.json", LIST, " row 1"), ("a.json.gz", LIST, " row 1"),
    ("a.json", f'{{"version": 1, "data": {LIST}}}', " row 1"),
    ("a.csv", "prompt,completion\nq,a\nq,b\n", "[train] row 1"),
]  # fmt: skip


def test_splits_globs_and_folders(qwen, rows, tmp_path, hf_cache, monkeypatch):
    """Splits of folders are those of datasets."""
    rows(*[{"messages": QA}] * 8, name="a.jsonl")
    rows(*[{"text": "x"}] * 2, name="b.jsonl")
    assert len(sft_dataset(qwen, source=str(tmp_path / "*.jsonl"))) == 10
    found = sft_dataset(qwen, source=str(tmp_path / "*.jsonl"), split="train[70%:]")
    assert [found.origin(i).rsplit("/")[-1] for i in range(3)] == [
        "a.jsonl:8",
        "b.jsonl:1",
        "b.jsonl:2",
    ]
    rows(*[{"messages": QA}] * 2, name="folder/train.jsonl")
    rows({"messages": QA}, name="folder/test.jsonl")
    assert len(sft_dataset(qwen, source=str(tmp_path / "folder"), split="test")) == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(sft_dataset(qwen, source="~/folder")) == 2


@pytest.mark.parametrize(("name", "text", "where"), FORMS)
def test_forms_of_files(qwen, tmp_path, hf_cache, name, text, where):
    found = sft_dataset(qwen, source=(source := write(tmp_path / name, text)))
    assert answers(qwen, found) == ["a", "b"]
    assert found.origin(1) == f"{source}{where}"
    one = write(tmp_path / "one.json", json.dumps(PAIR, indent=1))
    assert answers(qwen, sft_dataset(qwen, source=one)) == ["a"], (
        "one object over several lines is a row"
    )


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"text": "a"}\n{"a": \n', "a.jsonl:2: malformed JSON.*Expecting value"),
        ("a.jsonl", '{"text": "a"}\n[1]\n', "a.jsonl:2.*must be a JSON object.*list"),
        ("a.jsonl", "", "has no rows"),
        ("a.txt", "x", 'expected .jsonl, .*JSON lines, {"text"'),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl: cannot read it as UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9], "a.jsonl.gz: cannot read it"),
        ("a.parquet", "not parquet", "a.parquet: cannot load split 'train'"),
    ],
)  # fmt: skip
def test_bad_files(qwen, tmp_path, hf_cache, name, content, says):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=says) as error:
        read(sft_dataset(qwen, source=str(tmp_path / name)), too_long="error")
    assert "hub" not in str(error.value)


def test_bad_rows_are_named_together_or_dropped(qwen, tmp_path, messages):
    bad = ["{torn", "[1]", '{"prompt": "q"}', '{"prompt": "q", "completion": 7}'] * 3
    lines = [json.dumps({"prompt": f"q{i}", "completion": f"a{i}"}) for i in range(30)]
    mixed = [line for pair in zip(lines, bad, strict=False) for line in pair] + lines[len(bad) :]

    def read(text, **policy):
        dataset = sft_dataset(qwen, source=write(tmp_path / "mixed.jsonl", "\n".join(text)))
        return tokenize(dataset, max_seq_len=None, too_long="error", progress=False, **policy)

    with pytest.raises(UserError, match=r"^12 of 42 rows are bad: .*bad_rows=drop") as error:
        read(mixed)
    said = str(error.value)
    assert {int(number) for number in re.findall(r"mixed.jsonl:(\d+)", said)} == {
        2 * i for i in range(1, 13)
    }
    assert said.count("lack") + said.count("do not fit") == 1, "each reason once"
    kept, whole = read(mixed, bad_rows="drop"), read(lines)
    assert kept.counts == {**whole.counts, "rows": 42, "bad_rows": 12}
    assert [ids.tolist() for ids in kept.tokens] == [ids.tolist() for ids in whole.tokens]
    assert any("12 of 42 rows are bad" in text for text in messages)
    with pytest.raises(UserError, match=r"100 of 100 rows are bad: .*do the dataset's keys fit"):
        read(["{torn"] * 5000, bad_rows="drop")


@pytest.mark.parametrize("source", ["./nowhere", "no*where.parquet", "/a/b/c"])
def test_missing_and_mixed_files(qwen, tmp_path, source):
    with pytest.raises(UserError, match="no such file or folder") as error:
        sft_dataset(qwen, source=source)
    assert source in str(error.value)
    for name in ("a.jsonl", "a.csv"):
        write(tmp_path / name, "x")
    with pytest.raises(UserError, match="all of one kind"):
        sft_dataset(qwen, source=str(tmp_path / "a.*"))


@pytest.fixture
def hf_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_folders_of_save_to_disk(qwen, tmp_path):
    lines = [{"prompt": "q", "completion": text} for text in "abc"]
    saved = {
        "train": datasets.Dataset.from_list(lines[:2]),
        "test": datasets.Dataset.from_list(lines[2:]),
    }
    datasets.DatasetDict(saved).save_to_disk(folder := str(tmp_path / "rows"))
    for split, expected in (("train[1:]", "b"), ("train+test", "abc")):
        assert answers(qwen, sft_dataset(qwen, source=folder, split=split)) == [*expected]
    with pytest.raises(UserError, match=r"split 'dev': .*the splits are train, test"):
        sft_dataset(qwen, source=folder, split="dev")
    with pytest.raises(UserError, match="data_files and name do not apply"):
        sft_dataset(qwen, source=folder, name="sums")


def test_hub(qwen, monkeypatch):
    calls = []

    def load(*args, **kwargs):
        calls.append((args, kwargs))
        if len(calls) > 1:
            raise ConnectionError("Couldn't reach\nthe Hub")
        return datasets.Dataset.from_list([{"messages": QA}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = sft_dataset(qwen, source="owner/name", name="main", data_files="x.json", split="test")
    assert calls == [(("owner/name", "main"), {"data_files": "x.json", "split": "test"})]
    assert found.origin(0) == "owner/name[test] row 0"
    with pytest.raises(
        UserError,
        match=r"owner/name.*ConnectionError: Couldn't reach the Hub.*No file.*hf download",
    ):
        sft_dataset(qwen, source="owner/name")


# ---- tokenize
def item(length, masked=1):
    tokens = list(range(1, length + 1))
    return {"tokens": tokens, "labels": [IGNORE] * min(masked, length) + tokens[masked:]}


def read(dataset, max_seq_len=None, too_long="truncate"):
    return tokenize(dataset, max_seq_len=max_seq_len, too_long=too_long, progress=False)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=8),
    limit=st.one_of(st.none(), st.integers(1, 10)),
    policy=st.sampled_from(["truncate", "drop"]),
)
def test_counts_add_up(sizes, limit, policy):
    items = [item(*size) for size in sizes]
    fits = [limit is None or length <= limit for length, _ in sizes]
    # No position predicts position 0, so a label there does not count.
    trains = [max(masked, 1) < min(length, limit or length) for length, masked in sizes]
    kept = [t and (f or policy == "truncate") for t, f in zip(trains, fits, strict=True)]
    if not any(kept):
        with pytest.raises(UserError, match=f"0 of {len(sizes)} rows left"):
            read(Foreign(*items), limit, policy)
        return
    rows = read(Foreign(*items), limit, policy)
    chosen = [row for row, keep in zip(items, kept, strict=True) if keep]
    assert [row.tolist() for row in rows.tokens] == [row["tokens"][:limit] for row in chosen]
    assert [row.tolist() for row in rows.labels] == [row["labels"][:limit] for row in chosen]
    assert rows.lengths == [(len(row),) for row in rows.tokens]
    assert {row.dtype for row in [*rows.tokens, *rows.labels]} == {np.dtype(np.int32)}
    dropped = sum(not f for f in fits) if policy == "drop" else 0
    assert rows.counts == {
        "rows": len(sizes),
        "truncated": sum(k and not f for k, f in zip(kept, fits, strict=True)),
        "dropped_too_long": dropped,
        "dropped_without_labels": len(sizes) - len(rows) - dropped,
    }


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (ValueError("no\nluck"), "no luck"),
        ({"tokens": [1]}, "needs tokens and labels"),
        ({"tokens": [1, 2], "labels": [1]}, "one length"), ({**item(3), "encoder_input": {}}, "images.*text models"),
        ({**item(3), "seq_lens": [2]}, "seq_lens add up to 2.*3 tokens"),
    ],
)  # fmt: skip
def test_bad_items_are_named_once(bad, says):
    with pytest.raises(UserError, match=f"Foreign row 1.*{says}") as error:
        read(Foreign(item(3), bad))
    assert str(error.value).count("Foreign row 1") == 1


@pytest.mark.parametrize(
    ("limit", "lengths"), [(None, (4, 3, 2)), (8, (4, 3, 1)), (5, (4, 1)), (4, (4,)), (3, (3,))]
)
def test_packs_lose_their_padding_and_are_cut(limit, lengths):
    source = Foreign(item(4), item(3), item(2))
    rows = read(PackedDataset(source, max_seq_len=10, padding_idx=3), limit)
    assert (rows.lengths, rows.counts["truncated"]) == ([lengths], int(limit is not None))
    for name, (found,) in (("tokens", rows.tokens), ("labels", rows.labels)):
        assert found.tolist() == [each for i in range(3) for each in source[i][name]][:limit]
    split = read(PackedDataset(source, max_seq_len=6, split_across_pack=True), limit and limit + 9)
    assert split.lengths == [(4, 2), (1, 2)]


def test_fingerprint_sees_everything():
    def fingerprint(*items):
        return read(Foreign(*items)).fingerprint()

    base = fingerprint(item(5), item(3))
    assert base == fingerprint(item(5), item(3))
    split = {**item(5), "seq_lens": [2, 3]}
    others = [(item(3), item(5)), (item(5),), (item(5, masked=2), item(3)), (split, item(3))]
    assert len({base, *(fingerprint(*other) for other in others)}) == 5


# ---- open_dataset
def node(**kwargs):
    return OmegaConf.create({"_component_": "rocm_ext.data.sft_dataset", **kwargs})


def test_open_one_and_several(qwen, rows):
    a, b = rows(*[{"messages": QA}] * 2, name="a.jsonl"), rows({"q": "q", "a": "a"}, name="b.jsonl")
    second = node(source=b, column_map={"prompt": "q", "completion": "a"})
    assert len(open_dataset(second, qwen, "truncate")) == 1
    both = open_dataset(OmegaConf.create([node(source=a), second]), qwen, "truncate")
    assert [origin_of(both, i) for i in range(len(both))] == [f"{a}:1", f"{a}:2", f"{b}:1"]
    assert len(read(both)) == 3
    mixed = OmegaConf.create([node(source=a, weight=1), {**second, "weight": 2.0}])
    found = read(open_dataset(mixed, qwen, "truncate"))
    assert found.fingerprint() == read(both).fingerprint()
    mixture = Mixture.of(mixed, found)
    assert (mixture.names, mixture.rows, mixture.weights, mixture.shares) == (
        (a, b),
        (2, 1),
        (1.0, 2.0),
        [1, 2],
    )


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ((1, 0), "dataset.1.weight is 0; expected a number above 0"),
        ((True, 1), "dataset.0.weight is True"),
        ((1, None), "1 of 2 entries of dataset have a weight"),
        ((1, 1e-6), r"dataset b.jsonl: its weight is too small for an epoch of 4 rows"),
        ((1, 1), r"dataset b.jsonl: no row of it is left"),
    ],
)  # fmt: skip
def test_bad_weights(weights, says):
    rows = Rows([[1]] * 4, [[1]] * 4, [(1,)] * 4, {}, numbers=[0, 1, 2, 5], ends=[3, 6])
    if "is left" in says:
        rows = rows.part(range(3))
    nodes = [
        node(source=name, weight=w) for name, w in zip(("a.jsonl", "b.jsonl"), weights, strict=True)
    ]
    with pytest.raises(UserError, match=says) as error:
        Mixture.of(OmegaConf.create(nodes), rows).check()
    assert "\n" not in str(error.value)


def test_rows_of_stock_datasets_are_cut_and_counted_by_us(tmp_path, rows, hf_cache):
    short = make_qwen(tmp_path, max_seq_len=20)
    source = rows({"input": "q", "output": "a" * 30}, {"input": "q", "output": "a"})
    stock = {
        "_component_": "torchtune.datasets.instruct_dataset",
        "source": "json",
        "data_files": source,
    }

    def found(policy, **more):
        return read(
            open_dataset(OmegaConf.create({**stock, "split": "train", **more}), short, policy),
            20,
            policy,
        )

    dropped, cut = found("drop"), found("truncate")
    assert (len(dropped), dropped.counts["dropped_too_long"]) == (1, 1)
    assert (len(cut), cut.counts["truncated"]) == (2, 1)
    assert found("drop").fingerprint() == dropped.fingerprint(), "the tokenizer is as it was"
    packed = found("truncate", packed=True, split="train[1:]")
    assert packed.lengths == [(len(packed.tokens[0]),)]


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        (node(sauce="x"), "rocm_ext.data.sft_dataset.*TypeError.*sauce"), (OmegaConf.create([]), "needs a _component_"),
        (OmegaConf.create({"_component_": "rocm_ext.data.sft"}), "rocm_ext.data.sft.*cannot be imported"),
        (node(source="nowhere.jsonl"), "nowhere.jsonl: no such file"),
    ],
)  # fmt: skip
def test_bad_components(qwen, cfg, says):
    with pytest.raises(UserError, match=says) as error:
        open_dataset(cfg, qwen, "truncate")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="map-style"):
        read(iter([item(3)]))
