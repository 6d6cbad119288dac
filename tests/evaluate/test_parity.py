"""`rocm-ext parity` against llama.cpp, and against vLLM's protocol over transformers, on sound and broken exports."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocm_ext import cli
from rocm_ext.export import open_source
from rocm_ext.export.gguf_model import write_adapter, write_model
from tests.export.test_export import bases, trained  # noqa: F401 - fixtures
from tests.export.test_gguf_transformers import write_update
from tests.kit.families import id_of
from tests.kit.gguf import rewrite_gguf, write_gguf
from tests.kit.hf_models import GGUF, write_theirs
from tests.kit.lines import one_line_has
from tests.kit.llama_cpp import llama_cpp
from tests.kit.servers import MODELS, Fake, Prompted, Vllm, error
from tests.kit.tiny import write_yaml

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)

TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def parity(capsys):
    """Run `rocm-ext parity`, and return its exit code and what it prints."""

    def compare(model: Path, url: str, *options: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = cli.main(["parity", str(model), "--server", url, "--json", *map(str, options)])
        said = capsys.readouterr()
        return code, json.loads(said.out) if said.out else {"error": said.err.splitlines()[-1]}

    return compare


@pytest.fixture(scope="module")
def files(bases, trained, tmp_path_factory):  # noqa: F811
    """The run's base model in f16, its adapter, and the merged model."""
    top = tmp_path_factory.mktemp("files")
    write_model(open_source(bases("llama")), top / "base.gguf", "f16")
    write_model(open_source(trained), top / "merged.gguf", "f16")
    write_adapter(open_source(trained), top / "adapter.gguf")
    return top


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}


def without(path: Path, *parts: str) -> dict[str, None]:
    names = [name for name in tensors(path) if any(part in name for part in parts)]
    assert names
    return dict.fromkeys(names)


def unordered(path: Path, head_dim: int) -> dict[str, np.ndarray]:
    """Return B of q and k in Hugging Face's order of rows, which an export must change to llama.cpp's."""
    rows = {}
    for name, b in tensors(path).items():
        if name.endswith(("attn_q.weight.lora_b", "attn_k.weight.lora_b")):
            heads = b.reshape(-1, head_dim // 2, 2, b.shape[-1])
            rows[name] = np.ascontiguousarray(heads.swapaxes(1, 2).reshape(b.shape))
    assert rows
    return rows


def test_an_adapter_and_each_way_to_break_it(files, trained, parity, tmp_path):  # noqa: F811
    adapter, rank = files / "adapter.gguf", 4
    head_dim = 16
    broken = {
        "adapter's scale": ({"adapter.lora.alpha": 8.0 * rank**0.5}, {}),
        "dropped": ({}, without(adapter, "ffn_gate", "ffn_up", "ffn_down")),
        "order of heads": ({}, unordered(adapter, head_dim)),
        "not loaded": ({}, {name: 0 * data for name, data in tensors(adapter).items()}),
    }
    written = []
    for number, (keys, changed) in enumerate(broken.values()):
        written.append(rewrite_gguf(adapter, tmp_path / f"{number}.gguf", keys, changed))
    with llama_cpp(files / "base.gguf", adapter, *written) as server:
        few = ("--rows", 8, "--tokens", 16)
        code, sound = parity(trained, server.url, *few, "--served", 0)
        assert (code, sound["cause"], sound["equal"], sound["prompts"]) == (0, "", 8, 8)
        assert sound["share"] == pytest.approx(1, abs=0.01)
        assert 0 < sound["base"] < 0.05 < sound["effect"]
        for number, cause in enumerate(broken, 1):
            code, found = parity(trained, server.url, *few, "--served", number)
            assert (code, found["equal"]) == (1, 8), (cause, found)
            assert cause in found["cause"], (cause, found["cause"], found["share"])
            if cause == "adapter's scale":
                assert "4 (alpha / sqrt(r), rsLoRA's) on the server, 2 in the run" in found["cause"]
            if cause == "dropped":
                assert found["cause"].endswith("down_proj, gate_proj, up_proj")
        code, found = parity(trained, server.url, "--served", 9)
        assert (code, one_line_has(found["error"], "serves 0, 1, 2, 3, 4", "--served")) == (2, True)


def test_another_base_model(files, trained, parity, tmp_path):  # noqa: F811
    layers = {}
    for name, data in tensors(files / "base.gguf").items():
        for one, other in (("blk.0.", "blk.1."), ("blk.1.", "blk.0.")):
            if name.startswith(one):
                layers[name.replace(one, other)] = data
    other = rewrite_gguf(files / "base.gguf", tmp_path / "other.gguf", {}, layers)
    with llama_cpp(other, files / "adapter.gguf") as server:
        code, found = parity(trained, server.url)
        assert (code, found["cause"][:10]) == (1, "base model")
        assert found["base"] > 0.5


def test_a_merged_file_and_its_base_server(files, trained, parity, capsys):  # noqa: F811
    write_model(open_source(trained), files / "q8_0.gguf", "q8_0")
    with llama_cpp(files / "q8_0.gguf") as server:
        assert parity(trained, server.url)[0] == 0  # noise is no fault
    with llama_cpp(files / "merged.gguf") as server, llama_cpp(files / "base.gguf") as base:
        code, merged = parity(trained, server.url)
        assert (code, merged["base"]) == (0, None)
        assert merged["share"] == pytest.approx(1, abs=0.01)
        code, both = parity(trained, server.url, "--base-server", base.url)
        assert (code, both["base"] < 0.05) == (0, True)
        assert both["share"] == pytest.approx(1, abs=0.01)
        code, plain = parity(trained, base.url)
        assert (code, plain["cause"].startswith("adapter not loaded")) == (1, True)
        assert cli.main(["parity", str(trained), "--server", server.url]) == 0
        assert capsys.readouterr().out.endswith(
            "verdict: the server answers as the trained model\n"
        )
        assert cli.main(["parity", str(trained), "--server", base.url]) == 1
        assert "does not answer as the trained model: adapter not loaded" in capsys.readouterr().out


def test_prompts_and_each_way_to_break_them(bases, trained, parity, tmp_path, capsys):  # noqa: F811
    base = bases("llama")
    adapter = tmp_path / "adapter.gguf"
    write_adapter(open_source(trained), adapter)
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING)
    plain = write_gguf(base, tmp_path / "plain.gguf")
    kinds = gguf.GGUFReader(plain).fields["tokenizer.ggml.token_type"].contents()
    kinds[id_of(base, "<|im_start|>")] = gguf.TokenType.NORMAL
    broken = {
        "special token: the server reads '<|im_start|>' as text": {
            "tokenizer.ggml.token_type": kinds
        },
        "BOS added": {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 7},
        "chat template": {"tokenizer.chat_template": THINKING.replace("assistant", "model")},
    }
    few = ("--rows", 3, "--tokens", 3)
    for cause, metadata in broken.items():
        with llama_cpp(write_gguf(base, tmp_path / "x.gguf", metadata=metadata), adapter) as server:
            code, found = parity(trained, server.url, *few)
            assert (code, found["equal"], found["cause"]) == (1, 0, "")
            assert found["first"]["cause"].startswith(cause)
    # this server does not think unless a request says so
    thinking = write_gguf(base, tmp_path / "y.gguf", metadata={"tokenizer.chat_template": THINKING})
    with llama_cpp(thinking, adapter) as server:
        trains = [f"chat_template={template}", "chat_template_args={enable_thinking: True}"]
        code, found = parity(trained, server.url, *few, *trains)
        assert (code, found["equal"]) == (1, 0)
        assert found["first"]["cause"].startswith("thinking flag")
        assert "<think>" in found["first"]["served"]
        assert "<think>" not in found["first"]["here"]
        command = ["parity", str(trained), "--server", server.url, *map(str, few), *trains]
        assert cli.main(command) == 1
        *_, token, here, served, verdict = capsys.readouterr().out.splitlines()
        assert token.startswith("prompt 0, token ")
        assert here.startswith("  here:   ")
        assert "<think>" in served
        assert "does not answer as the trained model: thinking flag" in verdict
        code, found = parity(trained, server.url, *few, *trains, "--send-args")
        assert code == 0, found
        trains[1] = trains[1].replace("True", "False")
        code, found = parity(trained, server.url, *few, *trains)
        assert (code, one_line_has(found["error"], "no row", "renders this assistant turn")) == (
            2,
            True,
        )


def write_lines(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_prompts_with_tools_and_calls_of_earlier_turns(bases, trained, parity, tmp_path):  # noqa: F811
    call = {"function": {"name": "sold", "arguments": {"month": "May", "clips": 24}}}
    schema = {"type": "object", "properties": {"month": {"type": "string"}}, "required": ["month"]}
    tool = {"name": "sold", "description": "Clips of a month", "parameters": schema}
    turns = [
        {"role": "user", "content": "How many in May?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", **call}]},
        {"role": "tool", "content": "24"},
        {"role": "assistant", "content": "She sold 24 clips in May."},
    ]
    row = {"messages": turns, "tools": [{"type": "function", "function": tool}]}
    rows = write_lines(tmp_path / "rows.jsonl", [row])
    template = tmp_path / "tools.jinja"
    template.write_text(TOOLS)
    adapter = tmp_path / "adapter.gguf"
    write_adapter(open_source(trained), adapter)
    given = (
        "--data",
        rows,
        "dataset.column_map=null",
        "tokenizer.max_seq_len=512",
        f"chat_template={template}",
    )
    base = write_gguf(
        bases("llama"), tmp_path / "x.gguf", metadata={"tokenizer.chat_template": TOOLS}
    )
    with llama_cpp(base, adapter) as server:
        code, found = parity(trained, server.url, *given)
        assert (code, found["equal"]) == (0, 1)
        code, found = parity(trained, server.url, *given, "tokenizer.max_seq_len=64")
        assert (code, one_line_has(found["error"], "no row", "64 tokens")) == (2, True)
    # a server that gives the template the arguments as text, as some do
    answer = Prompted(bases("llama"), TOOLS, parses=False)
    vllm = Vllm(answer)
    vllm.adapters["mine"] = str(trained / "adapter")
    server = Fake(vllm)
    code, found = parity(trained, server.url, *given, "--served", "mine")
    assert (code, found["first"]["cause"][:13]) == (1, "chat template")
    assert 'sold"{' in found["first"]["served"]
    answer.parses = True
    assert parity(trained, server.url, *given, "--served", "mine")[0] == 0
    server.die()


def test_dropped_experts_and_a_dropped_output_layer(parity, tmp_path):
    base = write_theirs(tmp_path / "base", "qwen3 moe", **GGUF["qwen3 moe"])
    layers = ["q_proj", "v_proj", "lm_head"]
    adapter = write_update(tmp_path / "adapter", base, "qwen3 moe", target_modules=layers)
    write_model(open_source(base), tmp_path / "base.gguf", "f32")
    sound = tmp_path / "sound.gguf"
    write_adapter(open_source(adapter), sound)
    dropped = {
        "dropped: the adapter of experts.down_proj, experts.gate_up_proj": "_exps",
        "dropped: the adapter of lm_head": "output.weight",
    }
    broken = []
    for part in dropped.values():
        target = tmp_path / f"{part}.gguf"
        broken.append(rewrite_gguf(sound, target, {}, without(sound, part)))
    lines = [
        {"prompt": f"How many in {i}?", "completion": f"She sold {7 * i} clips in April, not {i}."}
        for i in range(12)
    ]
    rows = write_lines(tmp_path / "rows.jsonl", lines)
    given = ("--adapter", adapter, "--data", rows)
    with llama_cpp(tmp_path / "base.gguf", sound, *broken) as server:
        code, found = parity(base, server.url, *given, "--served", 0)
        assert (code, found["equal"]) == (0, 12)
        assert found["share"] == pytest.approx(1, abs=1e-3)
        for number, cause in enumerate(dropped, 1):
            code, found = parity(base, server.url, *given, "--served", number)
            assert (code, found["cause"]) == (1, cause)


def test_vllms_protocol(bases, trained, parity):  # noqa: F811
    answer = Prompted(bases("llama"))
    vllm = Vllm(answer)
    vllm.adapters["mine"] = str(trained / "adapter")
    server = Fake(vllm)
    code, found = parity(trained, server.url, "--served", "mine")
    assert (code, found["equal"], found["untold"]) == (0, 16, 0)
    assert found["share"] == pytest.approx(1, abs=1e-3)
    assert found["base"] < 1e-4
    assert parity(trained, server.url, "--served", "base")[1]["cause"].startswith("adapter not")
    answer.dropped = ("self_attn",)
    code, found = parity(trained, server.url, "--served", "mine")
    assert code == 1
    assert found["cause"] == "dropped: the adapter of k_proj, o_proj, q_proj, v_proj"
    answer.dropped = ()
    for cause, changes in {
        "BOS added": lambda ids: [7, *ids],
        "BOS doubled": lambda ids: [ids[0], *ids],
        "BOS missing": lambda ids: ids[1:],
        "header of the assistant's turn missing: '<|im_start|>assistant": lambda ids: ids[
            : len(ids) - 1 - ids[::-1].index(ids[0])
        ],
    }.items():
        answer.changes = changes
        code, found = parity(trained, server.url, "--served", "mine", "--rows", 2)
        assert (code, found["first"]["cause"][: len(cause)]) == (1, cause)
    code, found = parity(trained, server.url)
    assert (code, one_line_has(found["error"], "base, old, mine", "--served")) == (2, True)
    server.die()


def test_what_cannot_be_compared_is_one_line(bases, trained, parity, tmp_path):  # noqa: F811
    def refuses(path, body):
        return error(401, "no key", "Unauthorized")

    def tells_no_logprobs(path, body):
        if path == MODELS:
            return {"data": [{"id": "m"}]}
        return {"tokens": [1]} if "messages" in body else {"choices": [{"text": ""}]}

    gone = Fake(refuses)
    gone.die()
    for server, words in (
        (gone, ("cannot be reached", "is it running?")),
        (Fake(refuses), ("HTTP 401", "no key", "api_key_env")),
        (Fake(tells_no_logprobs), ("does not return the log-probs",)),
    ):
        code, found = parity(trained, server.url)
        assert code == 2
        assert one_line_has(found["error"], *words), found
    untrained = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(untrained / "adapter")
    code, found = parity(untrained, gone.url)
    assert (code, one_line_has(found["error"], "has no adapter yet")) == (2, True)


def test_answers_of_a_run_that_samples_and_of_pairs(bases, trained, parity, tmp_path):  # noqa: F811
    base = bases("llama")
    vllm = Vllm(Prompted(base))
    vllm.adapters["mine"] = str(trained / "adapter")
    server = Fake(vllm)
    run = shutil.copytree(trained / "adapter", tmp_path / "run" / "adapter").parent
    prompts = [{"id": str(i), "prompt": f"How many in {i}?", "answer": "7"} for i in range(4)]
    model = {"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": str(base)}
    common = {
        "hardware": "cpu",
        "model": {**model, "lora_rank": 4, "lora_alpha": 8},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
    }
    raft = {
        **common,
        "recipe": "raft_rocm",
        "output_dir": str(run),
        "prompts": {
            "_component_": "rocm_ext.data.prompt_dataset",
            "source": str(write_lines(tmp_path / "prompts.jsonl", prompts)),
        },
    }
    write_yaml(run / "config.yaml", raft)
    samples = []
    for step in (1, 2):
        for prompt in ("0", "1"):
            tokens = [5, 17, 99 + step, id_of(base, "<|im_end|>")]
            key = {"step": step, "phase": "sample", "prompt_id": prompt, "sample": 0}
            samples.append({**key, "text": "", "tokens": tokens})
    # a conversation has no single prompt
    samples.append({**samples[-1], "prompt_id": "2", "messages": []})
    write_lines(run / "samples.jsonl", samples)
    code, found = parity(run, server.url, "--served", "mine")
    assert [found[key] for key in ("prompts", "equal", "tokens")] == [2, 2, 8]
    assert code == 0
    pairs = [
        {"prompt": f"In {i}?", "chosen": f"It is {i}.", "rejected": "I do not know that number."}
        for i in range(3)
    ]
    dpo = {
        **common,
        "recipe": "dpo_rocm",
        "output_dir": str(tmp_path / "dpo"),
        "dataset": {
            "_component_": "rocm_ext.data.preference_dataset",
            "source": str(write_lines(tmp_path / "pairs.jsonl", pairs)),
        },
    }
    config = write_yaml(tmp_path / "dpo.yaml", dpo)
    code, found = parity(config, server.url, "--served", "mine", "--adapter", trained / "adapter")
    assert (code, found["equal"]) == (0, 3), found
    code, found = parity(config, server.url, "--served", "mine")
    assert (code, one_line_has(found["error"], "there is no adapter", "--adapter")) == (2, True)
    server.die()
