"""Write a run's merged model as a folder for transformers and vLLM."""

import json
from pathlib import Path

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import json_object, replace_text
from rocm_ext.data.encoder import EOS, ids_in
from rocm_ext.export.source import Source
from rocm_ext.model.adapters.merge import merge

_GENERATION = "generation_config.json"


def write_merged(source: Source, out: Path) -> None:
    """Write the base model with the adapter added to its weights, tokenizer and chat template included.

    Where the chat template ends a turn with a token that the base model does not stop at, ``generation_config.json``
    gets that token, too.

    Args:
        source: the model.
        out: a folder that does not exist, or is empty.

    Raises:
        UserError: ``source`` has no adapter, ``out`` holds something, or the disk is full.
    """
    if source.adapter is None:
        raise UserError(f"{source.base} has no adapter to merge")
    if out.exists() and (not out.name or not out.is_dir() or any(out.iterdir())):  # "." has no name to write beside
        raise UserError(f"{out} exists; choose a new folder")
    merge(source.cfg.checkpointer, source.adapter, out, source.decoder())
    stops = ids_in(source.base, EOS)
    if stops and (more := [number for number in source.tokenizer.stop_tokens if number not in stops]):
        path = out / _GENERATION
        content = json_object(path.read_bytes()) if path.is_file() else {}
        replace_text(path, json.dumps({**(content or {}), "eos_token_id": [*stops, *more]}, indent=2) + "\n")
