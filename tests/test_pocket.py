"""Every library opens the pocket model as a Qwen2.5, and its evaluation counts correctly."""

import json
import random
from pathlib import Path

import pytest
import torch
from rocm_ext.recipes.grpo_rocm import main
from safetensors.torch import load_file
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune
from torchtune.models.qwen2_5 import qwen2_5_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocm_ext import cli, config, pocket, pocket_agent
from rocm_ext.data.prompts import check_disjoint, prompt_dataset
from rocm_ext.data.render import render_conversation, render_prompt
from rocm_ext.data.rows import open_dataset
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.environments import calls_in
from rocm_ext.model.native.decoder import native
from rocm_ext.runs.scores import Score, wilson
from rocm_ext.sampling import LocalEngine, Request, Sampling
from tests.kit.forks import forked
from tests.kit.grpo_runs import lines
from tests.kit.run_folders import write_jsonl
from tests.kit.tiny import metrics

TEXTS = [
    "What is 47 + 38?",
    "13-8=5\n4-2=2\n25",
    "  Ünïcode 数学 🎉\t\r\n\n it's 1,234.5 …",
    "e\u0301 <tool_call> is special, <|im_end|> too",
    "".join(map(chr, range(32, 700))),
]


@pytest.fixture(scope="module")
def tune_tokenizer(pocket_dir):
    names = ("vocab.json", "merges.txt", "tokenizer.json")
    return qwen2_5_tokenizer(*(str(pocket_dir / name) for name in names))


@pytest.fixture(scope="module")
def hf_tokenizer(pocket_dir):
    return AutoTokenizer.from_pretrained(pocket_dir)


@pytest.fixture(scope="module")
def hf_model(pocket_dir):
    return AutoModelForCausalLM.from_pretrained(pocket_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tune_model(pocket_dir):
    """Load the pocket model into torchtune's own decoder."""
    model = qwen2(**pocket.SHAPE)
    shape = {"num_heads": 4, "num_kv_heads": 2, "dim": 128, "tie_word_embeddings": True}
    model.load_state_dict(qwen2_hf_to_tune(load_file(pocket_dir / "model.safetensors"), **shape))
    return model.eval()


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def held_out(pocket_dir):
    return read_rows(pocket_dir / "heldout.jsonl")


# ---- the model and its tokenizer
def test_logits_equal_those_of_transformers(pocket_dir, hf_model, tune_model):
    tokens = torch.randint(
        pocket.SHAPE["vocab_size"], (2, 600), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        torch.testing.assert_close(tune_model(tokens), hf_model(tokens).logits, rtol=0, atol=1e-4)
    assert type(hf_model).__name__ == "Qwen2ForCausalLM"
    card = json.loads((pocket_dir / pocket.CARD).read_text())
    assert hf_model.num_parameters() == card["parameters"]
    assert hf_model.config.max_position_embeddings == 4096, "an agent's prompt fits"


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_equal_those_of_transformers(text, tune_tokenizer, hf_tokenizer):
    ids = tune_tokenizer.encode(text, add_bos=False, add_eos=False)
    assert ids == hf_tokenizer.encode(text)
    assert None not in ids
    assert max(ids) < pocket.SHAPE["vocab_size"] == len(hf_tokenizer)
    assert [
        tune_tokenizer.decode([i]) for i in tune_tokenizer.encode("1985", add_eos=False)
    ] == list("1985")


def test_chat_template_renders_what_torchtune_does(tune_tokenizer, hf_tokenizer, held_out):
    system = {"role": "system", "content": "Be brief."}
    for messages in (held_out[0]["messages"], [system, *held_out[1]["messages"]]):
        prompt = hf_tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)[
            "input_ids"
        ]
        assert prompt == render_prompt(tune_tokenizer, messages[:-1])
        tokens, _ = render_conversation(tune_tokenizer, messages)
        newline = hf_tokenizer.encode("\n")  # after the end of turn, as in Qwen's own template
        assert hf_tokenizer.apply_chat_template(messages)["input_ids"] == tokens + newline
    assert hf_tokenizer.eos_token_id == tune_tokenizer.eos_id
    assert hf_tokenizer.pad_token_id == tune_tokenizer.pad_id


# ---- the data
def test_rows_are_disjoint_and_right(pocket_dir, held_out):
    train = read_rows(pocket_dir / "train.jsonl")
    assert len(held_out) >= 300
    parts = [set(part) for part in pocket.split_problems(2)]
    assert sum(map(len, parts)) == len(set.union(*parts))

    def numbers(row):
        a, b = sorted(
            int(word.strip(".?")) for word in row["prompt"].split() if word.strip(".?").isdigit()
        )
        return a, b, "add" if "+" in row["prompt"] or "Add" in row["prompt"] else "subtract"

    assert not {numbers(row) for row in train} & {numbers(row) for row in held_out}
    for row in (*train, *held_out):
        (low, high, op), worked = numbers(row), row["messages"][1]["content"]
        assert row["answer"] == str(low + high if op == "add" else high - low)
        assert worked.splitlines()[-1] == row["answer"]
        for line in worked.splitlines()[:-1]:
            left, right = line.split("=")
            assert eval(left) == int(right)


def test_the_pocket_models_own_files_are_read(pocket_dir):
    held_out = prompt_dataset(source=str(pocket_dir / "heldout.jsonl"))
    train = prompt_dataset(source=str(pocket_dir / "train.jsonl"))
    assert (len(held_out), len(train)) == (400, 3000)
    assert all(p.messages[-1]["content"] == p.row["prompt"] for p in train)
    check_disjoint(train, held_out)


def test_the_demo_trains_on_rows_of_another_schema(pocket_dir, tmp_path):
    """Its head says: for your rows dataset.source."""
    source = tmp_path / "rows.jsonl"
    write_jsonl(
        source,
        [{"instruction": "Say it.", "output": "it"}, {"prompt": "Say it.", "completion": "it"}],
    )
    own = [f"pocket={pocket_dir}", f"dataset.source={source}"]
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", own)
    dataset = open_dataset(cfg.dataset, open_tokenizer(cfg), "error")
    assert dataset[0] == dataset[1]


@pytest.mark.wide
def test_the_seed_decides(tmp_path, monkeypatch):
    real = pocket.accuracy

    def enough(model, tokenizer, rows) -> Score:
        """Sample, and end the training."""
        return Score(20, real(model, tokenizer, rows[:20]).total)

    monkeypatch.setattr(pocket, "accuracy", enough)
    monkeypatch.setattr(pocket, "BATCH", 4)
    for name, seed in (("one", 7), ("same", 7), ("other", 8)):
        pocket.make(tmp_path / name, seed=seed, target=0.5)
    for path in (tmp_path / "one").iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes(), path.name
    for name in ("model.safetensors", "train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "other" / name).read_bytes() != (tmp_path / "one" / name).read_bytes()


# ---- the folder
def test_an_earlier_pocket_model_is_kept(pocket_dir, capsys):
    before = (pocket_dir / "model.safetensors").stat().st_mtime_ns
    assert cli.main(["pocket", str(pocket_dir), "--seed", "7", "--accuracy", "0.01"]) == 0
    assert "already exists" in capsys.readouterr().out
    assert (pocket_dir / "model.safetensors").stat().st_mtime_ns == before
    assert cli.main(["pocket", str(pocket_dir), "--seed", "8", "--accuracy", "0.01"]) == 1
    assert "seed 7" in capsys.readouterr().err


def test_another_folder_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("years of work")
    for force in ([], ["--force"]):
        assert cli.main(["pocket", str(tmp_path), *force]) == 1
        assert capsys.readouterr().err.startswith(f"error: {tmp_path} exists")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# ---- evaluation
def replies(model, tokenizer, texts: list[str]):
    """Return greedy completions of user turns, in their order."""
    turns = [[{"role": "user", "content": text}] for text in texts]
    requests = [
        Request(str(i), 0, 0, tuple(render_prompt(tokenizer, turn))) for i, turn in enumerate(turns)
    ]
    engine = LocalEngine(decoder=native(model), tokenizer=tokenizer, free_memory=lambda: 2**30)
    with engine.session() as session:
        completions = list(session.generate(requests, Sampling(24, temperature=0)))
    return sorted(completions, key=lambda completion: int(completion.request.prompt_id))


def test_greedy_answers_equal_those_of_transformers(tune_model, hf_model, tune_tokenizer, held_out):
    texts = [row["prompt"] for row in held_out[:12]] + ["Hello, who are you?", "1"]
    completions = replies(tune_model, tune_tokenizer, texts)
    assert len(completions) == len(texts)
    for completion in completions:
        prompt = torch.tensor([completion.request.tokens])
        out = hf_model.generate(prompt, max_new_tokens=24, do_sample=False)[
            0, prompt.shape[1] :
        ].tolist()
        assert completion.tokens == out
    assert {"stop"} <= {completion.finish_reason for completion in completions}


# ---- tools


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_it_learns_to_call_a_tool(tmp_path):
    assert cli.main(["pocket", str(tmp_path / "tools"), "--tools"]) == 0
    out = tmp_path / "out"
    changes = [f"pocket={tmp_path / 'tools'}", f"output_dir={out}"]
    code, said = forked(main, "cpu_pocket_tools", *changes)
    assert code == 0, said
    before, *_, after = metrics(out, "eval")
    assert before["pass_at_1"] < 0.2
    assert after["pass_at_1"] > 0.6
    greedy = [line for line in lines(out / "samples.jsonl") if line["phase"] == "eval"]
    calling = [
        line["step"]
        for line in greedy
        if any("tool_calls" in message for message in line["messages"])
    ]
    assert calling.count(0) < 20
    assert calling.count(8) > 60


# ---- evaluation
def evaluate(capsys, pocket_dir, *arguments: str, overrides=()) -> dict:
    """Return the output of ``rocm-ext eval --json``."""
    config = ["--config", "cpu_pocket_raft", f"pocket={pocket_dir}", "verify_workers=1", *overrides]
    code = cli.main(["eval", "--json", *arguments, *config])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out)


@pytest.mark.wide
def test_the_card_says_what_eval_says(pocket_dir, capsys):
    card = json.loads((pocket_dir / pocket.CARD).read_text())
    said = evaluate(capsys, pocket_dir)
    assert (said["correct"], said["prompts"]) == (card["correct"], card["total"])
    assert said["pass_at_1"] == card["accuracy"]
    assert said["interval"] == pytest.approx(wilson(card["correct"], card["total"]))
    assert sum(said["verdicts"].values()) == card["total"]
    assert said["pass_at_k"] == {}


# ---- new tokens


def test_rows_with_tools_are_what_the_template_writes(pocket_dir):
    item = pocket.Item("K", "b", 61)
    rows = [item.row(random.Random(seed))["messages"] for seed in range(40)]
    talk = max((row for row in rows if len(row) == 5), key=lambda row: len(row[2]["content"]))
    listed, question, call, result, answer = talk
    assert listed == pocket.LIST
    content, (read,) = calls_in(call["content"], pocket_agent.TOOLS)
    assert read.arguments == {"item": "K", "shelf": "b"}
    calling = {"role": "assistant", "content": content, "tool_calls": [read.message(0)]}
    chat = [question, calling, {"role": "tool", "content": result["content"]}, answer]
    template = AutoTokenizer.from_pretrained(pocket_dir)
    ours, _ = render_conversation(pocket.load_tokenizer(pocket_dir), talk)
    text = template.apply_chat_template(chat, tools=pocket_agent.TOOLS, tokenize=False)
    assert template.decode(ours) == text.removesuffix("\n")


def test_held_out_items_are_others():
    held_out, train, pool = pocket.split_items(3)
    assert {*held_out, *train} == {*pool}
    assert not {*held_out} & {*train}
    asked = {"prompt": 'Count "K" on shelf "b".', "answer": "It is 61."}
    assert pocket.questions_about([pocket.Item("K", "b", 61)])[1] == asked
