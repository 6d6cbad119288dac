"""Pairs of a chosen and a rejected answer: their forms, what is labelled, what is dropped, and bad input."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rocm_ext.base.errors import UserError
from rocm_ext.data import sft_dataset
from rocm_ext.data.batches import Layout, StepLoader, Steps, collate
from rocm_ext.data.dialects import KTO
from rocm_ext.data.overview import sequences
from rocm_ext.data.render import IGNORE, render_conversation
from rocm_ext.data.rows import Rows, open_dataset, tokenize
from rocm_ext.data.tokenizer import open_tokenizer
from tests.kit.chats import Foreign, assistant, labelled_text, user
from tests.kit.families import CHATML, id_of
from tests.kit.run_folders import write_jsonl
from tests.kit.tiny import write_tokenizer

PAIR = {"prompt": "6*7?", "chosen": "It is 42.", "rejected": "It is 72 clips."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": id_of(folder, "<|im_end|>")})
    )
    return folder


@pytest.fixture
def open_one(folder):
    def open_one(max_seq_len=None, chat_template="auto"):
        tokenizer = {
            "_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer", "max_seq_len": max_seq_len,
            "path": str(folder / "vocab.json"), "merges_file": str(folder / "merges.txt"),
            "special_tokens_path": str(folder / "tokenizer.json"),
        }  # fmt: skip
        cfg = {"tokenizer": tokenizer, "checkpointer": {"checkpoint_dir": str(folder)}, "chat_template": chat_template,
               "chat_template_args": {}, "chat_template_date": "2024-07-26"}  # fmt: skip
        return open_tokenizer(OmegaConf.create(cfg))

    return open_one


@pytest.fixture
def read(open_one, tmp_path):
    """Return a function that writes rows as JSON lines and reads them with our component."""

    def read(
        *rows, max_seq_len=None, too_long="truncate", positions=None, chat_template="auto", **node
    ):
        path = write_jsonl(tmp_path / "pairs.jsonl", rows)
        node = OmegaConf.create(
            {"_component_": "rocm_ext.data.preference_dataset", **({"source": str(path)} | node)}
        )
        tokenizer = open_one(max_seq_len, chat_template)
        dataset = open_dataset(node, tokenizer, too_long)
        return tokenize(
            dataset, max_seq_len=max_seq_len, too_long=too_long, progress=False, positions=positions
        )

    return read


def sides(rows, i=0):
    """Return the tokens and labels of both sides of row i."""
    cut = rows.lengths[i][0]
    tokens, labels = rows.tokens[i].tolist(), rows.labels[i].tolist()
    return [(tokens[:cut], labels[:cut]), (tokens[cut:], labels[cut:])]


def counted(rows):
    """Return the counts that are not 0."""
    return {what: count for what, count in rows.counts.items() if count}


def said(text):
    return [user("6*7?"), assistant(text)]


def gpt(text):
    return {"from": "gpt", "value": text}


GOOD, BAD, HUMAN = PAIR["chosen"], PAIR["rejected"], {"from": "human", "value": "6*7?"}
FORMS = {
    "texts": PAIR,
    "conversations": {"chosen": said(GOOD), "rejected": said(BAD)},
    "sharegpt": {"chosen": [HUMAN, gpt(GOOD)], "rejected": [HUMAN, gpt(BAD)]},
    "alpaca (LLaMA-Factory)": {"instruction": "6*7?", "input": "", "history": [], "chosen": GOOD, "rejected": BAD},
    "sharegpt (LLaMA-Factory)": {"conversations": [HUMAN], "chosen": gpt(GOOD), "rejected": gpt(BAD)},
    "messages and an answer (ms-swift)": {"messages": said(GOOD), "rejected_response": BAD},
    "OpenAI": {
        "input": {"messages": [user("6*7?")], "tools": []},
        "preferred_output": [assistant(GOOD)], "non_preferred_output": [assistant(BAD)],
    },
    "hh-rlhf": {side: f"\n\nHuman: 6*7?\n\nAssistant: {PAIR[side]}" for side in ("chosen", "rejected")},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_rendered_as_a_row_of_sft_would_be(read, open_one, messages, form):
    rows = read({**FORMS[form], "weight": 3}, {**FORMS[form], "weight": 0})
    assert sides(rows) == [render_conversation(open_one(), said(text)) for text in (GOOD, BAD)]
    assert set(rows.columns["weight"][0].tolist()) == {3.0}
    column = rows.columns["side"][0].tolist()
    assert column == [1] * rows.lengths[0][0] + [-1] * rows.lengths[0][1]
    dropped = ("dropped_too_long", "dropped_equal", "dropped_empty", "dropped_equal_when_cut")
    assert rows.counts == {
        "rows": 2,
        "truncated": 0,
        **dict.fromkeys(dropped, 0),
        "dropped_weight_0": 1,
    }
    assert not [text for text in messages if "not used" in text and "prompt_id" not in text]


@pytest.mark.parametrize("form", FORMS)
def test_sft_names_dpo_for_pairs(open_one, tmp_path, form):
    dataset = sft_dataset(
        open_one(), source=str(write_jsonl(tmp_path / "pairs.jsonl", [FORMS[form]]))
    )
    if "ms-swift" in form:
        tokens, labels = render_conversation(open_one(), said(GOOD))
        assert dataset[0] == {"tokens": tokens, "labels": labels}
        assert "rejected_" in dataset.warnings()[0]
        return
    with pytest.raises(
        UserError, match=r"a pair \(.*recipe: dpo_rocm, dataset._component_: .*preference_dataset"
    ):
        dataset[0]


BEFORE = [user("a"), assistant("one"), user("6*7?")]
SINGLE = {
    "texts (TRL)": {"prompt": "6*7?", "completion": GOOD, "label": True},
    "messages (TRL)": {"prompt": [user("6*7?")], "completion": [assistant(GOOD)], "label": True},
    "sharegpt (LLaMA-Factory)": {"conversations": [HUMAN, gpt(GOOD)], "kto_tag": True},
    "alpaca (LLaMA-Factory)": {
        "instruction": "6*7?",
        "input": "",
        "output": GOOD,
        "kto_tag": "true",
    },
    "numbers": {"prompt": "6*7?", "completion": GOOD, "label": 1},
    "words": {"prompt": "6*7?", "completion": GOOD, "label": "up"},
    "thumbs": {"prompt": "6*7?", "completion": GOOD, "thumbs": "Up"},
    "signs": {"prompt": "6*7?", "completion": GOOD, "label": "👍"},
}
NOT_GOOD = {"numbers": -1, "words": "down", "thumbs": "Down", "signs": "👎"}  # fmt: skip


@pytest.mark.parametrize("form", SINGLE)
def test_single_answers_are_rendered_as_rows_of_sft(read, open_one, messages, form):
    row = SINGLE[form]
    (key,) = {*KTO} & {*row}
    rows = read({**row, "weight": 3}, {**row, key: NOT_GOOD.get(form, False)}, {**row, "weight": 0})
    assert [set(column.tolist()) for column in rows.columns["weight"]] == [{3.0}, {1.0}]
    assert rows.counts["dropped_weight_0"] == 1
    for i, side in enumerate((1, -1)):
        assert (rows.tokens[i].tolist(), rows.labels[i].tolist()) == render_conversation(
            open_one(), said(GOOD)
        )
        assert rows.columns["side"][i].tolist() == [side] * len(rows.tokens[i])
        (shown,) = sequences(rows, i, open_one())
        assert shown["side"] == ("good" if side > 0 else "bad")
    assert not rows.pairs
    assert not [
        text for text in messages if "not used" in text
    ]  # another test may have made info visible


def test_single_answers_are_told_from_what_comes_before(read, open_one, messages):
    """Columns of other names, earlier answers, and a warning where all answers are of one kind."""
    columns = {"completion": "reply", "label": "thumb"}
    rows = read({"prompt": BEFORE, "reply": GOOD, "thumb": False}, column_map=columns)
    assert labelled_text(rows.labels[0].tolist(), open_one().decode) == [f"{GOOD}<|im_end|>"]
    assert any("dataset: none of 1 answers is good; add some" in text for text in messages)
    good = SINGLE["texts (TRL)"]
    assert counted(read({**good, "completion": ""}, good)) == {
        "rows": 2,
        "dropped_without_labels": 1,
        "good": 1,
    }
    with pytest.raises(
        UserError, match="all 8 answers have one prompt, and answers of one prompt stay together"
    ):
        read(*({**good, "completion": f"It is {i}."} for i in range(8))).split(0.25, 0)


def test_mismatched_answers_are_to_other_prompts(read):
    """Each answer once, to another prompt unless too many rows have the same one; cut at the longest row."""

    def parts(rows):
        starts = [int(np.argmax(labels != IGNORE)) for labels in rows.labels]
        pairs = zip(rows.tokens, starts, strict=True)
        return [(tuple(tokens[:start]), tuple(tokens[start:])) for tokens, start in pairs]

    rows = read(
        *(
            {"prompt": f"{i % 5}+1?", "completion": f"It is {i:02}.", "label": i % 2}
            for i in range(12)
        )
    )
    before, after = parts(rows), parts(rows.mismatched())
    assert [prompt for prompt, _ in after] == [prompt for prompt, _ in before]
    assert sorted(answer for _, answer in after) == sorted(answer for _, answer in before)
    own = {answer: prompt for prompt, answer in before}
    assert all(own[answer] != prompt for prompt, answer in after)
    long = read(
        *(
            {"prompt": "6*7? " * (10 - 9 * i), "completion": "No. " * (1 + 9 * i), "label": i}
            for i in range(2)
        )
    )
    assert max(map(len, long.mismatched().tokens)) == max(map(len, long.tokens))
    alike = read(*({"prompt": "a", "completion": f"{i}", "label": i} for i in range(2)))
    assert parts(alike.mismatched()) == parts(alike)[::-1]


def test_turns_before_the_difference_have_no_labels(read, open_one):
    """What both sides begin with is the prompt, with its answers; what follows is the answer, with all its turns."""
    begin = [user("a"), assistant("one"), user("b")]
    rejected = [*begin, assistant("three"), user("c"), assistant("d")]
    found = sides(read({"chosen": [*begin, assistant("two")], "rejected": rejected}))
    texts = [labelled_text(labels, open_one().decode) for _, labels in found]
    assert texts == [["two<|im_end|>"], ["three<|im_end|>", "d<|im_end|>"]]


def test_columns_files_and_systems(read, open_one, tmp_path):
    """The columns of Stack Exchange, from Parquet and CSV, with a system message from the config."""
    rows = [
        {"question": f"{i}?", "response_j": f"good {i}", "response_k": f"bad {i}", "qid": i}
        for i in range(3)
    ]
    table = datasets.Dataset.from_list([*rows, {**rows[0], "response_k": None}])
    table.to_parquet(str(tmp_path / "pairs.parquet"))
    table.to_csv(str(tmp_path / "pairs.csv"))
    columns = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    system, tokenizer = {"role": "system", "content": "Be brief."}, open_one()
    expected = [
        render_conversation(tokenizer, [system, user("1?"), assistant(text)])
        for text in ("good 1", "bad 1")
    ]
    for name in ("pairs.parquet", "pairs.csv"):
        found = read(source=str(tmp_path / name), column_map=columns, system_prompt="Be brief.")
        assert sides(found, 1) == expected
        assert (len(found), found.counts["dropped_empty"]) == (3, 1), "a null is no answer"
    found = read({**PAIR, "system": "Be brief."})
    assert sides(found)[0] == render_conversation(tokenizer, [system, *said(GOOD)])


def test_base_models_take_pairs_as_they_are(read, open_one):
    rows = read({"prompt": "2+2=", "chosen": " 4", "rejected": " 5"}, chat_template="none")
    tokenizer = open_one(chat_template="none")
    prompt, answer = (
        tokenizer.encode(text, add_bos=False, add_eos=False) for text in ("2+2=", " 4")
    )
    assert sides(rows)[0] == ([*prompt, *answer, tokenizer.end_of_text],
                              [*[IGNORE] * len(prompt), *answer, tokenizer.end_of_text])  # fmt: skip


@pytest.mark.parametrize(
    "component", ["preference_dataset", "stack_exchange_paired_dataset", "hh_rlhf_helpful_dataset"]
)
def test_torchtunes_components_get_the_models_template(open_one, tmp_path, component):
    conversations = "stack" not in component
    row = (
        FORMS["conversations"]
        if conversations
        else {"question": "6*7?", "response_j": GOOD, "response_k": BAD}
    )
    path = write_jsonl(
        tmp_path / "data/rl/theirs.jsonl", [row]
    )  # where torchtune looks for Stack Exchange
    more = (
        {"source": "json", "data_files": str(path)} if conversations else {"source": str(tmp_path)}
    )
    node = OmegaConf.create(
        {"_component_": f"torchtune.datasets.{component}", "split": "train", **more}
    )
    tokenizer = open_one(max_seq_len=128)
    rows = tokenize(
        open_dataset(node, tokenizer, "truncate"),
        max_seq_len=128,
        too_long="truncate",
        progress=False,
    )
    assert sides(rows)[0] == render_conversation(tokenizer, said(GOOD))


# ---- what is left out
@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**PAIR, "rejected": GOOD}, "dropped_equal"),
        ({**PAIR, "rejected": ""}, "dropped_empty"),
        ({**PAIR, "chosen": None}, "dropped_empty"),
        ({"chosen": said(GOOD), "rejected": [user("6*7?")]}, "dropped_empty"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:"}, "dropped_empty"),
    ],
)  # fmt: skip
def test_pairs_without_a_preference_are_dropped_and_counted(read, row, reason):
    assert counted(read(row, PAIR)) == {"rows": 2, reason: 1}
    with pytest.raises(
        UserError, match=f"dataset: 0 of 1 rows left: .*1 {reason.replace('_', ' ')}"
    ):
        read(row)


def test_long_sides_are_cut_dropped_or_refused(read):
    long = {**PAIR, "chosen": "It is 42. " * 20}
    short, alike = 60, {**PAIR, "chosen": "It is. " * 40 + "42", "rejected": "It is. " * 40 + "72"}
    whole = sides(read(long))
    rows = read(long, PAIR, alike, max_seq_len=short)
    assert sides(rows) == [tuple(part[:short] for part in whole[0]), whole[1]], (
        "the other side stays whole"
    )
    assert counted(rows) == {"rows": 3, "truncated": 1, "dropped_equal_when_cut": 1}
    dropped = read(long, PAIR, alike, max_seq_len=short, too_long="drop")
    assert counted(dropped) == {"rows": 3, "dropped_too_long": 2}
    with pytest.raises(
        UserError, match=r"pairs\.jsonl:2: \d+ tokens, but max_seq_len is 60; .* set too_long"
    ):
        read(PAIR, alike, max_seq_len=short, too_long="error")
    with pytest.raises(UserError, match=r"but the model takes 50; set too_long"):
        read(PAIR, alike, positions=50, too_long="error")
    with pytest.raises(
        UserError, match=r"0 of 1 rows left: .*1 dropped equal when cut \(the model's window of 5 "
    ):
        read(PAIR, max_seq_len=50, positions=5)  # nothing but the prompt's beginning


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, "lack rejected; use column_map"),
        ({**PAIR, "chosen": 7}, "a text or a list"),
        ({**PAIR, "prompt": 7}, "found 7"),
        ({"prompt": "a", "completion": "b"}, "lack chosen and rejected, or label.*lora_finetune_rocm"),
        ({"prompt": "a", "completion": "b", "label": "soso"}, "label is 'soso'; expected true, the answer is good"),
        ({"prompt": "a", "label": True}, "have a label, but lack completion, messages or output"),
        ({"chosen": "b", "rejected": "c"}, "chosen: it is a text, so the row needs a prompt"),
        ({"chosen": said("b"), "rejected": [user("A"), assistant("c")]},
         "the prompts of chosen and rejected differ: message 0 is of the user"),
        ({"prompt": "a", "chosen": said("b"), "rejected": said("c")}, "does not contain the row's prompt"),
    ],
)  # fmt: skip
def test_malformed_rows_name_their_line(read, row, says):
    with pytest.raises(UserError, match=rf"pairs\.jsonl:2: .*{says}"):
        read(PAIR, row)


def test_foreign_pairs_are_checked():
    def read(*items):
        return tokenize(Foreign(*items), max_seq_len=None, too_long="error", progress=False)

    good = {"chosen_input_ids": [1, 2, 3], "chosen_labels": [IGNORE, IGNORE, 3],
            "rejected_input_ids": [1, 2, 4], "rejected_labels": [IGNORE, IGNORE, 4]}  # fmt: skip
    single = {"tokens": [1, 2], "labels": [1, 2]}
    for items, says in [
        (
            [good, {**good, "rejected_input_ids": [1, 9, 4]}],
            "Foreign row 1: the prompts of the chosen and the rejected",
        ),
        ([good, {**good, "rejected_labels": [4]}], r"Foreign row 1: rejected_input_ids \(3,\)"),
        ([single, good], "pairs and single answers in one dataset"),
        ([single, {**single, "side": 1}], "answers with a label and single answers in one dataset"),
    ]:
        with pytest.raises(UserError, match=says):
            read(*items)
    assert len(read(good)) == 1


@pytest.mark.parametrize("packed", [True, False])
def test_a_pair_stays_in_one_micro_batch(read, packed):
    """Sequences 2 i and 2 i + 1 of every micro-batch are the sides of one pair, on any number of ranks."""
    rows = read(
        *(
            {**PAIR, "prompt": "6*7? " * (i % 5), "chosen": f"a {i} " * (1 + i % 7)}
            for i in range(21)
        )
    )
    for ranks in (1, 2):
        count = 0
        for rank in range(ranks):
            layout = Layout(rank, ranks, tokens_per_micro_batch=128, packed=packed, pad_id=0)
            (update,) = StepLoader(rows, Steps(len(rows), len(rows)), layout).range(0, 1)
            for batch in update.batches:
                even = (batch.sequence % 2 == 0).float()
                assert torch.equal(batch.columns["side"], 2 * even - 1)
                assert batch.sequences % 2 == 0
                count += batch.sequences
        assert count == 2 * len(rows)
    batch = collate(rows, [0], packed, 0, 1)
    assert batch.targets.tolist() == [
        label for _, labels in sides(rows) for label in labels if label != IGNORE
    ]


# ---- validation
def prompts_of(rows):
    """Return the prompt of each pair: the tokens before its first label."""
    chosen = [sides(rows, i)[0] for i in range(len(rows))]
    return [
        tokens[: next(i for i, label in enumerate(labels) if label != IGNORE)]
        for tokens, labels in chosen
    ]


@pytest.mark.parametrize(("fraction", "expected"), [(0.01, 4), (0.1, 8), (0.5, 40)])
def test_pairs_of_one_prompt_stay_on_one_side(read, fraction, expected):
    """Validation on a prompt that was trained on would measure memory; `pairs --per-prompt 4` makes four of each."""
    rows = read(
        *({"prompt": f"{i % 20}+1?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(80))
    )
    training, validation = rows.split(fraction, 0)
    assert (len(training), len(validation)) == (80 - expected, expected)
    held_out = {tuple(prompt) for prompt in prompts_of(validation)}
    assert len(held_out) == expected / 4
    assert not held_out & {tuple(prompt) for prompt in prompts_of(training)}
    again = rows.split(fraction, 0)
    assert [part.fingerprint() for part in again] == [
        training.fingerprint(),
        validation.fingerprint(),
    ]
    assert rows.split(fraction, 1)[1].fingerprint() != validation.fingerprint(), (
        "the seed draws the prompts"
    )
    alike = read(
        *({"prompt": "1+1?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(8))
    )
    with pytest.raises(
        UserError,
        match=r"validation_fraction 0\.\d+: all 8 pairs have one prompt, .* set dataset_val",
    ):
        alike.split(fraction, 0)


def test_equal_rows_stay_on_one_side():
    def rows_of(tokens):
        texts = [np.array(each) for each in tokens]
        return Rows(texts, texts, [(len(each),) for each in texts], {})

    rows = rows_of([[1, 2, 3], [4, 5], [1, 2, 3], [6, 7], [4, 5], [1, 2, 3]])
    for seed in range(8):
        training, validation = (
            {tuple(each.tolist()) for each in part.tokens} for part in rows.split(0.5, seed)
        )
        assert not training & validation
        assert len(training | validation) == 3
    with pytest.raises(UserError, match="all 2 rows are equal"):
        rows_of([[1, 2], [1, 2]]).split(0.5, 0)
