"""Models from a folder in Hugging Face's format equal transformers' and PEFT's in every native family."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from rocm_ext.recipes.lora_finetune_rocm import main
from rocm_ext.recipes.raft_rocm import main as raft_main
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from rocm_ext import cli, config
from rocm_ext.base.errors import UserError
from rocm_ext.data.encoder import to_text
from rocm_ext.data.render import render_conversation, render_prompt
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.build import build_model, load_weights, read_weights
from rocm_ext.model.sampler import sampler_of
from rocm_ext.model.token_rows import token_rows
from rocm_ext.sampling import Request, Sampling
from rocm_ext.sampling.local import LocalSession
from tests.data.test_chat_template import CHATS, FAMILIES, config_for, model_folder  # noqa: F401 - a fixture
from tests.kit import parity
from tests.kit.families import MODELS, PATTERNS, folder_config, id_of, write_family
from tests.kit.forks import forked, several_ranks
from tests.kit.parity import (
    CPU,
    TOKENS,
    load,
    our_model,
    prepare,
    their_model,
)
from tests.kit.plans import planned_and_measured
from tests.kit.raft_runs import held_out, write_run
from tests.kit.tiny import run_config, write_rows, write_yaml

pytestmark = pytest.mark.usefixtures("any_torchao")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of base models by name, and ``rows`` with 80 rows."""
    top = tmp_path_factory.mktemp("families")
    found = {
        name: write_family(top / name.replace(" ", "_"), name, shards=1 + (name == "qwen3"))
        for name in MODELS
    }
    return {**found, "rows": write_rows(top / "rows.jsonl", 80)}


# ---- the same function
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers(folders, name):
    ours, theirs = our_model(folders[name]), their_model(folders[name])
    found, expected = ours(TOKENS), theirs(TOKENS).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    pairs = {"tok_embeddings.weight": "model.embed_tokens.weight"}
    for norm, their_norm in (
        ("sa_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
    ):
        pairs[f"layers.0.{norm}.scale"] = f"model.layers.0.{their_norm}.weight"
    if "qwen3" in name:
        pairs["layers.0.attn.q_norm.scale"] = "model.layers.0.self_attn.q_norm.weight"
        pairs["layers.0.attn.k_norm.scale"] = "model.layers.0.self_attn.k_norm.weight"
    parameters = [ours.get_parameter(own).requires_grad_() for own in pairs]
    gradients = torch.autograd.grad((ours(TOKENS) * weights).sum(), parameters)
    wanted = torch.autograd.grad(
        (expected * weights).sum(), [theirs.get_parameter(p) for p in pairs.values()]
    )
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_pack_equals_its_sequences_alone(folders, name):
    plain, packed = our_model(folders[name]), our_model(folders[name])
    assert packed.packs
    lengths = [7, 1, 12, 4]
    sequences = parity.random_sequences(lengths, 3)
    found = packed.output(packed.hidden_states(parity.pack(sequences, 8)))[0, : sum(lengths)]
    torch.testing.assert_close(
        found, torch.cat([plain(s[None])[0] for s in sequences]), rtol=1e-5, atol=1e-5
    )


def test_padded_rows_mask_as_told(folders):
    """Padding on the left, which a mask hides, changes nothing."""
    decoder = our_model(folders["qwen3"])
    sequence = parity.random_sequences([6], 1)[0]
    row = torch.cat([torch.zeros(3, dtype=torch.long), sequence])[None]
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    visible[3:, :3] = False
    positions = torch.tensor([[0, 1, 2, *range(6)]])
    found = decoder(row, mask=visible[None], input_pos=positions)[0, 3:]
    torch.testing.assert_close(found, decoder(sequence[None])[0], rtol=1e-5, atol=1e-5)
    decoder.setup_caches(batch_size=1, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="no key-value cache"):
        decoder(sequence[None], mask=visible[None, :6, :6], input_pos=positions[:, 3:])


@pytest.mark.parametrize("name", ["qwen2", "qwen2 tied"])
def test_equals_torchtunes_builder(folders, tmp_path, name):
    cfg = run_config(folders[name], folders["rows"], tmp_path / "run")
    cfg["model"] |= {"lora_rank": 4, "lora_alpha": 8, "rope_base": 1e4}
    loaded = load(cfg)
    theirs = build_model(loaded.model, torch.float32, 0, CPU)
    load_weights(theirs, read_weights(loaded.checkpointer), Ranks(CPU))
    ours = our_model(folders[name], lora_rank=4, lora_alpha=8)
    prints = [peft_files.fingerprint(peft_files.adapter_state(each)) for each in (ours, theirs)]
    assert prints[0] == prints[1]
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS), rtol=0, atol=0)


# ---- training
@pytest.mark.wide(always=2)
@pytest.mark.parametrize(
    ("name", "lora", "ratio"),
    [
        ("qwen3", {**PATTERNS, "trainable_tokens": ["<|im_end|>", 17]}, None),
        ("qwen2", {"use_dora": True}, 4),
        (
            "llama",
            {"target_modules": ["q_proj", "down_proj"], "trainable_tokens": ["<|im_start|>", "e"]},
            0.5,
        ),
        (
            "mistral",
            {
                "target_modules": ["k_proj", "lm_head"],
                "trainable_tokens": {"embed_tokens": ["<|im_end|>"]},
            },
            None,
        ),
        ("qwen3", {}, None),
        pytest.param("llama biased", {}, None, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_ten_steps_equal_peft(folders, tmp_path, name, lora, ratio):
    """Also with layers of other sizes, and with LoRA+."""
    cfg = folder_config(
        folders[name], folders["rows"], tmp_path / "run", lora, loraplus_lr_ratio=ratio
    )
    first, found, expected = parity.ten_steps(cfg, folders[name], tmp_path)
    for key, tensor in found.items():
        assert (tensor - first[key]).abs().max() > 1e-3, key
        torch.testing.assert_close(
            tensor, expected[key], rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


# ---- sampling
class Ids:
    """A tokenizer for token ids alone."""

    def __init__(self, stop_tokens):
        self.stop_tokens = list(stop_tokens)

    def decode(self, tokens):
        return " ".join(map(str, tokens))


def greedy(decoder, prompts, count: int, merge=None) -> list[tuple[list[int], list[float]]]:
    """Return the ids and log-probs of greedy answers."""
    requests = [Request(str(i), 0, 0, tuple(prompt)) for i, prompt in enumerate(prompts)]
    with sampler_of(decoder, merge) as laid_out:
        session = LocalSession(laid_out, Ids([10_000]), lambda: 2**30)
        completions = list(session.generate(requests, Sampling(count, temperature=0)))
    found = {int(c.request.prompt_id): (c.tokens, c.logprobs) for c in completions}
    return [found[i] for i in range(len(prompts))]


@pytest.mark.wide(always=3)
@pytest.mark.parametrize("name", ["llama", "llama biased", "qwen2 tied", "qwen3", "mistral"])
@pytest.mark.parametrize("merge", [True, False])
@torch.no_grad()
def test_greedy_answers_equal_transformers(folders, tmp_path, name, merge):
    ours = our_model(
        folders[name], lora_rank=4, lora_alpha=8, trainable_tokens=[3, 60, 200], **PATTERNS
    ).eval()
    generator = torch.Generator().manual_seed(1)
    for layer in (module for module in ours.modules() if hasattr(module, "lora_b")):
        layer.lora_b.weight.normal_(std=0.1, generator=generator)
    for _, rows in token_rows(ours):
        rows.weight.normal_(std=0.3, generator=generator)
    peft_files.write_adapter(tmp_path, ours, "HF", str(folders[name]))
    theirs = their_model(folders[name], tmp_path)
    prompts = [s.tolist() for s in parity.random_sequences([3, 20, 9], 5)]
    found = greedy(ours, prompts, 16, merge)
    assert greedy(our_model(folders[name]).eval(), prompts, 16, merge) != found, (
        "the adapter matters"
    )
    for prompt, (tokens, logprobs) in zip(prompts, found, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
        assert tokens == expected[0, len(prompt) :].tolist()
        logits = theirs(expected).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), wanted, rtol=0, atol=1e-4)


# ---- files
@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("qwen3", {"use_dora": True, "trainable_tokens": [99, 17]}),
        ("llama", {"trainable_tokens": {"embed_tokens": [99, 17]}}),
        ("mistral", {"target_modules": ["v_proj", "lm_head"], "rank_pattern": {"lm_head": 2}}),
        pytest.param("llama biased", {"target_modules": "o_proj"}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_exports_give_our_logits_and_the_adapter_comes_back(folders, tmp_path, name, lora):
    expected, whole = (
        parity.check_exports(folders[name], folders["rows"], tmp_path, lora),
        tmp_path / "run" / "merged",
    )
    files = [
        sorted(path.name for path in folder.glob("*.safetensors"))
        for folder in (whole, folders[name])
    ]
    assert files[0] == files[1]
    # what was exported is a base model, too
    torch.testing.assert_close(our_model(whole).eval()(TOKENS), expected, rtol=0, atol=1e-4)


def test_a_file_of_torchtunes_adapter_is_refused(folders, tmp_path):
    """torchtune's rows of q and k are in another order in most families."""
    torch.save({}, tmp_path / "adapter_model.pt")
    adapter = {"adapter_checkpoint": str(tmp_path / "adapter_model.pt")}
    with pytest.raises(UserError, match="a file of torchtune's"):
        prepare(
            folder_config(folders["llama"], folders["rows"], tmp_path / "run", checkpointer=adapter)
        )


# ---- whole runs
@pytest.mark.wide
def test_killed_and_resumed(folders, tmp_path):
    """From the config that the run recorded, and from a folder that has moved; with LoRA+ and layers of other sizes."""
    base = shutil.copytree(folders["qwen3"], tmp_path / "base")
    cfg = parity.whole_run(
        base,
        folders["rows"],
        tmp_path / "whole",
        {**PATTERNS, "trainable_tokens": [17, "<|im_end|>"]},
        loraplus_lr_ratio=4,
    )
    parity.check_resumes(cfg, "recorded")
    parity.check_resumes(
        cfg, "moved", lambda: f"model.checkpoint_dir={base.rename(tmp_path / 'elsewhere')}"
    )


@pytest.mark.wide
@several_ranks
@pytest.mark.parametrize("name", ["qwen3", pytest.param("llama", marks=pytest.mark.wide)])
def test_two_ranks_equal_one(folders, tmp_path, name):
    parity.check_two_ranks(
        folders[name],
        folders["rows"],
        tmp_path,
        {**PATTERNS, "trainable_tokens": ["<|im_end|>", "e"]},
        loraplus_lr_ratio=4,
    )


@pytest.mark.wide
@pytest.mark.usefixtures("cpu_of_known_speed")
@pytest.mark.parametrize(
    "changes",
    # the fast tests of plan have these of Qwen2; bf16 is slow on a CPU
    [
        {},
        {"enable_activation_checkpointing": True},
        {"enable_activation_checkpointing": True, "dtype": "bf16"},
    ],
    ids=str,
)
def test_planned_peak_is_the_measured_one(tmp_path, changes, capsys):
    wide = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "head_dim": 64}
    base = write_family(tmp_path / "base", "qwen3", **wide)
    at_start, peak = planned_and_measured(
        base, tmp_path / "run", {"trainable_tokens": list(range(50))}, **changes
    )
    for file in base.glob("*.safetensors"):
        file.unlink()  # a plan reads config.json alone
    assert cli.main(["plan", "--json", "--config", str(tmp_path / "run.yaml")]) == 0
    planned = json.loads(capsys.readouterr().out)["configured"]["memory"]["peak"]
    assert planned == at_start
    assert planned == pytest.approx(peak, rel=0.1)


@pytest.mark.wide
def test_raft_and_eval(folders, tmp_path, capsys):
    """A cycle of RAFT on Qwen3 samples, trains and evaluates; `rocm-ext eval` gives the scores of the run."""
    shutil.copytree(folders["qwen3"], tmp_path / "base")
    for name, count, start in (("prompts", 8, 0), ("heldout", 4, 100)):
        write_rows(tmp_path / f"{name}.jsonl", count, start)
    path = write_run(tmp_path, tmp_path / "run", cycles=1, epochs=1)
    cfg = yaml.safe_load(path.read_text())
    ours = folder_config(
        tmp_path / "base", path, tmp_path / "run", {"trainable_tokens": [*range(100), "<|im_end|>"]}
    )
    cfg |= {key: ours[key] for key in ("model", "tokenizer")}
    del cfg["checkpointer"]
    path = write_yaml(path, cfg)
    code, said = forked(raft_main, path)
    assert code == 0, said
    adapter = tmp_path / "run" / "cycle_1" / "adapter"
    assert all(tensor.any() for tensor in load_file(adapter / "adapter_model.safetensors").values())
    assert cli.main(["eval", "--json", "--config", str(path), "--adapter", str(adapter)]) == 0
    evaluated = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert evaluated == held_out(tmp_path / "run")[1]


# ---- the config
def test_what_a_config_may_leave_out(folders, tmp_path):
    cfg = folder_config(folders["qwen3"], folders["rows"], tmp_path / "run")
    loaded = load(cfg)
    folder, own = (
        str(folders["qwen3"]),
        {"_component_": "rocm_ext.model.HFCheckpointer", "model_type": "HF"},
    )
    assert loaded.checkpointer == {
        **own,
        "checkpoint_dir": folder,
        "output_dir": str(tmp_path / "run"),
    }
    tokenizer = {
        "_component_": "rocm_ext.data.HFTokenizer",
        "path": f"{folder}/tokenizer.json",
        "max_seq_len": 128,
    }
    assert loaded.tokenizer == tokenizer
    del cfg["tokenizer"]
    assert "max_seq_len" not in load(cfg).tokenizer
    path = write_yaml(tmp_path / "run.yaml", cfg)
    overrides = ["model.checkpoint_dir=/elsewhere", "tokenizer.max_seq_len=64"]
    moved = config.load("lora_finetune_rocm", str(path), overrides)
    assert moved.checkpointer.checkpoint_dir == "/elsewhere"
    assert moved.tokenizer == tokenizer | {"path": "/elsewhere/tokenizer.json", "max_seq_len": 64}
    with pytest.raises(
        UserError, match=r"unknown key tokenizer.max_seq_length.*did you mean tokenizer.max_seq_len"
    ):
        load({**cfg, "tokenizer": {"max_seq_length": 64}})
    with pytest.raises(UserError, match="checkpointer, tokenizer must be set"):
        load({**cfg, "model": run_config(folders["qwen2"], path, tmp_path)["model"]})
    own = {
        "_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer",
        "path": "vocab.json",
        "merges_file": "m.txt",
    }
    assert load({**cfg, "tokenizer": own}).tokenizer == own


def test_the_tokenizer_is_the_folders(folders, tmp_path):
    cfg = load(folder_config(folders["qwen3"], folders["rows"], tmp_path / "run"))
    tokenizer = open_tokenizer(cfg)
    theirs = AutoTokenizer.from_pretrained(folders["qwen3"])
    turns = [{"role": "user", "content": "How many? "}, {"role": "assistant", "content": "24."}]
    expected = theirs.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    assert render_prompt(tokenizer, turns[:1]) == expected
    tokens, labels = render_conversation(tokenizer, turns)
    end = id_of(folders["qwen3"], "<|im_end|>")
    assert [token for token in labels if token >= 0] == [*theirs.encode("24."), end]
    assert tokenizer.stop_tokens == [end]
    assert (
        tokenizer.decode(tokens).split() == theirs.decode(tokens, skip_special_tokens=True).split()
    )
    assert tokenizer.pad_id == id_of(folders["qwen3"], "<|endoftext|>")
    assert to_text(tokenizer, [*tokens, 10_000, 2**40]) == tokenizer.decode(tokens), (
        "ids beyond the vocabulary"
    )
    assert "<|im_end|>" in tokenizer.reserved
    assert "<tool_call>" in tokenizer.special_tokens


def test_builder_and_checkpointer_must_agree(folders, tmp_path):
    ours = folder_config(folders["llama"], folders["rows"], tmp_path / "run")
    theirs = run_config(folders["llama"], folders["rows"], tmp_path / "run")
    own = {
        "_component_": "rocm_ext.model.HFCheckpointer",
        "checkpoint_dir": str(folders["llama"]),
        "model_type": "HF",
    }
    for cfg in ({**ours, "checkpointer": theirs["checkpointer"]}, {**theirs, "checkpointer": own}):
        with pytest.raises(UserError, match="leave checkpointer and tokenizer out"):
            prepare({**cfg, "tokenizer": theirs["tokenizer"]})
    # weights of another folder that fit in shape would be computed with this folder's RoPE
    other = shutil.copytree(folders["llama"], tmp_path / "other")
    with pytest.raises(
        UserError, match=rf"checkpointer.checkpoint_dir is {other}, but model.checkpoint_dir is "
    ):
        prepare({**ours, "checkpointer": {"checkpoint_dir": str(other)}})


# ---- bad input
@pytest.fixture
def changed(folders, tmp_path):
    """``changed(name, **keys)``: a copy of a model's folder with other values in config.json; None removes a key."""

    def change(name: str = "qwen3", **keys) -> Path:
        folder = shutil.copytree(folders[name], tmp_path / "Qwen3-8B", dirs_exist_ok=True)
        content = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(
            json.dumps({k: v for k, v in content.items() if v is not None})
        )
        return folder

    return change


@pytest.mark.parametrize(
    ("key", "pattern", "message"),
    [
        (
            "rank_pattern",
            {"q_prj": 2},
            "'q_prj', which matches no adapted layer; did you mean q_proj?",
        ),
        (
            "rank_pattern",
            {"lm_head": 2},
            "'lm_head', which matches no adapted layer; known: down_proj, ",
        ),
        (
            "rank_pattern",
            {"(q_proj": 2},
            "expected layers' names or regular expressions, with a whole number",
        ),
        ("rank_pattern", {"q_proj": 0}, "expected layers' names"),
        ("rank_pattern", ["q_proj"], "expected layers' names"),
        ("alpha_pattern", {"q_proj": 0}, "with a number above 0 for each, or null"),
    ],
    ids=str,
)
def test_patterns_that_fit_no_layer(folders, key, pattern, message):
    with pytest.raises(UserError, match=rf"^model\.{key} ") as caught:
        our_model(folders["qwen3"], **{key: pattern})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def rope(kind: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more}}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"architectures": ["Gemma3ForCausalLM"]},
            "names Gemma3ForCausalLM, but transformers builds",
        ),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, "brings its own code"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantised \(gptq\)"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        (rope("longrope"), "rope_type 'longrope' is not supported"),
        (
            rope("yarn", factor=4.0, beta_fast=1),
            "beta_fast 1.0, beta_slow 1.0; expected beta_fast over",
        ),
        (rope("default", partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        (rope("llama3", low_freq_factor=4.0, high_freq_factor=4.0), "are both 4.0"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "one set of parameters for all layers",
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_scaling: rope_type 'dynamic'",
        ),  # by hand
    ],
    ids=lambda value: str(value)[:50],
)
def test_config_json_that_is_not_computed(changed, keys, message):
    folder = changed(**keys)
    with pytest.raises(UserError, match=rf"^{folder}/config\.json: .*{message}") as caught:
        our_model(folder)
    assert "\n" not in str(caught.value)


def test_a_layer_that_nf4_does_not_take_is_named(folders):
    with pytest.raises(
        UserError, match=r"o_proj \[64, 96\] cannot be stored in 4 bits.*leave it out of"
    ):
        our_model(folders["qwen3"], quantize_base=True, target_modules=["o_proj"])


def test_mistrals_window_where_the_key_is_missing(changed):
    folder = changed("mistral", sliding_window=None, max_position_embeddings=8192)
    assert their_model(folder).config.sliding_window == our_model(folder).max_seq_len == 4096


@pytest.mark.parametrize(
    ("name", "keys", "positions"),
    [
        ("mistral", {}, 256),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": None,
                "max_window_layers": 1,
            },
            64,
        ),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": None,
                "max_window_layers": 2,
            },
            512,
        ),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 2,
            },
            64,
        ),
    ],
    ids=str,
)
def test_a_sliding_window_limits_positions(changed, name, keys, positions):
    folder = changed(name, **keys)
    decoder = our_model(folder)
    assert decoder.max_seq_len == positions
    tokens = torch.randint(1, 250, (1, positions), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        decoder(tokens), their_model(folder)(tokens).logits, rtol=1e-4, atol=1e-4
    )


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit_weights(path: Path, change) -> None:
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def with_dtype(path: Path, dtype: torch.dtype) -> None:
    edit_weights(
        path, lambda state: state.update({name: tensor.to(dtype) for name, tensor in state.items()})
    )


INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json is missing; .*tune download Qwen/Qwen3-8B"),
        (lambda f: (f / FIRST).unlink(), f"lacks 1 of 3 weight files, first {FIRST}; .*tune download"),
        (lambda f: torn(f / FIRST), f"cannot read .*{FIRST}: .*download the file again"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "../a.safetensors"}}'), "not a file beside it"),
        (lambda f: edit_weights(f / FIRST, lambda s: s.update({"model.mtp.0.weight": torch.ones(1)})),
         "has model.mtp.0.weight, which no layer of this model has"),
        (lambda f: with_dtype(f / FIRST, torch.int8), "is stored as int8, a quantised format"),
    ],
)  # fmt: skip
def test_damaged_folders(changed, damage, message):
    folder = changed()
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        our_model(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_another_config_describes(changed):
    with pytest.raises(
        UserError, match=r"does not fit model: .* in the checkpoint, \[.*\] in the model"
    ):
        our_model(changed(intermediate_size=80))
    with pytest.raises(UserError, match=r"tie_word_embeddings.* weights differ"):
        our_model(changed(tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("qwen3", ["q_prj"], "'q_prj', which is no layer; did you mean q_proj"),
        ("qwen3", [], "target_modules is empty"),
        ("qwen3 tied", ["lm_head"], "the model's output layer is its embeddings"),
    ],
    ids=str,
)
def test_target_modules(folders, name, targets, message):
    with pytest.raises(UserError, match=message):
        our_model(folders[name], target_modules=targets)


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        (
            "qwen3",
            {"trainable_tokens": ["<think>"]},
            "'<think>', which is 6 tokens of .*tokenizer.json",
        ),
        (
            "qwen3",
            {"trainable_tokens": [10_000]},
            "id 10000, but the model's embeddings have 384 rows; add rows",
        ),
        ("qwen3", {"trainable_tokens": [-1]}, "has -1; expected a token's text or its id"),
        ("qwen3", {"trainable_tokens": []}, "trainable_tokens is empty"),
        (
            "qwen3",
            {"trainable_tokens": {"q_proj": [3]}},
            "has 'q_proj'; expected embed_tokens or lm_head",
        ),
        (
            "qwen3",
            {"trainable_tokens": [3], "target_modules": ["lm_head"]},
            r"or set .*=\{embed_tokens: \[3\]\}",
        ),
        (
            "qwen3 tied",
            {"trainable_tokens": {"lm_head": [3]}},
            "lm_head is embed_tokens in this model",
        ),
    ],
    ids=str,
)
def test_trainable_tokens(folders, name, lora, message):
    with pytest.raises(UserError, match=message) as caught:
        our_model(folders[name], **lora)
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_one_line(folders, tmp_path, capsys):
    """Both recipe and plan name the download."""
    cfg = folder_config(tmp_path / "Llama-3.2-1B", folders["rows"], tmp_path / "run")
    path = write_yaml(tmp_path / "run.yaml", cfg)
    code, said = forked(main, path)
    assert code == 1
    assert "tune download meta-llama/Llama-3.2-1B --output-dir" in said
    assert "Traceback" not in said
    assert cli.main(["plan", "--config", str(path)]) == 1
    assert "config.json is missing" in capsys.readouterr().err
