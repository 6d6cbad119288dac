"""The tables in docs/models.md, from the models of the tests; :mod:`tools.tables` writes them."""

import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.kit import hf_models, multimodal_models  # noqa: E402
from tests.kit.tiny import SHAPE  # noqa: E402

ROUTED = ("num_experts", "num_local_experts", "n_routed_experts")
SHARED = ("n_shared_experts", "shared_expert_intermediate_size", "shared_intermediate_size")
STATES = {"linear_attention", "conv", "mamba"}
HEAD = "| architecture | rows | experts | sampled here | GGUF |\n|---|---|---|---|---|\n"


def text() -> str:
    """The models of text that the tests train."""
    return table(
        (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], packs, AutoConfig.for_model(kind, **{**SHAPE, **values}),
         name in hf_models.GGUF)
        for name, (kind, packs, values) in hf_models.MODELS.items()
    )  # fmt: skip


def multimodal() -> str:
    """The multimodal models whose text parts the tests train."""
    return table(
        (MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind], packs, AutoConfig.for_model(part, **{**SHAPE, **values}),
         name in multimodal_models.GGUF)
        for name, (kind, part, packs, values, _) in multimodal_models.MODELS.items()
    )  # fmt: skip


def more() -> str:
    """A sentence on the models of which the tests compare the logits alone."""
    others = {*hf_models.MORE, *hf_models.CARE} - {kind for kind, *_ in hf_models.MODELS.values()}
    packed, padded = sorted(others - hf_models.PADDED), sorted(hf_models.PADDED)
    lines = f"Of {len(others)} more, by their `model_type`, they compare logits: with packed rows {_quoted(packed)}; "
    return textwrap.fill(f"{lines}with padded ones {_quoted(padded)}.", 120)


def table(models: Iterable[tuple[str, bool, Any, bool]]) -> str:
    """Return a table of architectures; those with equal cells share a line.

    Args:
        models: of each its architecture, whether its rows are packed, the config of its text part, and whether
            llama.cpp answers like transformers with our GGUF files of it.
    """
    lines: dict[str, dict[str, None]] = {}
    for architecture, packs, config, gguf in models:
        experts = ""
        if any(getattr(config, key, None) for key in ROUTED):
            shared = any(getattr(config, key, None) for key in SHARED)
            experts = "LoRA if named" + "; shared ones always" * shared
        states = ", with states" * bool(STATES & {*(getattr(config, "layer_types", None) or ())})
        cells = (
            f"{'packed' if packs else 'padded'} | {experts} | yes{states} | {'yes' if gguf else ''}"
        )
        lines.setdefault(cells, {})[architecture] = None  # once, in their order
    return HEAD + "\n".join(f"| {_quoted(names)} | {cells} |" for cells, names in lines.items())


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
