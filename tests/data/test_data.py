"""Rendering, schemas, files, tokenisation and datasets."""

import base64
import gzip
import json
import re

import datasets
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torchtune.datasets import PackedDataset
from torchtune.models.llama3 import Llama3Tokenizer
from torchtune.models.qwen2_5 import qwen2_5_tokenizer
from torchtune.models.qwen2_5._tokenizer import QWEN2_5_SPECIAL_TOKENS

from rocm_ext.base.errors import UserError
from rocm_ext.data import loading, sft_dataset
from rocm_ext.data.dialects import FLAGS, ROLES
from rocm_ext.data.render import IGNORE, render_conversation, render_prompt
from rocm_ext.data.rows import open_dataset, origin_of, tokenize
from tests.kit.lines import one_line_has

TEXT = ["Natalia sold clips to 48 of her friends.", "user system assistant tool_response\n", "7 * 6 = 42"]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_qwen(tmp_path_factory.mktemp("qwen"))


def make_qwen(folder, **kwargs):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = list(QWEN2_5_SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(TEXT, trainer)
    bpe.model.save(str(folder))
    bpe.add_special_tokens(special)
    bpe.save(str(folder / "tokenizer.json"))
    paths = [str(folder / file) for file in ("vocab.json", "merges.txt", "tokenizer.json")]
    return qwen2_5_tokenizer(*paths, **kwargs)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "tokenizer.model"
    words = [bytes([byte]) for byte in range(256)] + [b"us", b"er", b"user", b"as", b"ass"]
    path.write_text("".join(f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words)))
    return Llama3Tokenizer(str(path))


@pytest.fixture(params=["qwen", "llama"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def write(tmp_path):
    def write(rows, name="train.jsonl"):
        path = tmp_path / name
        lines = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(lines, encoding="utf-8")
        return str(path)

    return write


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def decode(tokenizer, tokens):
    if isinstance(tokenizer, Llama3Tokenizer):
        return tokenizer.decode(tokens, truncate_at_eos=False, skip_special_tokens=False)
    return tokenizer.decode(tokens)


def labelled(tokenizer, labels):
    """Return the text of each run of labels."""
    runs, run = [], []
    for label in [*labels, IGNORE]:
        if label != IGNORE:
            run.append(label)
        elif run:
            runs.append(decode(tokenizer, run))
            run = []
    return runs


# ---- rendering


def test_qwen_prompt_is_the_text_that_the_model_was_trained_on(qwen):
    tokens = render_prompt(qwen, [{"role": "system", "content": "Be brief."}, user("6*7?")])
    assert qwen.decode(tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama_prompt_is_the_text_that_the_model_was_trained_on(llama):
    assert decode(llama, render_prompt(llama, [user("6*7?")])) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n6*7?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_every_assistant_turn_is_labelled_with_its_end_and_without_its_header(tokenizer):
    chat = [user("a"), assistant("one"), user("b"), assistant("two"), user("left out")]
    tokens, labels = render_conversation(tokenizer, chat)
    end = "<|im_end|>" if tokenizer.special_tokens.get("<|im_end|>") else "<|eot_id|>"
    assert labelled(tokenizer, labels) == ["one" + end, "two" + end]
    assert all(label in (IGNORE, token) for label, token in zip(labels, tokens, strict=True))
    assert "left out" not in decode(tokenizer, tokens)


def test_assistant_turns_in_a_row_lose_both_headers(tokenizer):
    chat = [user("a"), assistant("one"), assistant("two"), assistant("three")]
    tokens, labels = render_conversation(tokenizer, chat)
    assert [text.split("<|")[0] for text in labelled(tokenizer, labels)] == ["one", "two", "three"]
    assert tokens[: len(render_prompt(tokenizer, chat[:2]))] == render_prompt(tokenizer, chat[:2])


def test_weight_zero_is_masked(tokenizer):
    chat = [user("a"), assistant("bad", weight=0), user("b"), assistant("good", weight=1)]
    _, labels = render_conversation(tokenizer, chat)
    assert [text.split("<|")[0] for text in labelled(tokenizer, labels)] == ["good"]


@pytest.mark.parametrize("off", [0, 0.0, False])
@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_other_trainers_are_weights(qwen, write, flag, off):
    chat = [user("a"), assistant("bad", **{flag: off}), user("b") | {flag: off}, assistant("good", **{flag: 1})]
    item = sft_dataset(qwen, source=write([{"messages": chat}]))[0]
    assert labelled(qwen, item["labels"]) == ["good<|im_end|>"]
    plain = [{key: value for key, value in message.items() if key != flag} for message in chat]
    assert item["tokens"] == render_conversation(qwen, plain)[0], "the template does not see it"


def test_train_on_input_labels_everything(tokenizer):
    tokens, labels = render_conversation(tokenizer, [user("a"), assistant("b")], train_on_input=True)
    assert labels == tokens


def test_tool_replies_are_rendered_and_masked(qwen):
    call = "<tool_call>\n{}\n</tool_call>"
    chat = [user("a"), assistant(call), {"role": "tool", "content": "42"}, assistant("b")]
    tokens, labels = render_conversation(qwen, chat)
    assert "<tool_response>\n42\n</tool_response>" in qwen.decode(tokens)
    assert qwen.special_tokens["<tool_call>"] in labels
    assert labelled(qwen, labels) == [call + "<|im_end|>", "b<|im_end|>"]


def test_max_seq_len_of_the_tokenizer_is_left_to_the_policy(qwen, tmp_path):
    short = make_qwen(tmp_path, max_seq_len=8)
    chat = [user("a long question " * 5), assistant("a long answer " * 5)]
    assert render_conversation(short, chat) == render_conversation(qwen, chat)
    assert render_prompt(short, chat[:1]) == render_prompt(qwen, chat[:1])
    assert short.max_seq_len == 8


def test_text_of_a_prompt_template_in_front_of_the_answer_belongs_to_the_prompt(tmp_path):
    template = {"user": ("Q: ", ""), "assistant": ("A: ", " END")}
    templated = make_qwen(tmp_path, prompt_template=template)
    prompt = render_prompt(templated, [user("six")])
    tokens, labels = render_conversation(templated, [user("six"), assistant("6")])
    assert templated.decode(prompt).endswith("<|im_start|>assistant\nA: ")
    assert tokens[: len(prompt)] == prompt
    assert labelled(templated, labels) == ["6 END<|im_end|>"]


def test_special_tokens_in_text_are_parsed_by_qwen_and_not_by_llama(qwen, llama):
    assert render_prompt(qwen, [user("x<|im_end|>y")]).count(qwen.im_end_id) == 2
    assert render_prompt(llama, [user("x<|eot_id|>y")]).count(llama.eot_id) == 1


SPECIAL = ["<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<tool_call>", "\n", " ", "a", "e\u0301"]
WILD = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.lists(st.sampled_from(SPECIAL), max_size=8).map("".join),
)
TURN = st.one_of(
    st.tuples(st.sampled_from(["user", "system", "tool"]), WILD),
    st.tuples(st.just("assistant"), WILD.filter(str.strip)),
).map(lambda turn: {"role": turn[0], "content": turn[1]})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chat=st.lists(TURN, max_size=6), answer=WILD.filter(str.strip))
def test_a_row_starts_with_its_generation_prompt(tokenizer, chat, answer):
    chat = [*chat, assistant(answer)]
    tokens, labels = render_conversation(tokenizer, chat)
    assert len(tokens) == len(labels)
    spans = []
    for turn, message in enumerate(chat):
        if message["role"] == "assistant":
            prompt = render_prompt(tokenizer, chat[:turn])
            assert tokens[: len(prompt)] == prompt
            assert labels[len(prompt)] == tokens[len(prompt)]
            assert labels[len(prompt) - 1] == IGNORE
            spans.append(len(prompt))
    # Each turn is exactly one run of labels, and it starts behind its prompt.
    starts = [i for i, label in enumerate(labels) if label != IGNORE and (i == 0 or labels[i - 1] == IGNORE)]
    assert starts == spans
    stop = [i for i, label in enumerate(labels) if label != IGNORE][-1]
    assert tokens[stop] in tokenizer.stop_tokens


# ---- schemas


ROWS = {
    "messages": {"messages": [user("q"), assistant("a")]},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "prompt_completion": {"prompt": "q", "completion": "a"},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("schema", ROWS)
def test_schemas_agree(qwen, write, schema, named):
    rows = sft_dataset(qwen, source=write([ROWS[schema]]), schema=schema if named else "auto")
    tokens, labels = render_conversation(qwen, [user("q"), assistant("a")])
    assert len(rows) == 1
    assert rows[0] == {"tokens": tokens, "labels": labels}


def test_heterogeneous_rows(qwen, write):
    mixed = [{"text": "plain"}, *ROWS.values(), {"prompt": [user("q")], "completion": "a"}]
    rows = sft_dataset(qwen, source=write(mixed))
    assert len({tuple(rows[i]["tokens"]) for i in range(1, len(mixed))}) == 1


def test_prompt_and_completion_as_messages(qwen, write):
    row = {"prompt": [user("q")], "completion": [assistant("a")]}
    assert sft_dataset(qwen, source=write([row]))[0] == sft_dataset(qwen, source=write([ROWS["messages"]]))[0]


DIALECTS = {
    "developer": ({"messages": [{"role": "developer", "content": "s"}, *ROWS["messages"]["messages"]]},
                  [{"role": "system", "content": "s"}, user("q"), assistant("a")]),
    "history": ({**ROWS["alpaca"], "history": [["b", "c"]], "system": "s"},
                [{"role": "system", "content": "s"}, user("b"), assistant("c"), user("q"), assistant("a")]),
    "history as text": ({**ROWS["alpaca"], "history": '[["b", "c"]]'},
                        [user("b"), assistant("c"), user("q"), assistant("a")]),
    "no history": ({**ROWS["alpaca"], "history": []}, [user("q"), assistant("a")]),
    "text": ({"conversations": json.dumps(ROWS["sharegpt"]["conversations"]), "system": "s"},
             [{"role": "system", "content": "s"}, user("q"), assistant("a")]),
}  # fmt: skip


@pytest.mark.parametrize("case", DIALECTS)
def test_dialects_of_other_trainers(qwen, write, case):
    row, chat = DIALECTS[case]
    tokens, labels = render_conversation(qwen, chat)
    assert sft_dataset(qwen, source=write([row]))[0] == {"tokens": tokens, "labels": labels}


def test_alpaca_input_follows_a_blank_line(qwen, write):
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert "user\nAdd.\n\n1 2<|im_end|>" in qwen.decode(sft_dataset(qwen, source=write([row]))[0]["tokens"])


def test_text_is_all_trained_and_ended(tokenizer, write):
    item = sft_dataset(tokenizer, source=write([{"text": "plain"}]))[0]
    assert item["tokens"] == item["labels"]
    assert item["tokens"][-1] == tokenizer.eos_id
    assert "plain" in decode(tokenizer, item["tokens"])


def test_text_parts_are_joined(qwen, write):
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "?"}]
    rows = sft_dataset(qwen, source=write([{"messages": [user(parts), assistant("a")]}]))
    assert "q?<|im_end|>" in qwen.decode(rows[0]["tokens"])


def test_column_map(qwen, write):
    source = write([{"question": "q", "answer": "a", "text": "x"}])
    rows = sft_dataset(qwen, source=source, column_map={"prompt": "question", "completion": "answer"})
    assert rows[0]["tokens"] == render_conversation(qwen, [user("q"), assistant("a")])[0]


def test_system_prompt_only_where_there_is_none(qwen, write):
    with_system = {"conversations": [{"from": "system", "value": "mine"}, *ROWS["sharegpt"]["conversations"]]}
    source = write([ROWS["prompt_completion"], with_system])
    rows = sft_dataset(qwen, source=source, system_prompt="default")
    texts = [qwen.decode(item["tokens"]) for item in (rows[0], rows[1])]
    assert [text.count("<|im_start|>system\n") for text in texts] == [1, 1]
    assert "default" in texts[0]
    assert "default" not in texts[1]


def test_train_on_input_of_the_dataset(qwen, write):
    item = sft_dataset(qwen, source=write([ROWS["messages"]]), train_on_input=True)[0]
    assert item["tokens"] == item["labels"]


@pytest.mark.parametrize(
    ("row", "pieces"),
    [
        ({"messages": [user("q")]}, ["no assistant turn to train on"]),
        ({"messages": []}, ["no assistant turn"]),
        ({"messages": [user("q"), assistant("a", weight=0)]}, ["no assistant turn"]),
        ({"messages": "q"}, ["must be a list of messages", "not valid JSON"]),
        ({"messages": ["q"]}, ["message 0", "must be an object", "str"]),
        ({"messages": [{"role": "bot", "content": "q"}]}, ["message 0", "unknown role 'bot'", *ROLES]),
        ({"messages": [{"content": "q"}]}, ["unknown role None"]),
        ({"messages": [user("q"), assistant(" \n")]}, ["message 1", "empty"]),
        ({"messages": [user("q"), assistant(None)]}, ["message 1", "content must be a string", "NoneType"]),
        ({"messages": [user(3), assistant("a")]}, ["message 0", "content must be a string", "int"]),
        ({"messages": [user([{"type": "image_url"}]), assistant("a")]}, ["'image_url'", "no images"]),
        ({"messages": [user(["q"]), assistant("a")]}, ["type 'str'"]),
        ({"messages": [user([{"type": "text"}]), assistant("a")]}, ["text must be a string"]),
        ({"messages": [user("q"), assistant("a", weight=0.5)]}, ["weight must be 0 or 1", "0.5"]),
        ({"messages": [user("q"), assistant("a", loss_mask=[0, 1])]}, ["loss_mask must be 0 or 1", "[0, 1]"]),
        ({"messages": [user("q"), assistant("a", loss="false")]}, ["loss must be 0 or 1", "'false'"]),
        ({"messages": [user("q"), assistant("a", train=True, weight=0)]}, ["message 1: weight and train contradict"]),
        ({"messages": [user("q") | {"train": True}, assistant("a")]}, ["message 0: train is True", "the assistant's"]),
        ({"messages": [user("q"), assistant("a", train_detail=[])]}, ["message 1: train_detail", "not supported"]),
        ({"messages": [user("q"), assistant("", tool_calls=[{}])]}, ["message 1", "tool_calls"]),
        ({"prompt": "q", "completion": 7}, ["completion must be a string", "int"]),
        ({"instruction": "q", "input": 1, "output": "a"}, ["input must be a string"]),
        ({"text": ""}, ["text is empty"]),
        ({"prompt": "q", "completion": "\ud800"}, ["UnicodeEncodeError", "surrogates"]),
        ({"question": "q"}, ["['question']", "do not fit any schema", "prompt + completion", "column_map"]),
        ({"prompt": "q", "completion": None}, ["completion is null"]),
        ({"messages": None, "id": 1}, ["messages is null"]),
        ({"prompt": "q", "completion": "a", "label": False}, ["label is False", "KTO", "dpo_rocm"]),
        ({**ROWS["alpaca"], "kto_tag": "true"}, ["kto_tag is true", "KTO"]),
        ({**ROWS["alpaca"], "history": [["q"]]}, ["history must be a list of pairs", "[['q']]"]),
        ({"messages": "[{"}, ["messages must be a list of messages, found a text that is not valid JSON"]),
        ({"messages": [user("q"), {"role": "function_call", "content": "f()"}]}, ["message 1: the call is not valid"]),
        ({**ROWS["alpaca"], "text": "x"}, ["fit alpaca and text", "set schema"]),
    ],
)
def test_bad_rows_are_named(qwen, write, row, pieces):
    source = write([ROWS["messages"], row])
    rows = sft_dataset(qwen, source=source)
    rows[0]
    with pytest.raises(UserError) as error:
        rows[1]
    for piece in [f"{source}:2: ", *pieces]:
        assert piece in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kwargs", "pieces"),
    [
        ({"schema": "mesages"}, ["'mesages'", "did you mean messages", "sharegpt (conversations)"]),
        ({"column_map": {"promt": "messages"}}, ["'promt'", "did you mean prompt"]),
        ({"column_map": {"prompt": "question"}}, ["['question']", "['messages']"]),
        ({"split": "test"}, ["test", "the splits are train"]),
        ({"split": "train[5:]"}, ["has no rows", "train[5:]"]),
        ({"name": "main"}, ["is a file", "name"]),
    ],
)
def test_bad_arguments(qwen, write, kwargs, pieces):
    with pytest.raises(UserError) as error:
        sft_dataset(qwen, source=write([ROWS["messages"]]), **kwargs)
    for piece in pieces:
        assert piece in str(error.value)


def test_named_schema_that_does_not_fit(qwen, write):
    rows = sft_dataset(qwen, source=write([ROWS["messages"]]), schema="alpaca")
    with pytest.raises(UserError, match=r"train.jsonl:1: .*\['messages'\] fit schema messages, not alpaca"):
        rows[0]


# ---- files


def test_jsonl_origins_count_lines(qwen, write):
    line = json.dumps(ROWS["prompt_completion"])
    source = write(f'\ufeff{line}\r\n\n{{"prompt": "a\u2028b", "completion": "c"}}\n{line}')
    rows = sft_dataset(qwen, source=source)
    assert [rows.origin(i) for i in range(len(rows))] == [f"{source}:{line}" for line in (1, 3, 4)]
    assert "a\u2028b" in qwen.decode(rows[1]["tokens"])


def test_json_list_and_lines(qwen, write):
    rows = sft_dataset(qwen, source=write(json.dumps([ROWS["messages"]] * 2, indent=1), "a.json"))
    assert len(rows) == 2
    assert rows.origin(1).endswith("a.json row 1")
    assert sft_dataset(qwen, source=write([ROWS["messages"]], "b.json")).origin(0).endswith("b.json:1")


def test_splits_and_globs(qwen, write, tmp_path):
    write([ROWS["messages"]] * 8, "a.jsonl")
    write([{"text": "x"}] * 2, "b.jsonl")
    assert len(sft_dataset(qwen, source=str(tmp_path / "*.jsonl"))) == 10
    rows = sft_dataset(qwen, source=str(tmp_path / "*.jsonl"), split="train[70%:]")
    assert [rows.origin(i).rsplit("/")[-1] for i in range(3)] == ["a.jsonl:8", "b.jsonl:1", "b.jsonl:2"]


@pytest.mark.parametrize(
    ("text", "name", "pieces"),
    [
        ('{"text": "a"}\n{"a": \n', "train.jsonl", ["train.jsonl:2: malformed JSON", "Expecting value"]),
        ('{"text": "a"}\n[1]\n', "train.jsonl", ["train.jsonl:2", "must be a JSON object", "list"]),
        ("[1]", "train.json", ["train.json row 0", "must be a JSON object", "int"]),
        ("[" * 200_000, "train.jsonl", ["train.jsonl:1: malformed JSON"]),
        ("", "train.jsonl", ["has no rows"]),
        ("[]", "train.json", ["has no rows"]),
        ("x", "train.txt", ["train.txt", "expected .jsonl, .json, .parquet, .csv, .tsv files"]),
    ],
)
def test_bad_files(qwen, write, text, name, pieces):
    with pytest.raises(UserError) as error:
        tokenize(sft_dataset(qwen, source=write(text, name)), max_seq_len=None, too_long="error", progress=False)
    for piece in pieces:
        assert piece in str(error.value)


def test_bad_rows_are_named_together_or_dropped(qwen, write, messages):
    good = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(30)]
    bad = ["{torn", "[1]", '{"prompt": "q"}', '{"prompt": "q", "completion": 7}'] * 3
    lines = [json.dumps(row) for row in good]
    mixed = [line for pair in zip(lines, bad, strict=False) for line in pair] + lines[len(bad) :]

    def read(text, **policy):
        dataset = sft_dataset(qwen, source=write("\n".join(text), "mixed.jsonl"))
        return tokenize(dataset, max_seq_len=None, too_long="error", progress=False, **policy)

    with pytest.raises(UserError) as error:
        read(mixed)
    said = str(error.value)
    assert said.startswith("12 of 42 rows are bad: ")
    assert {int(number) for number in re.findall(r"mixed.jsonl:(\d+)", said)} == {2 * i for i in range(1, 13)}
    assert said.count("lack") + said.count("do not fit") == 1, "each reason once"
    assert "bad_rows=drop" in said
    kept, whole = read(mixed, bad_rows="drop"), read(lines)
    assert kept.counts == {**whole.counts, "rows": 42, "bad_rows": 12}
    for ours, theirs in zip(kept.tokens, whole.tokens, strict=True):
        assert ours.tolist() == theirs.tolist()
    assert any("12 of 42 rows are bad" in text for text in messages)
    with pytest.raises(UserError, match=r"100 of 100 rows are bad: .*do the dataset's keys fit"):
        read(["{torn"] * 5000, bad_rows="drop")


def test_file_that_is_not_utf8(qwen, tmp_path):
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"train.jsonl: cannot read it as UTF-8"):
        sft_dataset(qwen, source=str(tmp_path / "train.jsonl"))


def test_mixed_glob(qwen, write, tmp_path):
    write([ROWS["messages"]], "a.jsonl")
    write("prompt,completion\nq,a\n", "a.csv")
    with pytest.raises(UserError, match="all of one kind"):
        sft_dataset(qwen, source=str(tmp_path / "a.*"))


@pytest.mark.parametrize("source", ["nowhere/train.jsonl", "./nowhere", "no*where.parquet", "/a/b/c"])
def test_missing_file(qwen, source):
    with pytest.raises(UserError, match="no such file or folder") as error:
        sft_dataset(qwen, source=source)
    assert source in str(error.value)


@pytest.fixture
def hf_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_parquet_and_csv(qwen, write, tmp_path, hf_cache):
    rows = [ROWS["prompt_completion"], {"prompt": "q", "completion": "b"}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    expected = [render_conversation(qwen, [user("q"), assistant(text)])[0] for text in "ab"]
    for source in (str(tmp_path / "a.parquet"), write("prompt,completion\nq,a\nq,b\n", "a.csv")):
        read = sft_dataset(qwen, source=source)
        assert [read[i]["tokens"] for i in range(2)] == expected
        assert read.origin(1) == f"{source}[train] row 1"


CELLS = ["NA", "None", "null", "nan", "00501", "1.50", "true", "1e5", "Na", " x "]


@pytest.mark.parametrize(
    ("name", "separator"),
    [("a.csv", ","), ("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", "\t"), ("a.csv.gz", ","), ("folder/train.csv", ",")],
)
def test_cells_of_tables_are_text(qwen, tmp_path, hf_cache, name, separator):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    lines = "".join(f"q{separator}{cell}\n" for cell in CELLS)
    with (gzip.open if name.endswith(".gz") else open)(path, "wt") as file:
        file.write(f"prompt{separator}completion\n{lines}")
    rows = sft_dataset(qwen, source=str(path.parent if path.parent != tmp_path else path))
    said = [labelled(qwen, rows[i]["labels"]) for i in range(len(rows))]
    assert said == [[f"{cell}<|im_end|>"] for cell in CELLS]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl.gz", '{"prompt": "q", "completion": "a"}\n{"prompt": "q", "completion": "b"}\n'),
        ("a.json", '{"version": 1, "data": [{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "b"}]}'),
        ("a.json", '{"prompt": "q", "completion": "a"}\n{"prompt": "q", "completion": "b"}\n'),
        ("a.json.gz", '[{"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "b"}]'),
    ],
)
def test_forms_of_json(qwen, tmp_path, name, text):
    with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wt") as file:
        file.write(text)
    rows = sft_dataset(qwen, source=str(tmp_path / name))
    assert [labelled(qwen, rows[i]["labels"]) for i in range(len(rows))] == [["a<|im_end|>"], ["b<|im_end|>"]]


def test_one_object_over_several_lines_is_a_row(qwen, write):
    rows = sft_dataset(qwen, source=write(json.dumps(ROWS["messages"], indent=1), "a.json"))
    assert len(rows) == 1


def test_a_damaged_gz_is_named(qwen, tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 99)[:-9])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot read it"):
        sft_dataset(qwen, source=str(tmp_path / "a.jsonl.gz"))


@pytest.mark.parametrize("split", ["train", "train[1:]", "test", "train+test", "dev"])
def test_folders_of_save_to_disk(qwen, tmp_path, split):
    rows = [{"prompt": "q", "completion": text} for text in "abc"]
    of = {"train": datasets.Dataset.from_list(rows[:2]), "test": datasets.Dataset.from_list(rows[2:])}
    datasets.DatasetDict(of).save_to_disk(tmp_path / "both")
    of["train"].to_csv(tmp_path / "a.csv")  # what was read from a table stays what was saved
    datasets.load_dataset("csv", data_files=str(tmp_path / "a.csv"), split="train").save_to_disk(tmp_path / "one")
    with pytest.raises(UserError, match="data_files and name do not apply"):
        sft_dataset(qwen, source=str(tmp_path / "one"), split=split, name="sums")
    expected = {"train": "ab", "train[1:]": "b", "test": "c", "train+test": "abc"}.get(split)
    for name in ("both", "one") if split in ("train", "train[1:]") else ("both",):
        if expected is None:
            with pytest.raises(UserError, match=r"split 'dev': .*the splits are train, test"):
                sft_dataset(qwen, source=str(tmp_path / name), split=split)
            continue
        read = sft_dataset(qwen, source=str(tmp_path / name), split=split)
        assert [labelled(qwen, read[i]["labels"]) for i in range(len(read))] == [[f"{a}<|im_end|>"] for a in expected]


def test_folder_splits_are_those_of_datasets(qwen, write, tmp_path, hf_cache, monkeypatch):
    (tmp_path / "folder").mkdir()
    write([ROWS["messages"]] * 2, "folder/train.jsonl")
    write([ROWS["messages"]], "folder/test.jsonl")
    assert len(sft_dataset(qwen, source=str(tmp_path / "folder"), split="test")) == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(sft_dataset(qwen, source="~/folder")) == 2


def test_unreadable_parquet(qwen, write, hf_cache):
    with pytest.raises(UserError, match=r"a.parquet: cannot load split 'train'") as error:
        sft_dataset(qwen, source=write("not parquet", "a.parquet"))
    assert "hub" not in str(error.value)


def test_hub(qwen, monkeypatch):
    calls = []

    def load(*args, **kwargs):
        calls.append((args, kwargs))
        return datasets.Dataset.from_list([ROWS["messages"]])

    monkeypatch.setattr(loading, "load_dataset", load)
    rows = sft_dataset(qwen, source="owner/name", name="main", data_files="x.json", split="test")
    assert calls == [(("owner/name", "main"), {"data_files": "x.json", "split": "test"})]
    assert rows.origin(0) == "owner/name[test] row 0"


def test_hub_out_of_reach(qwen, monkeypatch):
    def load(*args, **kwargs):
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(loading, "load_dataset", load)
    with pytest.raises(UserError) as error:
        sft_dataset(qwen, source="owner/name")
    for piece in ("owner/name", "ConnectionError: Couldn't reach the Hub", "hf download", "No file"):
        assert piece in str(error.value)


# ---- tokenize


class Foreign(torch.utils.data.Dataset):
    """A foreign dataset of items, or of exceptions to raise."""

    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(self.items[index], Exception):
            raise self.items[index]
        return self.items[index]


def item(length, masked=1):
    tokens = list(range(1, length + 1))
    return {"tokens": tokens, "labels": [IGNORE] * min(masked, length) + tokens[masked:]}


def read(dataset, max_seq_len=None, too_long="truncate"):
    return tokenize(dataset, max_seq_len=max_seq_len, too_long=too_long, progress=False)


def test_rows():
    rows = read(Foreign(item(5), item(3)))
    assert len(rows) == 2
    assert [row.tolist() for row in rows.tokens] == [[1, 2, 3, 4, 5], [1, 2, 3]]
    assert [row.tolist() for row in rows.labels] == [[-100, 2, 3, 4, 5], [-100, 2, 3]]
    assert {row.dtype for row in [*rows.tokens, *rows.labels]} == {np.dtype(np.int32)}
    assert rows.lengths == [(5,), (3,)]


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
    dropped = sum(not f for f in fits) if policy == "drop" else 0
    assert rows.counts == {
        "rows": len(sizes),
        "truncated": sum(k and not f for k, f in zip(kept, fits, strict=True)),
        "dropped_too_long": dropped,
        "dropped_without_labels": len(sizes) - len(rows) - dropped,
    }


def test_too_long_error_names_the_row(qwen, write):
    rows = sft_dataset(qwen, source=write([ROWS["messages"], {"prompt": "q" * 50, "completion": "a"}]))
    with pytest.raises(UserError, match=r"train.jsonl:2: \d+ tokens, but max_seq_len is 40"):
        read(rows, 40, "error")
    assert len(read(rows, 400, "error")) == 2


@pytest.mark.parametrize(
    ("limit", "positions", "named"),
    [
        (5, None, "2 over max_seq_len 5 were"),
        (5, 8, "2 over max_seq_len 5 were"),
        (8, 5, "2 over the model's window of 5 tokens"),
        (None, 5, "2 over the model's window of 5 tokens"),
    ],
)
def test_zero_rows_left_says_why(limit, positions, named):
    rows = Foreign(item(9), item(9), item(4, masked=4))
    with pytest.raises(UserError) as error:
        tokenize(rows, max_seq_len=limit, positions=positions, too_long="drop", progress=False)
    assert one_line_has(str(error.value), "0 of 3 rows", named, "1 had nothing")


@pytest.mark.parametrize(
    ("bad", "pieces"),
    [
        (ValueError("no\nluck"), ["Foreign row 1: no luck"]),
        (KeyError("output"), ["Foreign row 1: KeyError: 'output'"]),
        ({"tokens": [1]}, ["Foreign row 1", "needs tokens and labels", "['tokens']"]),
        ({"tokens": [1, None], "labels": [1, 2]}, ["Foreign row 1", "TypeError"]),
        ({"tokens": [1, 2], "labels": [1]}, ["Foreign row 1", "one length"]),
        ({**item(3), "encoder_input": {}}, ["Foreign row 1", "images", "text models"]),
        ({**item(3), "seq_lens": [2]}, ["Foreign row 1", "seq_lens add up to 2", "3 tokens"]),
    ],
)
def test_bad_items_are_named(bad, pieces):
    with pytest.raises(UserError) as error:
        read(Foreign(item(3), bad))
    for piece in pieces:
        assert piece in str(error.value)


def test_bad_row_of_ours_is_named_once(qwen, write):
    rows = sft_dataset(qwen, source=write([{"messages": [user("q")]}]))
    with pytest.raises(UserError) as error:
        read(rows)
    assert str(error.value).count("train.jsonl:1") == 1


def test_streams_are_refused():
    with pytest.raises(UserError, match="map-style"):
        read(iter([item(3)]))


def test_packs_lose_their_padding_and_nothing_else():
    source = Foreign(item(4), item(3), item(5), item(2))
    rows = read(PackedDataset(source, max_seq_len=10, padding_idx=3))
    assert rows.lengths == [(4, 3), (5, 2)]
    assert [row.tolist() for row in rows.tokens] == [
        source[0]["tokens"] + source[1]["tokens"],
        source[2]["tokens"] + source[3]["tokens"],
    ]
    assert [row.tolist() for row in rows.labels] == [
        source[0]["labels"] + source[1]["labels"],
        source[2]["labels"] + source[3]["labels"],
    ]


def test_full_packs_split_rows():
    rows = read(PackedDataset(Foreign(item(4), item(4), item(4)), max_seq_len=6, split_across_pack=True))
    assert rows.lengths == [(4, 2), (2, 4)]
    assert all(sum(lengths) == len(row) for lengths, row in zip(rows.lengths, rows.tokens, strict=True))


@pytest.mark.parametrize(("limit", "lengths"), [(8, (4, 3, 1)), (5, (4, 1)), (4, (4,)), (3, (3,))])
def test_packs_are_cut_within_and_between_sequences(limit, lengths):
    rows = read(PackedDataset(Foreign(item(4), item(3), item(2)), max_seq_len=10), limit)
    assert (rows.lengths, rows.counts["truncated"]) == ([lengths], 1)


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


def test_open_one_and_several(qwen, write):
    a, b = write([ROWS["messages"]] * 2, "a.jsonl"), write([{"q": "q", "a": "a"}], "b.jsonl")
    second = node(source=b, column_map={"prompt": "q", "completion": "a"})
    assert len(open_dataset(second, qwen, "truncate")) == 1
    both = open_dataset(OmegaConf.create([node(source=a), second]), qwen, "truncate")
    assert [origin_of(both, i) for i in range(len(both))] == [f"{a}:1", f"{a}:2", f"{b}:1"]
    assert len(read(both)) == 3


def test_rows_of_stock_datasets_are_cut_and_counted_by_us(tmp_path, write, hf_cache):
    short = make_qwen(tmp_path, max_seq_len=20)
    source = write([{"input": "q", "output": "a" * 30}, {"input": "q", "output": "a"}])
    stock = {"_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": source}
    stock["split"] = "train"
    rows = read(open_dataset(OmegaConf.create(stock), short, "drop"), 20, "drop")
    assert (len(rows), rows.counts["dropped_too_long"]) == (1, 1)
    rows = read(open_dataset(OmegaConf.create(stock), short, "truncate"), 20, "truncate")
    assert (len(rows), rows.counts["truncated"]) == (2, 1)
    rows = read(open_dataset(OmegaConf.create(stock), short, "drop"), 20, "drop")
    packed = OmegaConf.create({**stock, "packed": True, "split": "train[1:]"})
    assert read(open_dataset(packed, short, "truncate"), 20).lengths == [(len(rows.tokens[0]),)]


@pytest.mark.parametrize(
    ("cfg", "pieces"),
    [
        (node(sauce="x"), ["rocm_ext.data.sft_dataset", "TypeError", "sauce"]),
        (OmegaConf.create({"source": "x"}), ["needs a _component_"]),
        (OmegaConf.create([]), ["needs a _component_"]),
        (OmegaConf.create({"_component_": "rocm_ext.data.sft"}), ["rocm_ext.data.sft", "cannot be imported"]),
        (node(source="nowhere.jsonl"), ["nowhere.jsonl: no such file"]),
    ],
)
def test_bad_components(qwen, cfg, pieces):
    with pytest.raises(UserError) as error:
        open_dataset(cfg, qwen, "truncate")
    for piece in pieces:
        assert piece in str(error.value)
    assert "\n" not in str(error.value)
