"""Pairs of a chosen and a rejected answer: their forms, what is labelled, what is dropped, and bad input."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from rocm_ext.base.errors import UserError
from rocm_ext.data.batches import Layout, StepLoader, Steps, collate
from rocm_ext.data.render import IGNORE, render_conversation
from rocm_ext.data.rows import open_dataset, tokenize
from rocm_ext.data.tokenizer import open_tokenizer
from tests.kit.families import CHATML, id_of
from tests.kit.tiny import write_tokenizer

PAIR = {"prompt": "6*7?", "chosen": "It is 42.", "rejected": "It is 72 clips."}
EMPTY = [{"role": "user", "content": "6*7?"}, {"role": "assistant", "content": " "}]


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": id_of(folder, "<|im_end|>")}))
    return folder


@pytest.fixture
def open_one(folder):
    def open_one(max_seq_len=None, chat_template="auto"):
        cfg = {
            "tokenizer": {
                "_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer",
                "path": str(folder / "vocab.json"),
                "merges_file": str(folder / "merges.txt"),
                "special_tokens_path": str(folder / "tokenizer.json"),
                "max_seq_len": max_seq_len,
            },
            "checkpointer": {"checkpoint_dir": str(folder)},
            "chat_template": chat_template,
            "chat_template_args": {},
            "chat_template_date": "2024-07-26",
        }
        return open_tokenizer(OmegaConf.create(cfg))

    return open_one


@pytest.fixture
def read(open_one, tmp_path):
    """Return a function that writes rows as JSON lines and reads them with our component."""

    def read(*rows, max_seq_len=None, too_long="truncate", positions=None, chat_template="auto", **node):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        node = OmegaConf.create({"_component_": "rocm_ext.data.preference_dataset", **({"source": str(path)} | node)})
        tokenizer = open_one(max_seq_len, chat_template)
        dataset = open_dataset(node, tokenizer, too_long)
        return tokenize(dataset, max_seq_len=max_seq_len, too_long=too_long, progress=False, positions=positions)

    return read


def sides(rows, i=0):
    """Return the tokens and labels of both sides of row i."""
    bounds = np.cumsum(rows.lengths[i])[:-1]
    return list(
        zip(
            *([part.tolist() for part in np.split(each[i], bounds)] for each in (rows.tokens, rows.labels)), strict=True
        )
    )


def rendered(tokenizer, *messages):
    tokens, labels = render_conversation(tokenizer, messages)
    return tokens, labels


FORMS = {
    "texts": PAIR,
    "prompt as messages": {**PAIR, "prompt": [user("6*7?")]},
    "answers as messages": {
        "prompt": "6*7?", "chosen": [assistant(PAIR["chosen"])], "rejected": [assistant(PAIR["rejected"])],
    },
    "conversations": {
        "chosen": [user("6*7?"), assistant(PAIR["chosen"])], "rejected": [user("6*7?"), assistant(PAIR["rejected"])],
    },
    "conversations beside their prompt (UltraFeedback)": {
        "prompt": "6*7?", "prompt_id": "7", "score_chosen": 8.0,
        "chosen": [user("6*7?"), assistant(PAIR["chosen"])], "rejected": [user("6*7?"), assistant(PAIR["rejected"])],
    },
    "sharegpt": {
        "chosen": [{"from": "human", "value": "6*7?"}, {"from": "gpt", "value": PAIR["chosen"]}],
        "rejected": [{"from": "human", "value": "6*7?"}, {"from": "gpt", "value": PAIR["rejected"]}],
    },
    "alpaca (LLaMA-Factory)": {
        "instruction": "6*7?", "input": "", "history": [], "chosen": PAIR["chosen"], "rejected": PAIR["rejected"],
    },
    "sharegpt (LLaMA-Factory)": {
        "conversations": [{"from": "human", "value": "6*7?"}],
        "chosen": {"from": "gpt", "value": PAIR["chosen"]}, "rejected": {"from": "gpt", "value": PAIR["rejected"]},
    },
    "messages and an answer (ms-swift)": {
        "messages": [user("6*7?"), assistant(PAIR["chosen"])], "rejected_response": PAIR["rejected"],
    },
    "messages and messages (ms-swift)": {
        "messages": [user("6*7?"), assistant(PAIR["chosen"])],
        "rejected_messages": [user("6*7?"), assistant(PAIR["rejected"])],
    },
    "OpenAI": {
        "input": {"messages": [user("6*7?")], "tools": []},
        "preferred_output": [assistant(PAIR["chosen"])], "non_preferred_output": [assistant(PAIR["rejected"])],
    },
    "hh-rlhf": {
        "chosen": f"\n\nHuman: 6*7?\n\nAssistant: {PAIR['chosen']}",
        "rejected": f"\n\nHuman: 6*7?\n\nAssistant: {PAIR['rejected']}",
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_rendered_as_a_row_of_sft_would_be(read, open_one, form):
    rows = read(FORMS[form])
    expected = [rendered(open_one(), user("6*7?"), assistant(PAIR[side])) for side in ("chosen", "rejected")]
    assert sides(rows) == expected
    column = rows.columns["side"][0].tolist()
    assert column == [1] * rows.lengths[0][0] + [-1] * rows.lengths[0][1]
    assert rows.counts == {
        "rows": 1, "truncated": 0, "dropped_too_long": 0, "dropped_equal": 0, "dropped_empty": 0,
        "dropped_equal_when_cut": 0,
    }  # fmt: skip


def test_no_column_of_another_form_is_called_unused(read, messages):
    for form in FORMS:
        read(FORMS[form])
    assert not [text for text in messages if "not used" in text and "prompt_id" not in text]


def test_turns_before_the_difference_have_no_labels(read, open_one):
    """What both sides begin with is the prompt, with its answers; what follows is the answer, with all its turns."""
    begin = [user("a"), assistant("one"), user("b")]
    rows = read(
        {"chosen": [*begin, assistant("two")], "rejected": [*begin, assistant("three"), user("c"), assistant("d")]}
    )
    tokenizer = open_one()
    (_, chosen), (_, rejected) = sides(rows)
    said = [tokenizer.decode([label for label in labels if label != IGNORE]) for labels in (chosen, rejected)]
    assert said == ["two<|im_end|>", "three<|im_end|>d<|im_end|>"]


def test_columns_files_and_systems(read, open_one, tmp_path):
    """The columns of Stack Exchange, from Parquet and CSV, with a system message from the config."""
    rows = [{"question": f"{i}?", "response_j": f"good {i}", "response_k": f"bad {i}", "qid": i} for i in range(3)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "pairs.parquet"))
    table.to_csv(str(tmp_path / "pairs.csv"))
    columns = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    system = {"role": "system", "content": "Be brief."}
    tokenizer = open_one()
    expected = [rendered(tokenizer, system, user("1?"), assistant(text)) for text in ("good 1", "bad 1")]
    for name in ("pairs.parquet", "pairs.csv"):
        found = read(source=str(tmp_path / name), column_map=columns, system_prompt="Be brief.")
        assert sides(found, 1) == expected
        assert len(found) == 3
    found = read({**PAIR, "system": "Be brief."})
    assert sides(found)[0] == rendered(tokenizer, system, user(PAIR["prompt"]), assistant(PAIR["chosen"]))


def test_a_null_in_parquet_is_no_answer(read, tmp_path):
    rows = [{"question": "a", "response_j": "b", "response_k": worse} for worse in (None, "c")]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "pairs.parquet"))
    columns = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    found = read(source=str(tmp_path / "pairs.parquet"), column_map=columns)
    assert (len(found), found.counts["dropped_empty"]) == (1, 1)


def test_base_models_take_pairs_as_they_are(read, open_one):
    rows = read({"prompt": "2+2=", "chosen": " 4", "rejected": " 5"}, chat_template="none")
    tokenizer = open_one(chat_template="none")
    prompt, answer = (tokenizer.encode(text, add_bos=False, add_eos=False) for text in ("2+2=", " 4"))
    assert sides(rows)[0] == ([*prompt, *answer, tokenizer.end_of_text],
                              [*[IGNORE] * len(prompt), *answer, tokenizer.end_of_text])  # fmt: skip


@pytest.mark.parametrize(
    "component", ["preference_dataset", "stack_exchange_paired_dataset", "hh_rlhf_helpful_dataset"]
)
def test_torchtunes_components_get_the_models_template(open_one, tmp_path, component):
    conversations = "stack" not in component
    path = tmp_path / "data" / "rl" / "theirs.jsonl"  # where torchtune looks for Stack Exchange
    path.parent.mkdir(parents=True)
    row = FORMS["conversations"] if conversations else {"question": "6*7?", "response_j": "42", "response_k": "72"}
    path.write_text(json.dumps(row) + "\n")
    more = {"source": "json", "data_files": str(path)} if conversations else {"source": str(tmp_path)}
    node = OmegaConf.create({"_component_": f"torchtune.datasets.{component}", "split": "train", **more})
    tokenizer = open_one(max_seq_len=128)
    rows = tokenize(open_dataset(node, tokenizer, "truncate"), max_seq_len=128, too_long="truncate", progress=False)
    answer = PAIR["chosen"] if conversations else "42"
    assert sides(rows)[0] == rendered(tokenizer, user("6*7?"), assistant(answer))


# ---- what is left out


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**PAIR, "rejected": PAIR["chosen"]}, "dropped_equal"),
        ({"chosen": FORMS["conversations"]["chosen"], "rejected": FORMS["conversations"]["chosen"]}, "dropped_equal"),
        ({**PAIR, "rejected": ""}, "dropped_empty"),
        ({**PAIR, "chosen": " \n"}, "dropped_empty"),
        ({**PAIR, "chosen": []}, "dropped_empty"),
        ({"messages": FORMS["conversations"]["chosen"], "rejected_response": None}, "dropped_empty"),
        ({**PAIR, "chosen": None}, "dropped_empty"),
        ({**FORMS["conversations"], "rejected": None}, "dropped_empty"),
        ({"chosen": FORMS["conversations"]["chosen"], "rejected": EMPTY}, "dropped_empty"),
        ({"chosen": FORMS["conversations"]["chosen"], "rejected": [user("6*7?")]}, "dropped_empty"),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant:"}, "dropped_empty"),
    ],
)
def test_pairs_without_a_preference_are_dropped_and_counted(read, row, reason):
    rows = read(row, PAIR)
    assert len(rows) == 1
    assert {what: count for what, count in rows.counts.items() if count} == {"rows": 2, reason: 1}
    with pytest.raises(UserError, match=f"dataset: 0 of 1 rows left: .*1 {reason.replace('_', ' ')}"):
        read(row)


def test_long_sides_are_cut_dropped_or_refused(read, open_one):
    long = {**PAIR, "chosen": "It is 42. " * 20}
    short, alike = 60, {**PAIR, "chosen": "It is. " * 40 + "42", "rejected": "It is. " * 40 + "72"}
    whole = sides(read(long))
    rows = read(long, PAIR, alike, max_seq_len=short)
    assert sides(rows)[0] == tuple(part[:short] for part in whole[0])
    assert sides(rows)[1] == whole[1], "the other side stays whole"
    expected = {"rows": 3, "truncated": 1, "dropped_equal_when_cut": 1}
    assert {what: count for what, count in rows.counts.items() if count} == expected
    rows = read(long, PAIR, alike, max_seq_len=short, too_long="drop")
    assert {what: count for what, count in rows.counts.items() if count} == {"rows": 3, "dropped_too_long": 2}
    with pytest.raises(
        UserError, match=r"pairs\.jsonl:2: \d+ tokens, but max_seq_len is 60; raise it, or set too_long"
    ):
        read(PAIR, alike, max_seq_len=short, too_long="error")
    with pytest.raises(UserError, match=r"but the model takes 50; set too_long"):
        read(PAIR, alike, positions=50, too_long="error")
    with pytest.raises(UserError, match=r"0 of 1 rows left: .*1 dropped equal when cut \(the model's window of 5 "):
        read(PAIR, max_seq_len=50, positions=5)  # nothing but the prompt's beginning


def test_what_torchtunes_tokenizer_cuts_is_counted(open_one, tmp_path):
    """Without a template torchtune's own tokenizer renders, and cuts at max_seq_len."""
    path = tmp_path / "theirs.jsonl"
    texts = [("It is. " * 40 + "42", "It is. " * 40 + "72"), ("It is 42. " * 20, "no"), ("yes", "no")]
    rows = [{side: [user("a"), assistant(text)] for side, text in zip(("chosen", "rejected"), pair, strict=True)}
            for pair in texts]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    node = OmegaConf.create({"_component_": "torchtune.datasets.preference_dataset", "source": "json",
                             "data_files": str(path), "split": "train"})  # fmt: skip
    tokenizer = open_one(max_seq_len=60, chat_template="torchtune")
    rows = tokenize(open_dataset(node, tokenizer, "truncate"), max_seq_len=60, too_long="truncate", progress=False)
    expected = {"rows": 3, "truncated": 1, "dropped_equal_when_cut": 1}
    assert {what: count for what, count in rows.counts.items() if count} == expected


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, "lack rejected; use column_map"),
        ({"prompt": "a", "completion": "b"}, "lack chosen and rejected; use column_map"),
        ({"prompt": "a", "completion": "b", "label": True}, "label is True: answers that are good or bad (KTO)"),
        ({"messages": 7, "rejected_response": "b"}, "messages must be a list of messages, found int"),
        ({"chosen": "b", "rejected": "c"}, "chosen: it is a text, so the row needs a prompt"),
        ({**PAIR, "chosen": 7}, "chosen: it must be a text or a list of messages, found int"),
        ({**PAIR, "prompt": 7}, "prompt must be a text or a list of messages, found 7"),
        ({**PAIR, "rejected": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("A"), assistant("c")]},
         "the prompts of chosen and rejected differ: message 0 is of the user"),
        ({"prompt": "a", "chosen": [user("x"), assistant("b")], "rejected": [user("x"), assistant("c")]},
         "does not contain the row's prompt"),
        ({**PAIR, "system": 7}, "system must be a string"),
    ],
)  # fmt: skip
def test_malformed_rows_name_their_line(read, row, says):
    with pytest.raises(UserError, match=r"pairs\.jsonl:2: ") as error:
        read(PAIR, row)
    assert says in str(error.value)


def test_foreign_pairs_are_checked():
    class Theirs(torch.utils.data.Dataset):
        def __init__(self, *items):
            self.items = items

        def __len__(self):
            return len(self.items)

        def __getitem__(self, i):
            return self.items[i]

    good = {"chosen_input_ids": [1, 2, 3], "chosen_labels": [IGNORE, IGNORE, 3],
            "rejected_input_ids": [1, 2, 4], "rejected_labels": [IGNORE, IGNORE, 4]}  # fmt: skip
    for items, says in [
        ([good, {**good, "rejected_input_ids": [1, 9, 4]}], "Theirs row 1: the prompts of the chosen and the rejected"),
        ([good, {**good, "rejected_labels": [4]}], r"Theirs row 1: rejected_input_ids \(3,\)"),
        ([{k: v for k, v in good.items() if "rejected" not in k}], "needs rejected_input_ids and rejected_labels"),
        ([good, {"tokens": [1, 2], "labels": [1, 2]}], "pairs and single answers in one dataset"),
        ([{"tokens": [1, 2], "labels": [1, 2]}, good], "pairs and single answers in one dataset"),
    ]:
        with pytest.raises(UserError, match=says):
            tokenize(Theirs(*items), max_seq_len=None, too_long="error", progress=False)
    assert len(tokenize(Theirs(good), max_seq_len=None, too_long="error", progress=False)) == 1


@pytest.mark.parametrize("packed", [True, False])
def test_a_pair_stays_in_one_micro_batch(read, packed):
    """Sequences 2 i and 2 i + 1 of every micro-batch are the sides of one pair, on any number of ranks."""
    rows = read(*({**PAIR, "prompt": "6*7? " * (i % 5), "chosen": f"a {i} " * (1 + i % 7)} for i in range(21)))
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
    assert batch.targets.tolist() == [label for _, labels in sides(rows) for label in labels if label != IGNORE]


# ---- validation


def prompts_of(rows):
    """Return the prompt of each pair: the tokens before its first label."""
    chosen = [sides(rows, i)[0] for i in range(len(rows))]
    return [tokens[: next(i for i, label in enumerate(labels) if label != IGNORE)] for tokens, labels in chosen]


@pytest.mark.parametrize(("fraction", "expected"), [(0.01, 4), (0.1, 8), (0.5, 40)])
def test_pairs_of_one_prompt_stay_on_one_side(read, fraction, expected):
    """Validation on a prompt that was trained on would measure memory; `pairs --per-prompt 4` makes four of each."""
    rows = read(*({"prompt": f"{i % 20}+1?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(80)))
    training, validation = rows.split(fraction, 0)
    assert (len(training), len(validation)) == (80 - expected, expected)
    held_out = {tuple(prompt) for prompt in prompts_of(validation)}
    assert len(held_out) == expected / 4
    assert not held_out & {tuple(prompt) for prompt in prompts_of(training)}
    again = rows.split(fraction, 0)
    assert [part.fingerprint() for part in again] == [training.fingerprint(), validation.fingerprint()]
    assert rows.split(fraction, 1)[1].fingerprint() != validation.fingerprint(), "the seed draws the prompts"


def test_pairs_of_different_prompts_split_as_rows_of_sft_do(read):
    rows = read(*({"prompt": f"{i}+1?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(20)))
    drawn = sorted(np.random.default_rng(3).permutation(20)[:5].tolist())
    assert rows.split(0.25, 3)[1].fingerprint() == rows.part(drawn).fingerprint()


def test_pairs_of_a_single_prompt_cannot_be_split(read):
    rows = read(*({"prompt": "1+1?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(8)))
    with pytest.raises(UserError, match=r"validation_fraction 0\.25: all 8 pairs have one prompt, .* set dataset_val"):
        rows.split(0.25, 0)
