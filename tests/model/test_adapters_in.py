"""Adapters of others: PEFT's own compute the same function here, or are refused by name."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from safetensors.torch import load_file, save_file

from rocm_ext import cli, config
from rocm_ext.base.errors import UserError
from rocm_ext.config.chosen_model import find_target
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.build import load_adapter
from rocm_ext.model.families import StoredFormat
from rocm_ext.model.lora import Sizes
from tests.kit.families import CHATML, PATTERNS, folder_config
from tests.kit.parity import TOKENS, our_logits, our_model, their_logits, their_model
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml

pytestmark = pytest.mark.usefixtures("any_torchao")
TAKEN = ("lora_rank", "lora_alpha", "target_modules", "trainable_tokens")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("adapters")
    qwen2 = write_model(top / "qwen2", initializer_range=0.1)
    (qwen2 / "generation_config.json").write_text('{"eos_token_id": 1}')
    return {
        "qwen2": qwen2,
        "llama": write_model(top / "llama", "llama", initializer_range=0.1),
        "rows": write_rows(top / "rows.jsonl", 16),
    }


@torch.no_grad()
def peft_adapter(base: Path, out: Path, **options) -> torch.Tensor:
    """Save an adapter with random weights as PEFT does; return the logits that PEFT computes with it."""
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": TARGETS,
        "task_type": "CAUSAL_LM",
        **options,
    }
    model = peft.get_peft_model(their_model(base), peft.LoraConfig(**settings))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.1)
        elif "trainable_tokens_delta" in name:
            parameter.normal_(std=0.3)
        elif "magnitude" in name:
            parameter.mul_(torch.empty_like(parameter).uniform_(0.7, 1.3))
    model.save_pretrained(out)
    return model.eval()(TOKENS).logits


def prepare(folders, base: str, out: Path, adapter: Path | None, **changes) -> LoRAFinetune:
    model, more = (
        changes.pop("model", {}),
        {"max_steps_per_epoch": 3, "save_adapter_weights_only": False},
    )
    if PATTERNS.keys() & model.keys() or changes.pop("native", False):
        cfg = folder_config(
            folders[base],
            folders["rows"],
            out,
            model,
            checkpointer={},
            chat_template=CHATML,
            **more,
        )
    else:
        cfg = run_config(folders[base], folders["rows"], out, **more)
        cfg["model"] |= model
    cfg["overwrite_output_dir"] = True
    cfg["optimizer"]["lr"] = 2e-2
    if adapter is not None:
        cfg["checkpointer"]["adapter_checkpoint"] = str(adapter)
    recipe = LoRAFinetune(
        config.load("lora_finetune_rocm", str(write_yaml(out.with_suffix(".yaml"), cfg | changes)))
    )
    recipe.setup()
    return recipe


@pytest.mark.wide(always=2)
@pytest.mark.parametrize(
    ("base", "options"),
    [
        ("qwen2", {"use_rslora": True, "use_dora": True, **PATTERNS}),
        ("llama", {"use_rslora": True, "r": 3, "lora_alpha": 5, "init_lora_weights": "gaussian"}),
        ("llama", {"r": 3, "lora_alpha": 5, **PATTERNS}),
        ("qwen2", {}),
    ],
    ids=str,
)
def test_adapter_of_peft_gives_its_logits(folders, tmp_path, base, options):
    expected = peft_adapter(folders[base], tmp_path / "theirs", **options)
    assert (their_logits(folders[base]) - expected).abs().max() > 0.1
    keys = {"r": "lora_rank", **{key: key for key in ("lora_alpha", "use_dora", *PATTERNS)}}
    model = {ours: options[name] for name, ours in keys.items() if name in options}
    recipe = prepare(folders, base, tmp_path / "run", tmp_path / "theirs", model=model)
    assert recipe.cfg.use_rslora is options.get("use_rslora", False)
    torch.testing.assert_close(our_logits(recipe), expected, rtol=0, atol=1e-5)
    file = tmp_path / "theirs" / "adapter_config.json"
    written = json.loads(file.read_text())
    pattern = written.get("rank_pattern") or {}
    file.write_text(json.dumps(written | {"rank_pattern": {**pattern, "no_such_layer": 9}}))
    chosen = find_target(str(folders[base]), tmp_path / "theirs").content["model"]
    assert chosen.get("rank_pattern", {}) == pattern, "PEFT reads no key of another layer"


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("model", [{}, {"use_dora": True}], ids=str)
def test_rslora_is_trained_and_exported(folders, tmp_path, model):
    recipe = prepare(folders, "qwen2", tmp_path / "run", None, model=model, use_rslora=True)
    recipe.train()
    recipe.cleanup()
    adapter, expected = tmp_path / "run" / "adapter", our_logits(recipe)
    assert (their_logits(folders["qwen2"]) - expected).abs().max() > 0.1
    assert json.loads((adapter / "adapter_config.json").read_text())["use_rslora"] is True
    torch.testing.assert_close(their_logits(folders["qwen2"], adapter), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        their_logits(tmp_path / "run" / "merged"), expected, rtol=0, atol=1e-4
    )


NAMES = [
    f"model.layers.{i}.{end}"
    for i in (0, 1, 11)
    for end in ("self_attn.q_proj", "mlp.experts.down_proj")
]
NAMES += ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj.weight"]
KEYS = ["q_proj", "down_proj", "experts.down_proj", r"layers\.1\..*", r".*\.1\..*", "^model.layers.0.*", "lm_.*|q_proj",
        "proj", "layers.11.self_attn.q_proj", "down_proj.weight", "model"]  # fmt: skip


@given(pattern=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 3)))
def test_patterns_match_as_pefts(pattern):
    sizes = Sizes(
        rank=9, alpha=9, rank_pattern=pattern, alpha_pattern=dict(reversed(pattern.items()))
    )
    for name in NAMES:
        keys = (
            get_pattern_key(each.keys(), name) for each in (sizes.rank_pattern, sizes.alpha_pattern)
        )
        assert sizes.of(name) == tuple(pattern.get(key, 9) for key in keys)


def test_a_pattern_that_would_match_for_ever_is_named():
    """An adapter may come from anybody."""
    endless = r"(?:(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\w){5}\3q"
    with pytest.raises(
        UserError,
        match=r"regular expression .* takes more than 1 s on model\.layers\.11\.self_attn",
    ):
        Sizes(rank=1, alpha=1, rank_pattern={endless: 2}).of("model.layers.11.self_attn.q_proj")
    with pytest.raises(UserError, match="takes more than 1 s"):
        StoredFormat("fp8", (0, 0), (f"re:{endless}",)).skips("model.layers.11.self_attn.q_proj")


@pytest.mark.parametrize(
    ("tied", "tokens"),
    [
        (False, [99, 5, 17]),
        (True, [99, 5, 17]),
        (False, {"embed_tokens": [99, 5], "lm_head": [61, 8, 5]}),
    ],
    ids=str,
)
@torch.no_grad()
def test_rows_of_tokens(tmp_path, tied, tokens):
    """PEFT's order of tokens is free. Its list trains the embeddings, which may be the output layer, too."""
    base, theirs = (
        write_model(tmp_path / "base", initializer_range=0.1, tie_word_embeddings=tied),
        tmp_path / "theirs",
    )
    expected = peft_adapter(base, theirs, trainable_token_indices=tokens)
    chosen = find_target(str(base), theirs).content["model"]
    decoder = our_model(base, **{key: chosen[key] for key in TAKEN})
    load_adapter(decoder, peft_files.read_adapter(theirs, decoder, "HF"), "theirs")
    torch.testing.assert_close(decoder.eval()(TOKENS), expected, rtol=0, atol=1e-5)
    state = load_file(base / "model.safetensors")
    if tied:  # old files have the layer twice
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    assert (
        cli.main(
            ["export", str(theirs), "--base-model", str(base), "--merged", str(tmp_path / "merged")]
        )
        == 0
    )
    torch.testing.assert_close(their_logits(tmp_path / "merged"), expected, rtol=0, atol=1e-4)
    with pytest.raises(UserError, match=r"Set 'model.trainable_tokens=\{.embed_tokens.: \[5, "):
        peft_files.read_adapter(theirs, our_model(base, lora_rank=4, lora_alpha=8), "HF")
    weights = theirs / "adapter_model.safetensors"
    state = load_file(weights)
    name = next(name for name in state if name.endswith(peft_files.ROWS))
    for rows in ([], state[name][1:]):
        save_file(
            {
                **{k: v for k, v in state.items() if k != name},
                **({name: rows} if len(rows) else {}),
            },
            weights,
        )
        assert (
            cli.main(
                [
                    "export",
                    str(theirs),
                    "--base-model",
                    str(base),
                    "--merged",
                    str(tmp_path / "never"),
                ]
            )
            == 1
        )


@pytest.fixture
def refused(folders, tmp_path, monkeypatch):
    """Change an adapter, start from it, and return the error, which comes before the base weights are read."""
    peft_adapter(folders["qwen2"], tmp_path / "adapter")
    monkeypatch.setattr(
        "rocm_ext.train.learner.Learner.read_weights", lambda self: pytest.fail("they were read")
    )

    def refused(change: dict | str = "", **changes) -> str:
        path = tmp_path / "adapter" / "adapter_config.json"
        content = json.loads(path.read_text())
        path.write_text(
            change if isinstance(change, str) and change else json.dumps(content | (change or {}))
        )
        with pytest.raises(UserError) as found:
            prepare(folders, "qwen2", tmp_path / "run", tmp_path / "adapter", **changes)
        assert "\n" not in str(found.value)
        return str(found.value)

    return refused


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "LOHA"}, {"alpha_pattern": {"q_proj": 4}}, {"rank_pattern": {"q_proj": 8}},
        {"modules_to_save": ["lm_head"]},
        {"init_lora_weights": "pissa_niter_4"}, {"target_parameters": ["mlp.experts"]}, {"a_key_of_2028": {"on": True}},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(refused, change):
    message = refused(change)
    assert f"has {next(iter(change))}=" in message
    assert "merge_and_unload" in message


@pytest.mark.parametrize(
    ("change", "changes", "cure"),
    [
        ({"lora_alpha": 16}, {}, "Set model.lora_alpha=16"),
        (
            {"rank_pattern": {"q_proj": 8}},
            {"native": True},
            "Set 'model.rank_pattern={\"q_proj\": 8}'",
        ),
        (
            {"r": 8, "rank_pattern": {"(k|v|o|up|gate|down)_proj": 4, "q_proj": 8}},
            {"model": PATTERNS},
            "=null",
        ),
        ({"rank_pattern": {"(": 1}}, {}, "has rank_pattern={'(': 1}; expected layers' names"),
        ({"use_rslora": True}, {"use_rslora": False}, "Set use_rslora=True"),
        ({"base_model_name_or_path": "a\nb"}, {}, "base_model_name_or_path='a"),
        ({"use_dora": "no"}, {}, "has use_dora='no'"),
        (
            {"trainable_token_indices": {"embed_tokens": [3, 3]}},
            {},
            "expected different ids of tokens",
        ),
        ("[1, 2]", {}, "must hold a JSON object"),
    ],
    ids=str,
)
def test_settings_that_differ_from_the_model(refused, change, changes, cure):
    assert cure in refused(change, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: {name.replace("layers.0", "h.0"): t for name, t in state.items()},
            "belongs to no layer",
        ),
        (
            lambda state: {name: t.flatten() for name, t in state.items()},
            "expected [4, inputs], [outputs, 4]",
        ),
        (lambda state: {name: t * float("nan") for name, t in state.items()}, "not finite"),
        (
            lambda state: {name: t for name, t in state.items() if ".1." not in name},
            "missing layers.1.",
        ),
    ],
)
def test_weights_that_do_not_fit(refused, tmp_path, change, message):
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: t.contiguous() for name, t in change(load_file(path)).items()}, path)
    assert message in refused()


@pytest.mark.parametrize("native", [True, False])
def test_fewer_target_modules_are_named_as_in_peft(refused, tmp_path, native):
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(
        {name: t for name, t in load_file(path).items() if "q_proj" in name or "v_proj" in name},
        path,
    )
    message = refused(native=native)
    assert "adapts q_proj, v_proj; the config adapts down_proj, gate_proj, k_proj" in message
    assert (
        f"Set model.{'target_modules=[q_proj,v_proj]' if native else 'lora_attn_modules'}"
        in message
    )


def test_file_of_torchtune(folders, tmp_path):
    """torchtune's adapter_model.pt is checked against the adapter_config.json beside it."""
    expected = peft_adapter(folders["qwen2"], tmp_path / "theirs")
    recipe = prepare(folders, "qwen2", tmp_path / "run", tmp_path / "theirs")
    state = peft_files.adapter_state(recipe.learner.decoder)
    tune = shutil.copytree(tmp_path / "theirs", tmp_path / "tune") / "adapter_model.pt"
    torch.save(state, tune)
    recipe = prepare(folders, "qwen2", tmp_path / "again", tune)
    torch.testing.assert_close(our_logits(recipe), expected, rtol=0, atol=1e-5)
    with pytest.raises(UserError, match=r"model\.lora_alpha=8"):
        prepare(folders, "qwen2", tmp_path / "other", tune, model={"lora_alpha": 4})
    torch.save({"adapter": state}, tune)
    with pytest.raises(UserError, match="expected tensors by name"):
        prepare(folders, "qwen2", tmp_path / "other", tune)
