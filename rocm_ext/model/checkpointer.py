"""Read base weights from a folder in Hugging Face's format, memory-mapped, by their index."""

from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torchtune.training import MODEL_KEY

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import json_object
from rocm_ext.base.hub import how_to_download
from rocm_ext.model.families import foreign_config, read_architecture
from rocm_ext.model.names import from_hf

HF = "HF"  # the model_type of weights in Hugging Face's row order
_OUTPUT, _EMBEDDINGS = "output.weight", "tok_embeddings.weight"
_STEMS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
_TABLES = ("rotary_emb.inv_freq", ".position_ids")
_AGAIN = "download the file again"


class HFCheckpointer:
    """Reads a model of :func:`rocm_ext.model.from_checkpoint`, for a config's ``checkpointer:``.

    Args:
        checkpoint_dir: folder in Hugging Face's format.
        output_dir: folder of the run.
        model_type: ``HF``.
        adapter_checkpoint: adapter to start from; the recipe reads it.

    Raises:
        UserError: ``model_type`` is another.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        output_dir: str | None = None,
        model_type: str = HF,
        adapter_checkpoint: str | None = None,
    ) -> None:
        if model_type != HF:
            raise UserError(f"checkpointer.model_type is {model_type!r}; expected {HF}")
        self._folder = Path(checkpoint_dir)

    def load_checkpoint(self) -> dict[str, Any]:
        """Return the weights by torchtune's names, under torchtune's key for a model.

        Those of a model that transformers builds keep the names of its files.

        Raises:
            UserError: files are missing or damaged, or hold something else than such a model's weights.
        """
        foreign = foreign_config(self._folder, trust_remote_code=True) is not None
        tied = not foreign and read_architecture(self._folder).tied
        state: dict[str, Tensor] = {}
        for file in weight_files(self._folder):
            for name, tensor in read_tensors(self._folder / file):
                if name.endswith(_TABLES):  # in old files; config.json has what they come from
                    continue
                if not foreign:  # others may hold masks and tables of whole numbers
                    check_stored(name, tensor)
                try:
                    state[name if foreign else from_hf(name)] = tensor
                except KeyError as error:
                    raise UserError(f"{self._folder / file} has {name}, which no layer of this model has") from error
        if tied and _OUTPUT in state and _EMBEDDINGS in state:
            _drop_copy(state)
        return {MODEL_KEY: state}


def check_stored(name: str, tensor: Tensor) -> None:
    """Check that a weight is stored in at least 16 bits.

    Raises:
        UserError: it is quantised.
    """
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise UserError(
            f"checkpointer: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, a quantised format; "
            "use the model's bf16 or fp16 weights"
        )


def _drop_copy(state: dict[str, Tensor]) -> None:
    if not torch.equal(state.pop(_OUTPUT), state[_EMBEDDINGS]):
        raise UserError(
            "config.json says that the output layer is the embeddings (tie_word_embeddings), but lm_head.weight and "
            "embed_tokens.weight differ; set tie_word_embeddings to false in config.json if both are used"
        )


def weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's weight files: safetensors by their index or the single file, else ``.bin``.

    Raises:
        UserError: the folder has none, or lacks some that the index names.
    """
    for stem, suffix in _STEMS:
        index = folder / f"{stem}{suffix}.index.json"
        if index.is_file():
            names = _indexed(index)
            if missing := [name for name in names if not (folder / name).is_file()]:
                raise UserError(
                    f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}; "
                    f"{how_to_download(folder)}"
                )
            return names
        if (folder / f"{stem}{suffix}").is_file():
            return [f"{stem}{suffix}"]
    raise UserError(f"{folder} has no weights (model.safetensors or its index); {how_to_download(folder)}")


def _indexed(index: Path) -> list[str]:
    try:
        content = json_object(index.read_bytes()) or {}
    except OSError as error:
        raise UserError(f"cannot read {index}: {error.strerror}") from error
    files = content.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise UserError(f"{index} is damaged: it has no weight_map; {_AGAIN}")
    names = sorted(set(map(str, files.values())))
    if strange := [name for name in names if Path(name).name != name]:
        raise UserError(f"{index} names {strange[0]}, which is not a file beside it")
    return names


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a weight file with their names, memory-mapped.

    Raises:
        UserError: the file is damaged.
    """
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                    yield name, file.get_tensor(name)
        else:
            yield from torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()
    except (SafetensorError, UnpicklingError, OSError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}; {_AGAIN}") from error
