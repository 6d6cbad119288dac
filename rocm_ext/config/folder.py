"""The blocks that a config may leave out where its model comes from a folder in Hugging Face's format."""

from collections.abc import Mapping
from typing import Any

from rocm_ext.importing import COMPONENT

FROM_CHECKPOINT = "rocm_ext.model.from_checkpoint"
_BLOCKS: dict[str, dict[str, Any]] = {
    "checkpointer": {
        COMPONENT: "rocm_ext.model.HFCheckpointer",
        "checkpoint_dir": "${model.checkpoint_dir}",
        "output_dir": "${output_dir}",
        "model_type": "HF",
    },
    "tokenizer": {
        COMPONENT: "rocm_ext.data.HFTokenizer",
        "path": "${checkpointer.checkpoint_dir}/tokenizer.json",
    },
}


def complete(merged: dict[str, Any], on_command_line: Mapping[str, str]) -> None:
    """Fill in ``checkpointer`` and ``tokenizer`` of a config whose model is :data:`FROM_CHECKPOINT`.

    A block that names another component stays as it is. Of any other block, the given keys stay.

    Args:
        merged: the config's content, which changes.
        on_command_line: overrides by key.
    """
    model = merged.get("model")
    named = model.get(COMPONENT) if isinstance(model, Mapping) else None
    named = on_command_line.get("model", on_command_line.get(f"model.{COMPONENT}", named))
    if named != FROM_CHECKPOINT:
        return
    for key, block in _BLOCKS.items():
        given = merged.get(key)
        given = {} if given in (None, "???") else given
        if isinstance(given, Mapping) and given.get(COMPONENT, block[COMPONENT]) == block[COMPONENT]:
            merged[key] = {**block, **given}
