"""The pocket model is a Qwen2.5 to everybody, and its evaluation counts right."""

import json
import signal
from decimal import Decimal
from itertools import takewhile
from types import SimpleNamespace

import peft
import pytest
import torch
from torchtune.models.qwen2_5 import qwen2_5_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocm_ext import cli, pocket
from rocm_ext.chat import render_conversation, render_prompt
from rocm_ext.errors import UserError
from rocm_ext.evaluation import accuracy, final_number, greedy, load_model, load_tokenizer, read_rows, wilson

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
def held_out(pocket_dir):
    return read_rows(pocket_dir / "heldout.jsonl")


# ---- the model and its tokenizer


def test_logits_equal_those_of_transformers(pocket_dir, hf_model):
    tokens = torch.randint(pocket.SHAPE["vocab_size"], (3, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(load_model(pocket_dir)(tokens), hf_model(tokens).logits, rtol=0, atol=1e-4)
    assert type(hf_model).__name__ == "Qwen2ForCausalLM"
    card = json.loads((pocket_dir / pocket.CARD).read_text())
    assert hf_model.num_parameters() == card["parameters"]


@pytest.mark.parametrize("text", TEXTS)
def test_token_ids_equal_those_of_transformers(text, tune_tokenizer, hf_tokenizer):
    ids = tune_tokenizer.encode(text, add_bos=False, add_eos=False)
    assert ids == hf_tokenizer.encode(text)
    assert None not in ids
    assert max(ids) < pocket.SHAPE["vocab_size"]


def test_every_id_is_a_token(tune_tokenizer, hf_tokenizer):
    ids = list(range(pocket.SHAPE["vocab_size"]))
    assert len(hf_tokenizer) == len(ids)
    assert tune_tokenizer.decode(ids)


def test_digits_are_single_tokens(tune_tokenizer):
    assert [tune_tokenizer.decode([i]) for i in tune_tokenizer.encode("1985", add_eos=False)] == list("1985")


def test_chat_template_renders_what_torchtune_does(tune_tokenizer, hf_tokenizer, held_out):
    system = {"role": "system", "content": "Be brief."}
    for messages in (held_out[0]["messages"], [system, *held_out[1]["messages"]]):
        prompt = hf_tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        assert prompt == render_prompt(tune_tokenizer, messages[:-1])
        tokens, _ = render_conversation(tune_tokenizer, messages)
        newline = hf_tokenizer.encode("\n")  # behind the end of turn, as in Qwen's own template
        assert hf_tokenizer.apply_chat_template(messages)["input_ids"] == tokens + newline
    assert hf_tokenizer.eos_token_id == tune_tokenizer.eos_id
    assert hf_tokenizer.pad_token_id == tune_tokenizer.pad_id


def test_lora_pocket_takes_the_weights(pocket_dir):
    base = load_model(pocket_dir).state_dict()
    modules = ["q_proj", "k_proj", "v_proj", "output_proj"]
    model = pocket.lora_pocket(modules, apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8)
    missing, unexpected = model.load_state_dict(base, strict=False)
    assert not unexpected
    assert all(".lora_" in name for name in missing)


# ---- the data


def test_rows_are_disjoint_and_right(pocket_dir, held_out):
    train = read_rows(pocket_dir / "train.jsonl")
    assert len(held_out) >= 300
    parts = [set(part) for part in pocket.split_problems(7)]
    assert sum(map(len, parts)) == len(set.union(*parts))

    def numbers(row):
        a, b = sorted(int(word.strip(".?")) for word in row["prompt"].split() if word.strip(".?").isdigit())
        return a, b, "add" if "+" in row["prompt"] or "Add" in row["prompt"] else "subtract"

    assert not {numbers(row) for row in train} & {numbers(row) for row in held_out}
    for row in (*train, *held_out):
        (low, high, op), worked = numbers(row), row["messages"][1]["content"]
        assert row["answer"] == str(low + high if op == "add" else high - low)
        assert final_number(worked) == Decimal(row["answer"])
        for line in worked.splitlines()[:-1]:
            left, right = line.split("=")
            assert eval(left) == int(right)


def test_the_seed_decides(pocket_dir, tmp_path):
    pocket.make(tmp_path / "same", seed=7, target=0.01)
    for path in pocket_dir.iterdir():
        assert (tmp_path / "same" / path.name).read_bytes() == path.read_bytes(), path.name
    assert pocket.split_problems(8) != pocket.split_problems(7)


# ---- the folder


def test_an_earlier_pocket_model_is_kept(pocket_dir, capsys):
    before = (pocket_dir / "model.safetensors").stat().st_mtime_ns
    assert cli.main(["pocket", str(pocket_dir), "--seed", "7", "--accuracy", "0.01"]) == 0
    assert "exists already" in capsys.readouterr().out
    assert (pocket_dir / "model.safetensors").stat().st_mtime_ns == before
    assert cli.main(["pocket", str(pocket_dir), "--seed", "8", "--accuracy", "0.01"]) == 1
    assert "seed 7" in capsys.readouterr().err


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_another_folder_is_refused(tmp_path, capsys, force):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert cli.main(["pocket", str(tmp_path), *force]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path} exists")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(pocket, "_train", interrupt)
    assert cli.main(["pocket", str(tmp_path / "pocket")]) == 128 + signal.SIGINT
    assert not list(tmp_path.iterdir())


# ---- evaluation


def test_greedy_equals_that_of_transformers(pocket_dir, hf_model, tune_tokenizer, held_out):
    contents = [row["prompt"] for row in held_out[:12]] + ["Hello, who are you?", "1"]
    prompts = [render_prompt(tune_tokenizer, [{"role": "user", "content": text}]) for text in contents]
    replies = greedy(load_model(pocket_dir), tune_tokenizer, prompts, max_new_tokens=24, batch_size=5)
    for prompt, reply in zip(prompts, replies, strict=True):
        out = hf_model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
        assert reply == [token for token in out[len(prompt) :] if token not in tune_tokenizer.stop_tokens]


def test_greedy_ends_at_a_stop_token(pocket_dir, tune_tokenizer, held_out):
    model = load_model(pocket_dir)
    prompts = [render_prompt(tune_tokenizer, row["messages"][:1]) for row in held_out[:40]]
    whole = greedy(model, SimpleNamespace(stop_tokens=[]), prompts, max_new_tokens=8)
    assert all(len(reply) == 8 for reply in whole)
    stop = whole[0][3]
    cut = greedy(model, SimpleNamespace(stop_tokens=[stop]), prompts, max_new_tokens=8)
    assert cut == [list(takewhile(lambda token: token != stop, reply)) for reply in whole]
    assert len(cut[0]) < 8


def test_greedy_refuses_more_than_the_model_takes(pocket_dir, tune_tokenizer):
    with pytest.raises(UserError, match="257 tokens; the model takes 256"):
        greedy(load_model(pocket_dir), tune_tokenizer, [[1] * 57], max_new_tokens=200)


def test_the_card_says_what_eval_says(pocket_dir, capsys):
    card = json.loads((pocket_dir / pocket.CARD).read_text())
    files = ["--model", str(pocket_dir), "--data", str(pocket_dir / "heldout.jsonl")]
    assert cli.main(["eval", *files, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["correct"], said["total"]) == (card["correct"], card["total"])
    assert cli.main(["eval", *files, "--limit", "5"]) == 0
    assert "/5), 95 % interval" in capsys.readouterr().out


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_merge_as_in_peft(use_dora, pocket_dir, tmp_path, monkeypatch):
    # PEFT refuses every linear layer beside torchao < 0.16, the newest that torchtune works with
    monkeypatch.setattr(peft.tuners.lora.torchao, "is_torchao_available", lambda: False)
    base = AutoModelForCausalLM.from_pretrained(pocket_dir, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", use_dora=use_dora)
    model = peft.get_peft_model(base, config).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        ours, theirs = load_model(pocket_dir, tmp_path)(tokens), model(tokens).logits
        assert (theirs - load_model(pocket_dir)(tokens)).abs().max() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_another_architecture_is_named(pocket_dir, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="is a llama model"):
        load_model(tmp_path)


def test_accuracy_counts_right_answers(pocket_dir):
    tokenizer, model = load_tokenizer(pocket_dir), load_model(pocket_dir)
    prompts = ["What is 10 + 10?", "Add 12 and 71."]
    ids = [render_prompt(tokenizer, [{"role": "user", "content": prompt}]) for prompt in prompts]
    said = [final_number(tokenizer.decode(reply)) for reply in greedy(model, tokenizer, ids, 64)]
    answers = [str(said[0]), str(said[1] + 1)]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    assert str(accuracy(model, tokenizer, rows)).startswith("accuracy 50.0 % (1/2)")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7+8=15\n1+4+3=8\n85", "85"),
        ("so it is 1,234.50.", "1234.5"),
        ("The answer is -3", "-3"),
        ("5-3", "3"),
        ("x = -7\n", "-7"),
        ("85.0", "85"),
        ("17, 18", "18"),
    ],
)
def test_the_final_number(text, number):
    assert final_number(text) == Decimal(number)


def test_no_number_is_no_answer():
    assert final_number("none at all") is None


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [(100, 300, 0.2824, 0.3885), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson(k, n, low, high):
    # 81/263 is Newcombe's (1998) first example; the others follow from the formula
    assert wilson(k, n) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"prompt": "a", "answer": "none"}', '{"prompt": 1, "answer": 2}']
)
def test_bad_rows_are_one_line(content, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=r"rows\.jsonl"):
        read_rows(path)
