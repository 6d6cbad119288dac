"""`rocm-ext chat`: the recipes' answers as they are sampled, with a history, with and without an adapter."""

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocm_ext import cli, config
from rocm_ext.chat import Reasoning, TextStream
from rocm_ext.chat.stream import Writer
from rocm_ext.data.encoder import HFTokenizer, to_text
from rocm_ext.pocket import load_tokenizer
from rocm_ext.sampling import Completion
from rocm_ext.sampling.local import LocalSession
from tests.kit.hf_models import write_theirs
from tests.kit.tiny import write_yaml

pytestmark = pytest.mark.usefixtures("any_torchao")
QUESTIONS = ["What is 47 + 38?", "What is 90 - 12?"]


@pytest.fixture(scope="module")
def adapter(pocket_dir, tmp_path_factory, any_torchao) -> Path:
    """An adapter of PEFT's with random values, which change the answers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(pocket_dir, dtype=torch.float32)
    settings = peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    folder = tmp_path_factory.mktemp("adapter")
    peft.get_peft_model(model, settings).save_pretrained(folder)
    return folder


def theirs(model: Path, messages: list[dict], adapter: Path | None = None, limit: int = 32) -> str:
    """Return the greedy answer of transformers and PEFT."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    net = peft.PeftModel.from_pretrained(net, adapter) if adapter else net
    tokens = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = net.generate(**tokens, max_new_tokens=limit, do_sample=False)
    return tokenizer.decode(out[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)


def chat(
    monkeypatch, capfd, *arguments: str, lines: list[str] | None = None
) -> tuple[str, str, int]:
    """Run `rocm-ext chat` in this process; ``lines`` are typed at a terminal. Returns stdout, stderr and the code."""
    if lines is not None:
        typed = iter(lines)
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)

        def read(prompt: str = "") -> str:
            if (line := next(typed, None)) is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", read)
    capfd.readouterr()
    code = cli.main(["chat", *map(str, arguments), "hardware=cpu"])
    out, err = capfd.readouterr()
    return out, err, code


@pytest.mark.wide
def test_the_answer_is_that_of_the_recipes_sampler(pocket_dir, tmp_path, monkeypatch, capfd):
    out, err, code = chat(
        monkeypatch, capfd, pocket_dir, "-p", QUESTIONS[0], "--max-new-tokens", "32"
    )
    assert code == 0
    assert "tokens/s" in err
    assert "tokens/s" not in out
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": QUESTIONS[0], "answer": "85"}) + "\n")
    overrides = [f"pocket={pocket_dir}", "max_new_tokens=32"]
    arguments = [
        "--config",
        "cpu_pocket_raft",
        "--data",
        str(rows),
        "--output",
        str(tmp_path / "eval"),
    ]
    assert cli.main(["eval", *arguments, *overrides]) == 0
    sample = json.loads((tmp_path / "eval" / "samples.jsonl").read_text())
    assert out == sample["text"] + "\n"
    capfd.readouterr()
    # from a pipe, by a config of another recipe
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTIONS[0] + "\n"))
    arguments = ["cpu_pocket_dpo", f"pocket={pocket_dir}", "checkpointer.adapter_checkpoint=null"]
    assert chat(monkeypatch, capfd, *arguments, "--max-new-tokens", "32")[0] == out


def test_history_adapter_and_base_are_those_of_peft(pocket_dir, adapter, monkeypatch, capfd):
    lines = [
        QUESTIONS[0],
        "/base",
        QUESTIONS[1],
        "/reset",
        QUESTIONS[1],
        "/system Be brief.",
        f"/base {QUESTIONS[0]}",
    ]
    arguments = [pocket_dir, "--adapter", adapter, "--max-new-tokens", "32"]
    out, _, code = chat(monkeypatch, capfd, *arguments, lines=lines)
    asked = [{"role": "user", "content": question} for question in QUESTIONS]
    first = theirs(pocket_dir, asked[:1], adapter)
    said = {"role": "assistant", "content": first}
    system = {"role": "system", "content": "Be brief."}
    expected = [
        first, theirs(pocket_dir, asked[:1]), theirs(pocket_dir, [asked[0], said, asked[1]], adapter),
        theirs(pocket_dir, asked[1:], adapter), theirs(pocket_dir, [system, asked[0]], adapter),
        theirs(pocket_dir, [system, asked[0]]),
    ]  # fmt: skip
    assert out == "".join(text + "\n" for text in expected)
    assert expected[0] != expected[1]
    assert code == 0
    out, _, code = chat(monkeypatch, capfd, *arguments, "--base", "-p", QUESTIONS[0])
    assert (out, code) == ("".join(text + "\n" for text in expected[:2]), 0)


def test_a_runs_folder_stands_for_its_adapter_from_anywhere(
    pocket_dir, adapter, tmp_path, monkeypatch, capfd
):
    """The config's relative paths start where the run did."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/pocket").symlink_to(pocket_dir)
    lora = {"lora_rank": 4, "lora_alpha": 64, "target_modules": ["q_proj", "down_proj"]}
    content = {
        "recipe": "lora_finetune_rocm", "hardware": "cpu", "output_dir": "outputs/run",
        "pocket": "models/pocket",  # a variable of the user's
        "model": {"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": "${pocket}", **lora},
        "dataset": {"_component_": "rocm_ext.data.sft_dataset", "source": "${pocket}/train.jsonl"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    }  # fmt: skip
    run = tmp_path / "outputs/run"
    shutil.copytree(adapter, run / "adapter")
    cfg = config.load("lora_finetune_rocm", str(write_yaml(tmp_path / "run.yaml", content)))
    cfg.dataset = cfg.metric_logger = {
        "_component_": "of_the_users_own.Thing"
    }  # a conversation needs neither
    (run / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "path", [*sys.path])
    out, _, code = chat(monkeypatch, capfd, run, "-p", QUESTIONS[0], "--max-new-tokens", "32")
    assert out == theirs(pocket_dir, [{"role": "user", "content": QUESTIONS[0]}], adapter) + "\n"
    assert code == 0
    assert str(run) not in sys.path, "no library finds modules in the run's folder"


TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_tools(monkeypatch, folder: Path, tools: str, answer, **config) -> tuple[Path, list[str]]:
    """Make a model with a place for tools, whose n-th answer is ``answer(n)``; returns it and what it is asked."""
    model = write_theirs(folder / "model", "smollm 3", **config)
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    (folder / "my_tools.py").write_text(tools)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_tools", raising=False)
    asked = []

    def stream(self, request, sampling):
        asked.append(self._tokenizer.encoder.decode(request.tokens, special=True))
        tokens = self._tokenizer.encode(answer(len(asked)), add_bos=False, add_eos=True)
        yield from (tokens[:n] for n in range(1, len(tokens)))
        yield Completion(request, tokens, [0.0] * len(tokens), "", "stop")

    monkeypatch.setattr(LocalSession, "stream", stream)
    return model, asked


def test_a_model_calls_tools(tmp_path, monkeypatch, capfd):
    """The model gets what its calls give, until an answer calls none; mistakes are for it to read."""
    call = '<tool_call>{"name": "add", "arguments": {"a": %s, "b": 2}}</tool_call>'
    said = [f"I add. {call % 40}", call % '"x"', "It is 42.", "Yes."]
    add = 'def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n'
    model, asked = with_tools(monkeypatch, tmp_path, add, lambda number: said[number - 1])
    arguments = [model, "--tool", "my_tools.add", "--max-new-tokens", "8"]
    out, err, code = chat(monkeypatch, capfd, *arguments, lines=["What is 40 + 2?", "Sure?"])
    assert code == 0, err
    assert out.endswith("It is 42.\nYes.\n"), (out, err)
    assert "[add(a=40, b=2): 42]" in err
    assert "is not of type 'integer'" in err
    assert '"description": "Add."' in asked[0]
    assert asked[1].startswith(
        asked[0] + f"I add.{call % 40}<|im_end|>\n<|im_start|>tool\n42<|im_end|>"
    )
    assert asked[3].startswith(asked[2] + "It is 42.<|im_end|>\n<|im_start|>user\nSure?")
    bare = write_theirs(tmp_path / "bare", "smollm 3")  # its chat template knows no tools
    for folder, tool, says in (
        (bare, "add", "has no place for tools"),
        (model, "sub", "my_tools has no 'sub'"),
    ):
        _, err, code = chat(monkeypatch, capfd, folder, "--tool", f"my_tools.{tool}", "-p", "1+1?")
        assert code == 1
        assert says in err.splitlines()[-1]


def test_ctrl_c_stops_the_answer_and_not_the_program(pocket_dir, monkeypatch, capfd):
    write, seen = Writer.write, []

    def interrupting(self, text, reasoning):
        seen.append(text)
        write(self, text, reasoning)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Writer, "write", interrupting)
    _, err, code = chat(
        monkeypatch, capfd, pocket_dir, lines=[QUESTIONS[0], "/reset", QUESTIONS[0]]
    )
    assert code == 0
    assert "; stopped]" in err
    stopped, whole = "".join(seen[:3]), "".join(seen[3:])
    assert len(stopped) < len(whole)
    assert whole.startswith(stopped)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.setattr(Writer, "write", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    assert chat(monkeypatch, capfd, pocket_dir, "-p", QUESTIONS[0])[2] == 130


def test_old_turns_are_left_out_once_the_context_is_full(pocket_dir, tmp_path, monkeypatch, capfd):
    shutil.copytree(pocket_dir, tmp_path / "short")
    short = tmp_path / "short" / "config.json"
    short.write_text(json.dumps(json.loads(short.read_text()) | {"max_position_embeddings": 256}))
    lines = [*[QUESTIONS[0]] * 9, "1 + " * 200, "/nonsense", "/quit ", "/more"]
    _, err, code = chat(monkeypatch, capfd, short.parent, lines=lines)
    assert "exceeds the model's 256 tokens: 2 messages are left out" in err
    assert "error: the question has" in err
    assert err.count("unknown command") == err.count("unknown command /nonsense") == 1
    assert code == 0


CANNOT = {  # case -> arguments, fragment of the error
    "config": (["cpu_pocket"], "the model's folder demo/pocket does not exist; first run rocm-ext pocket"),
    "adapter": (["ADAPTER"], "name its model, too: MODEL --adapter ADAPTER"),
    "no adapter": (["MODEL", "-p", "1+1?", "--base"], "name a run's folder, or --adapter"),
    "file": (["MODEL", "-p", "1+1?", "--adapter", "ADAPTER/adapter_model.safetensors"], "is a file; name its folder"),
    "unfinished": (["HERE"], "has no adapter yet"),
    "missing": (["cpu_poket"], "there is no such folder"),
    "question": (["MODEL", "-p", " "], "the question is empty"),
    "seed": (["MODEL", "-p", "1+1?", "seed=3"], "--seed N repeats the same answers"),
}  # fmt: skip


@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_opened_says_why(case, adapter, pocket_dir, tmp_path, monkeypatch, capfd):
    def filled(text: str) -> str:
        return (
            text.replace("HERE", str(tmp_path))
            .replace("ADAPTER", str(adapter))
            .replace("MODEL", str(pocket_dir))
        )

    if case == "unfinished":
        (tmp_path / "config.yaml").write_text("recipe: lora_finetune_rocm\n")
    if case == "elsewhere":
        shutil.copytree(adapter, tmp_path / "adapter")
        cfg = config.load("lora_finetune_rocm", "cpu_pocket", ["pocket=models/pocket"])
        (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
    monkeypatch.chdir(tmp_path)
    arguments, expected = CANNOT[case]
    _, err, code = chat(monkeypatch, capfd, *map(filled, arguments), lines=[])
    assert filled(expected) in err
    assert err.count("\n") == 1
    assert code


@pytest.mark.parametrize(("changes", "named"), [
    ({"model": {"_component_": "os.system", "command": "touch MARK"}}, "os.system"),
    ({"model": {"_component_": "rocm_ext.config.launch.subprocess.run", "args": ["touch", "MARK"]}}, "subprocess.run"),
    ({"model": {"_component_": "${seed}", "command": "touch MARK"}, "seed": "os.system"}, "${seed}"),
    ({"model": {"_component_": "rocm_ext.model.from_checkpoint", "trust_remote_code": True}}, "trust_remote_code"),
    ({"checkpointer": {"_component_": "torchtune.training.checkpointing._utils.safe_torch_load"}}, "safe_torch_load"),
    ({"tokenizer": {"_component_": "torchtune.models.qwen2.qwen2_tokenizer", "prompt_template": "evil.Mark"}},
     "prompt_template"),
    ({"hardware": "evil.yaml"}, "hardware is 'evil.yaml'"),
    ({"recipe": "evil.py"}, "recipe is 'evil.py'"),
])  # fmt: skip
def test_a_downloaded_run_runs_no_code(changes, named, adapter, tmp_path, monkeypatch, capfd):
    """Not in the folder that the user talks from, either, which may be the run's."""
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", ["pocket=models/pocket"])
    content = {**OmegaConf.to_container(cfg), **changes}
    mark = tmp_path / "mark"
    shutil.copytree(adapter, tmp_path / "adapter")
    evil = f"open({str(mark)!r}, 'w')\ndef Mark(**rest): ...\nrecipe_main('evil', defaults='evil.yaml')\n"
    (tmp_path / "evil.py").write_text(evil)
    (tmp_path / "evil.yaml").write_text("recipe: evil\nextends: lora_finetune_rocm\n")
    (tmp_path / "config.yaml").write_text(json.dumps(content).replace("MARK", str(mark)))
    monkeypatch.chdir(tmp_path)
    _, err, code = chat(monkeypatch, capfd, tmp_path, "-p", "1+1?")
    assert code == 1
    assert named in err
    assert "If you trust this file, add --trust-config" in err
    assert err.count("\n") == 1
    assert not mark.exists()


def with_byte_fallback(folder: Path) -> HFTokenizer:
    """A tokenizer as those of Llama 2 and Gemma: characters outside of the vocabulary are single bytes."""
    words = ["<s>", "▁", "a", "b", "▁ab", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    return HFTokenizer(str(folder / "tokenizer.json"))


KINDS = {
    "torchtune": lambda pocket, folder: load_tokenizer(pocket),
    "byte-level": lambda pocket, folder: HFTokenizer(str(pocket / "tokenizer.json")),
    "byte fallback": lambda pocket, folder: with_byte_fallback(folder),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, pocket_dir, tmp_path_factory):
    return request.param, KINDS[request.param](pocket_dir, tmp_path_factory.mktemp("bytes"))


@given(data=st.data())
@settings(max_examples=75, deadline=None)
def test_streamed_pieces_are_the_text_of_all_tokens(tokenizer, data):
    kind, tokenizer = tokenizer
    some = st.lists(st.integers(0, 261 if kind == "byte fallback" else 511), max_size=12)
    text = st.text(st.sampled_from("aé ▁🎉數\n\ufffd"), max_size=8)
    if kind == "byte fallback":  # it cannot encode special characters without a normaliser
        encoded = text.map(lambda t: [6 + byte for byte in t.encode()])
    else:
        encoded = text.map(lambda t: tokenizer.encode(t, add_bos=False, add_eos=False))
    tokens = [
        token
        for part in data.draw(st.lists(st.one_of(some, encoded), max_size=6))
        for token in part
    ]
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in tokens]
    whole = to_text(tokenizer, tokens)
    for n in range(len(pieces) + 1):
        assert whole.startswith("".join(pieces[:n]))
    assert "".join(pieces) + stream.end() == whole


@given(
    parts=st.lists(st.sampled_from(["<", "think>", "</think>", "<think>", "a", "\n"]), max_size=12),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_reasoning_is_split_off_wherever_pieces_end(parts, data):
    text = "".join(parts)
    prompt = data.draw(st.sampled_from(["", "<think>\n", "<think>\n\n</think>\n\n"]))
    whole = Reasoning(prompt)
    expected = [whole.add(text), whole.end()]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    split = Reasoning(prompt)
    found = [split.add(piece) for piece in pieces] + [split.end()]

    def joined(parts: list, hidden: bool) -> str:
        return "".join(text for part in parts for text, kind in part if kind == hidden)

    assert "".join(text for part in found for text, _ in part) == text
    for hidden in (False, True):
        assert joined(found, hidden) == joined(expected, hidden)
    if "<think>" not in text:
        end = text.find("</think>")
        reasoning = text if end < 0 else text[: end + len("</think>")]
        assert joined(found, True) == reasoning * (prompt == "<think>\n")
