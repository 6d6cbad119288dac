"""The text part of multimodal models trains as the whole model does in transformers and PEFT."""

import json
import shutil
from datetime import date
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM, AutoTokenizer

from rocm_ext.base.errors import UserError
from rocm_ext.data.messages import Turn
from rocm_ext.data.template import read_template
from tests.kit import parity
from tests.kit.families import folder_config, on_demand
from tests.kit.grpo_runs import check_grpo_and_dpo
from tests.kit.lines import one_line_has
from tests.kit.multimodal_models import MODELS, write_multimodal
from tests.kit.parity import TOKENS, our_model, pack, random_sequences
from tests.kit.plans import planned_and_measured

pytestmark = pytest.mark.usefixtures("any_torchao")
FAST = ("gemma 3", "mistral 3", "qwen3.5")
whole_model = partial(parity.their_model, auto=AutoModelForMultimodalLM)
whole_logits = partial(parity.their_logits, auto=AutoModelForMultimodalLM)


def some(*fast: str):
    """Every model's name; all but ``fast`` are wide."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.wide) for name in MODELS]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    return on_demand(tmp_path_factory.mktemp("multimodal"), write_multimodal, sharded="gemma 3")


# ---- the same function
@pytest.mark.parametrize("name", some(*FAST))
@torch.no_grad()
def test_logits_equal_the_whole_models(folder_of, name):
    ours, theirs = our_model(folder_of(name)).eval(), whole_model(folder_of(name))
    expected = theirs(TOKENS).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert ours.packs == MODELS[name][2]
    lengths = [9, 1, 12, 4]  # longer and shorter than windows of 6
    sequences = random_sequences(lengths, 3)
    alone = torch.cat([theirs(s[None]).logits[0] for s in sequences])
    if ours.packs:
        found = ours.output(ours.hidden_states(pack(sequences, 8))[0])[: sum(lengths)]
    else:
        padded = ours(torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True))
        found = torch.cat([row[: len(s)] for row, s in zip(padded, sequences, strict=True)])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=2e-5)


def test_only_the_text_part_is_in_memory(folder_of, caplog):
    """Gemma 3's mask for images changes nothing where token_type_ids says that all is text."""
    with caplog.at_level("INFO", "rocm_ext"):
        ours = our_model(folder_of("gemma 3")).eval()
    assert one_line_has(
        caplog.text, "Gemma3ForConditionalGeneration", "only on text", "model.vision_tower"
    )
    names = {
        name for name, _ in (*ours.named_parameters(), *ours.named_buffers()) if "lora_" not in name
    }
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in names)
    whole = whole_model(folder_of("gemma 3"))
    expected = sum(p.numel() for p in whole.model.language_model.parameters())
    assert sum(p.numel() for n, p in ours.named_parameters() if "lora_" not in n) == expected
    with torch.no_grad():
        logits = whole(TOKENS, token_type_ids=torch.zeros_like(TOKENS)).logits
        torch.testing.assert_close(ours(TOKENS), logits, rtol=1e-5, atol=1e-5)


# ---- training and files
@pytest.mark.wide
@pytest.mark.parametrize("name", some("gemma 3"))
def test_ten_steps_equal_peft(folder_of, rows, tmp_path, name):
    cfg = folder_config(folder_of(name), rows, tmp_path / "run")
    _, found, expected = parity.ten_steps(cfg, folder_of(name), tmp_path, whole_model)
    for key, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[key], rtol=0, atol=3e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("name", some(*FAST))
def test_exports_open_in_the_whole_model(folder_of, rows, tmp_path, name):
    base = shutil.copytree(folder_of(name), tmp_path / "base")
    (base / "preprocessor_config.json").write_text("{}")
    parity.check_exports(base, rows, tmp_path, logits=whole_logits)
    whole = tmp_path / "run" / "merged"
    before, after = tensors(base), tensors(whole)
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed
    assert not any(
        part in key for key in changed for part in ("vision", "visual", "projector", "audio")
    )
    for file in (
        "config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    ):
        assert (whole / file).read_bytes() == (base / file).read_bytes()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {key: t for file in folder.glob("*.safetensors") for key, t in load_file(file).items()}


def rewritten(base: Path, folder: Path, change) -> Path:
    """Copy a model; ``change(name)`` returns each tensor's new name, or None to leave it out."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    state = {new: t for name, t in tensors(base).items() if (new := change(name)) is not None}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.wide
@pytest.mark.usefixtures("cpu_of_known_speed")
@pytest.mark.parametrize("name", some("gemma 3"))
def test_planned_peak_is_the_measured_one_of_the_text_part(folder_of, tmp_path, name):
    planned, peak = planned_and_measured(folder_of(name), tmp_path / "run")
    assert 0.9 * peak < planned < {"qwen3-vl": 1.3, "gemma 4": 1.2}.get(name, 1.1) * peak


@pytest.mark.wide
@pytest.mark.parametrize("name", some("qwen3.5", "gemma 4"))
def test_grpo_and_dpo(folder_of, tmp_path, name):
    """As their run configs."""
    check_grpo_and_dpo(folder_of(name), tmp_path)


# ---- chat templates
STRINGS_OR_LISTS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] | trim }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LISTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% for part in m['content'] | "
    "selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("text", [STRINGS_OR_LISTS, LISTS], ids=["both", "lists"])
@pytest.mark.parametrize(
    "file", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"]
)
def test_rows_are_rendered_as_transformers_renders_them(folder_of, tmp_path, text, file):
    base = shutil.copytree(folder_of("gemma 3"), tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    content = {"bos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if file == "tokenizer_config.json":
        content["chat_template"] = text
    (base / "tokenizer_config.json").write_text(json.dumps(content))
    if file != "tokenizer_config.json":
        (base / file).write_text(
            text if file.endswith("jinja") else json.dumps({"chat_template": text})
        )
    turns = [
        Turn("user", " How many? ", False),
        Turn("assistant", "72", False),
        Turn("user", "Why?", False),
    ]
    messages = [turn.message() for turn in turns]
    if text == LISTS:
        messages = [
            {**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages
        ]
    tokenizer = AutoTokenizer.from_pretrained(base)
    given = (
        {"chat_template": text} if file == "chat_template.json" else {}
    )  # which processors alone read
    expected = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **given
    )
    ours = read_template("auto", base, {}, date(2026, 1, 1))
    assert ours.render(turns, None, prompt=True) == expected
    assert "How many?" in expected
    assert ours.origin == str(base / file)


# ---- bad input
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "layers.1.mlp.up_proj.weight",
            None,
            "missing model.language_model.layers.1.mlp.up_proj.weight",
        ),
        (
            "layers.1.mlp.up_proj.weight",
            "layers.2.mlp.up_proj.weight",
            "layers.2.mlp.up_proj.weight",
        ),
    ],
)
def test_a_torn_text_part(folder_of, tmp_path, old, new, message):
    prefix = "language_model.model."
    change = {prefix + old: new and prefix + new}
    base = rewritten(folder_of("gemma 3"), tmp_path / "base", lambda name: change.get(name, name))
    with pytest.raises(UserError, match=f"the checkpoint does not fit model: .*{message}"):
        our_model(base)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("clip", "CLIPModel", "has no language model for model_type 'clip'"),
        (
            "whisper",
            "WhisperForConditionalGeneration",
            "names WhisperForConditionalGeneration, but",
        ),
        (
            "florence2",
            "Florence2ForConditionalGeneration",
            "takes images or sound, and its text part",
        ),
        ("paligemma", "PaliGemmaForConditionalGeneration", "attends to later tokens"),
        ("gemma3", "Gemma3ForConditionalGeneration", r"quantised \(awq\)"),
    ],
)
def test_models_without_such_a_text_part(tmp_path, kind, name, message):
    config = {"model_type": kind, "architectures": [name]}
    if "ForConditional" in name and kind != "whisper":
        quantised = {"quantization_config": {"quant_method": "awq"}} if kind == "gemma3" else {}
        config |= {"text_config": quantised, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as caught:
        our_model(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
