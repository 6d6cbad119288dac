"""Read base weights from a folder in Hugging Face's format without keeping them in the page cache."""

import io
import json
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from rocm_ext.base.errors import UserError, explain_errors
from rocm_ext.base.files import json_object
from rocm_ext.base.heartbeat import beat
from rocm_ext.base.hub import how_to_download
from rocm_ext.base.log import log
from rocm_ext.model.families import foreign_config, read_architecture, stored_format
from rocm_ext.model.names import EMBEDDINGS_WEIGHT, OUTPUT_WEIGHT, Names, NativeNames
from rocm_ext.model.weights.gguf_files import AGAIN, SUFFIX, GgufFile, files_in, links_in, shapes_in
from rocm_ext.model.weights.llama_cpp import layers_ahead, parts_by_weight, scale_of
from rocm_ext.model.weights.llama_cpp_config import check_config
from rocm_ext.model.weights.llama_cpp_parts import joined
from rocm_ext.model.weights.quantized import Quantized, stored
from rocm_ext.model.weights.unpack import unpack

State = Mapping[str, Tensor]  # weights by name
MODEL_KEY = "model"  # torchtune's key of a model in a state
HF = "HF"  # the model_type of weights in Hugging Face's row order
_STEMS = (("model", ".safetensors"), ("pytorch_model", ".bin"))
TABLES = ("rotary_emb.inv_freq", ".position_ids")  # old files have them; config.json decides them
# ends of names of values and of scales
_QUANTISED = (("", "_scale_inv"), ("", "_scale"), ("_blocks", "_scales"))
# activations stay in 16 bits
_OF_ACTIVATIONS = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")
_OF_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),  # from torch 2.7
}  # fmt: skip


class HFCheckpointer:
    """Reads a model of :func:`rocm_ext.model.from_checkpoint`, for a config's ``checkpointer:``.

    Args:
        checkpoint_dir: folder in Hugging Face's format.
        output_dir: folder of the run; not used.
        model_type: ``HF``.
        adapter_checkpoint: adapter to start from; the recipe reads it.

    Raises:
        UserError: ``model_type`` is not ``HF``.
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

    def load_checkpoint(self) -> dict[str, "StoredWeights"]:
        """Return the weights under torchtune's key for a model.

        A native decoder's weights have torchtune's names, weights of other models the names in their files.

        Raises:
            UserError: files are missing or damaged, or do not have the model's weights.
        """
        foreign = foreign_config(self._folder, trust_remote_code=True) is not None
        names = Names() if foreign else NativeNames()
        state = StoredWeights(self._folder, weight_files(self._folder), names.ours, TABLES)
        if not foreign:  # others may have masks and tables of integers
            for name, tensor in state.on_meta().items():
                check_stored(name, tensor)
            output = names.ours(OUTPUT_WEIGHT)
            embeddings = names.ours(EMBEDDINGS_WEIGHT)
            if read_architecture(self._folder).tied and output in state and embeddings in state:
                check_tied(state[output], state[embeddings])
                state.remove(output)
        return {MODEL_KEY: state}


def check_stored(name: str, tensor: Tensor) -> None:
    """Check that a weight is stored in at least 16 bits."""
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise UserError(
            f"checkpointer: {name} is stored as {str(tensor.dtype).removeprefix('torch.')}, a quantised format; "
            "use the model's bf16 or fp16 weights"
        )


def check_tied(output: Tensor, embeddings: Tensor) -> None:
    """Check that stored weights of tied layers are equal."""
    if not torch.equal(output, embeddings):
        raise UserError(
            "config.json says that the output layer is the embeddings (tie_word_embeddings), but their weights differ; "
            "set tie_word_embeddings to false in config.json if both are used"
        )


def weight_files(folder: Path) -> list[str]:
    """Return the names of a folder's weight files: safetensors by their index or the single file, else ``.bin``.

    For GGUF files, the result is the path of the first.

    Raises:
        UserError: the folder has none, or lacks some that the index names.
    """
    files = files_in(folder)
    if files:
        return files[:1]
    for stem, suffix in _STEMS:
        index = folder / f"{stem}{suffix}.index.json"
        if index.is_file():
            names = _indexed(index)
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise UserError(
                    f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}; "
                    f"{how_to_download(folder)}"
                )
            return names
        if (folder / f"{stem}{suffix}").is_file():
            return [f"{stem}{suffix}"]
    raise UserError(
        f"{folder} has no weights (model.safetensors or its index); {how_to_download(folder)}"
    )


def blocks_in(folder: Path) -> dict[str, Quantized]:
    """Return the weights in blocks of a folder's GGUF files, on the meta device. Empty without such files."""
    if not files_in(folder):
        return {}
    with torch.device("cpu"):  # models are built on the meta device
        stored = _Gguf(folder)
    weights = {name: stored.on_meta(name) for name in stored.names}
    if stored.ahead:
        log.warning("%s: %d layer(s) for MTP at the end are not trained", stored.path, stored.ahead)
    apart = [name for name in weights if len(stored.kinds(name)) > 1]
    if apart:
        kinds = " and ".join(sorted(stored.kinds(apart[0])))
        log.warning(
            "%d weights, first %s, are stored as %s; they are unpacked as they are loaded",
            len(apart), apart[0], kinds,
        )  # fmt: skip
    blocks = {name: weight for name, weight in weights.items() if isinstance(weight, Quantized)}
    scaled = [name for name in blocks if name.endswith(_OF_MLP) and blocks[name].scale.numel()]
    if scaled:
        log.warning(
            "llama.cpp, as of build 11549, aborts with an adapter on one of %d weights in NVFP4 with scales, first %s; "
            "leave these layers out of target_modules if it will serve the adapter",
            len(scaled), scaled[0],
        )  # fmt: skip
    return blocks


def _indexed(index: Path) -> list[str]:
    with explain_errors(f"cannot read {index}"):
        content = json_object(index.read_bytes()) or {}
    files = content.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise UserError(f"{index} is damaged: it has no weight_map; {AGAIN}")
    names = sorted(set(map(str, files.values())))
    for name in names:
        if Path(name).name != name:
            raise UserError(f"{index} names {name}, which is not a file beside it")
    return names


class StoredWeights(Mapping[str, Tensor]):
    """The tensors of weight files. Every access reads a tensor from the disk into new memory.

    A safetensors file's pages leave the system's cache once a tensor is read. On unified memory a cached model takes
    its size a second time (transformers issue 44756), and some kernels copy mapped files at a second per piece (ROCm
    issues 5952 and 6523). ``.bin`` files are mapped.

    A weight in 4 or 8 bits and its scales are one :class:`rocm_ext.model.weights.quantized.Quantized`.

    Args:
        folder, files: folder and names of the files.
        rename: translates tensor names of the files.
        without: tensors whose names end with one of these are left out.

    Raises:
        UserError: a file is damaged, or ``rename`` does not know a tensor; reading a tensor may also raise it.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[str],
        rename: Callable[[str], str] = str,
        without: tuple[str, ...] = (),
    ) -> None:
        self._stored: dict[str, list[tuple[_Reader, str]]] = {}
        self._names: dict[str, list[str]] = {}
        for file in files:
            path = folder / file
            with _readable(path):
                kind = _Safetensors if path.suffix == ".safetensors" else _Pickled
                reader = _Gguf(folder) if path.suffix.lower() == SUFFIX else kind(path)
            self._names[file] = []
            for theirs in reader.names:
                if theirs.endswith((*without, *_OF_ACTIVATIONS)):
                    continue
                with explain_errors(f"{path} has {theirs}, which no layer of this model has"):
                    name = rename(theirs)
                self._stored[name] = [(reader, theirs)]
                self._names[file].append(name)
        self._block = (0, 0)
        self._join_scales(folder)

    def _join_scales(self, folder: Path) -> None:
        """Join a quantised weight's values and scales to one tensor."""
        weights = {}  # the weight's name by that of its values
        scales = {}
        for name, ((reader, theirs),) in self._stored.items():
            for of_values, of_scales in _QUANTISED:
                weight = name.removesuffix(of_values)
                scale = weight + of_scales
                if not name.endswith(of_values) or scale not in self._stored:
                    continue
                if reader.on_meta(theirs).element_size() == 1:
                    weights[name] = weight
                    scales[name] = scale
        if not weights:
            return
        form = stored_format(folder)
        if form is not None:
            self._block = form.block
        not_weights = set(scales.values())
        before = self._stored
        self._stored = {}
        for name, parts in before.items():
            if name in not_weights:
                continue
            if name in scales:
                parts = parts + before[scales[name]]
            self._stored[weights.get(name, name)] = parts
        for file, names in self._names.items():
            kept = [name for name in names if name not in not_weights]
            self._names[file] = [weights.get(name, name) for name in kept]

    @property
    def files(self) -> list[str]:
        """Names of the files."""
        return list(self._names)

    def of_file(self, file: str) -> list[str]:
        """Return the names of the tensors that ``file`` holds."""
        return self._names[file]

    def __getitem__(self, name: str) -> Tensor:
        beat()
        return self._joined(name, self._parts(name, "read"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def remove(self, name: str) -> None:
        """Remove a tensor from the mapping."""
        del self._stored[name]

    def on_meta(self) -> dict[str, Tensor]:
        """Return all tensors without their values."""
        tensors = {}
        for name in self:
            tensors[name] = self._joined(name, self._parts(name, "on_meta"))
        return tensors

    def sample(self, name: str) -> Tensor:
        """Return up to 64 values spread over a tensor, then up to 64 scales; other values are not read."""
        parts = self._parts(name, "sample")
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.float() for part in parts])

    def _parts(self, name: str, method: str) -> list[Tensor]:
        """Call a method of the readers for each part of a tensor."""
        parts = []
        for reader, theirs in self._stored[name]:
            with _readable(reader.path):
                read = getattr(reader, method)
                parts.append(read(theirs))
        return parts

    def _joined(self, name: str, parts: list[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        values, scales = parts
        with explain_errors("checkpointer", f", which do not fit; {AGAIN}"):
            return stored(name, values, scales, self._block)


def say_ahead(state: State, what: str) -> None:
    """Log what happens to a checkpoint's layers that predict further tokens (MTP), if it has some.

    Args:
        state: tensors by a model's names, see :class:`rocm_ext.model.hf.checkpoint.Converted`.
        what: the end of the sentence.
    """
    ahead = getattr(state, "ahead", [])
    if ahead:
        log.warning("%d tensors of layers for MTP, first %s, %s", len(ahead), ahead[0], what)


def on_meta(state: State) -> State:
    """Return the tensors of ``state`` without their values."""
    if hasattr(state, "on_meta"):
        return state.on_meta()
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}


def sample(state: State, name: str) -> Tensor:
    """Return up to 64 values spread over a tensor."""
    return state.sample(name) if isinstance(state, StoredWeights) else _sample(state[name])


def _sample(tensor: Tensor) -> Tensor:
    index = list(chain.from_iterable(_spread(tensor.numel())))
    return tensor.reshape(-1)[index]


def _spread(count: int) -> list[range]:
    """Return the indices of sampled values: eight runs of eight, or all of a small tensor."""
    if count <= 64:
        return [range(count)]
    starts = [i * (count - 8) // 7 for i in range(8)]
    return [range(start, start + 8) for start in starts]


# ---- readers: the tensors of a file by name, also without their values, or with some of them (see _spread)


class _Raw(ABC):
    """Tensors read without a map: half as fast again as ``safe_open`` with ``backend="pread"``."""

    path: Path

    @abstractmethod
    def on_meta(self, name: str) -> Tensor:
        """Return a tensor without its values."""

    @abstractmethod
    def begin(self, name: str) -> int:
        """Return the offset of a tensor's first byte in the file."""

    def read(self, name: str) -> Tensor:
        tensor = torch.empty_like(self.on_meta(name), device="cpu")
        content = tensor.view(-1).view(torch.uint8).numpy().data
        with self._open(name) as file:
            while content:
                read = file.readinto(content)
                if not read:
                    raise OSError("it ends too early")
                content = content[read:]
        return tensor

    def sample(self, name: str) -> Tensor:
        like = self.on_meta(name)
        parts = _spread(like.numel())
        count = sum(map(len, parts))
        values = torch.empty(count, dtype=like.dtype)
        content = values.view(torch.uint8).numpy().data
        width = like.element_size()
        with self._open(name, "RANDOM") as file:
            begin = file.tell()
            for part in parts:
                file.seek(begin + part.start * width)
                size = len(part) * width
                content[:size] = file.read(size)
                content = content[size:]
        return values

    @contextmanager
    def _open(self, name: str, advice: str = "SEQUENTIAL") -> Iterator[io.FileIO]:
        """Context with the file at a tensor's first byte; afterwards the tensor's pages leave the system's cache."""
        first = self.begin(name)
        end = first + self.on_meta(name).nbytes
        with io.FileIO(self.path) as file:
            file.seek(first)
            _advise(file, 0, 0, advice)
            try:
                yield file
            finally:
                # the kernel drops only complete pages
                begin = first - first % mmap.PAGESIZE
                size = end - begin
                size += -size % mmap.PAGESIZE
                _advise(file, begin, size, "DONTNEED")


def _advise(file: io.FileIO, begin: int, size: int, advice: str) -> None:
    with suppress(AttributeError, OSError):  # Windows and macOS take no advice
        os.posix_fadvise(file.fileno(), begin, size, getattr(os, f"POSIX_FADV_{advice}"))


class _Safetensors(_Raw):
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with safe_open(path, framework="pt"):
            pass  # it has checked the header
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._header = json.loads(file.read(length))
        self._header.pop("__metadata__", None)
        self._begin = 8 + length
        self.names = sorted(self._header)

    def on_meta(self, name: str) -> Tensor:
        entry = self._header[name]
        if entry["dtype"] not in _DTYPES:
            raise UserError(
                f"checkpointer: {name} is stored as {entry['dtype']}; use the model's bf16 or fp16 weights"
            )
        return torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]], device="meta")

    def begin(self, name: str) -> int:
        return self._begin + self._header[name]["data_offsets"][0]


class _Gguf:
    """The tensors of a model's GGUF files in Hugging Face's names, shapes and orders.

    Args:
        folder: the model's folder, whose ``config.json`` decides the layout.
    """

    def __init__(self, folder: Path) -> None:
        files = [_Blocks(Path(path)) for path in files_in(folder)]
        self.path = files[0].path
        self._files: dict[str, _Blocks] = {}
        for file in files:
            self._files |= dict.fromkeys(file.places, file)
        if len(self._files) < sum(len(file.places) for file in files):
            raise UserError(f"the parts of {self.path} have tensors of one name; {AGAIN}")
        if links_in(folder).get("made"):
            try:
                check_config(folder, files[0])
            except UserError as error:
                raise UserError(
                    f"{error}: it has changed; set model.checkpoint_dir={self.path}"
                ) from error
        kinds = {name: file.places[name].kind for name, file in self._files.items()}
        self._parts = parts_by_weight(folder, files[0], kinds)
        weights = {part.name for parts in self._parts.values() for part in parts}
        others = kinds.keys() - weights  # Gemma 4's router has the scales of its experts
        self._scaled = {name for name in weights if scale_of(name) in others}
        self.ahead = layers_ahead(files[0])
        self._shapes = shapes_in(folder)
        self.names = sorted(self._parts)

    def kinds(self, name: str) -> set[str]:
        """Return the kinds of blocks of a weight's parts; an empty kind means numbers."""
        return {file.places[part].kind for file, part in self._stored(name)}

    def _stored(self, name: str) -> list[tuple["_Blocks", str]]:
        """Return the file and llama.cpp's name of each part of a weight."""
        return [(self._files[part.name], part.name) for part in self._parts[name]]

    def on_meta(self, name: str) -> Tensor:
        tensors = [file.on_meta(part) for file, part in self._stored(name)]
        return self._joined(name, tensors)

    def read(self, name: str) -> Tensor:
        tensors = []
        for file, part in self._stored(name):
            with _readable(file.path):
                tensors.append(file.read(part))
        return self._joined(name, tensors)

    def sample(self, name: str) -> Tensor:
        samples = [file.sample(part) for file, part in self._stored(name)]
        return torch.cat(samples)

    def _joined(self, name: str, tensors: list[Tensor]) -> Tensor:
        kind, *others = self.kinds(name)
        with explain_errors(str(self.path), f"; {AGAIN}"):
            scales = self._scales(name, tensors)
            if others:  # different blocks become one weight as numbers
                kind = ""
                for i, (file, part) in enumerate(self._stored(name)):
                    blocks = file.places[part].kind
                    if blocks:
                        tensors[i] = unpack(tensors[i], blocks, torch.float32)
                    tensors[i] = tensors[i].float()
                    if scales:
                        tensors[i] *= scales[i]
            made = joined(self._parts[name], tensors, kind, scales)
        shape = self._shapes.get(name, [])
        wide_sides = [side for side in shape if side != 1]
        if 1 in shape and list(made.shape) == wide_sides:
            return made.view(shape)  # llama.cpp's shapes have no sides of 1
        return made

    def _scales(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        """Return the scales of the rows of a weight's parts, [..., rows, 1]. Empty if they are 1."""
        parts = [part.name for part in self._parts[name]]
        if self._scaled.isdisjoint(parts):
            return []
        scales = []
        for part, tensor in zip(parts, tensors, strict=True):
            rows = tensor[..., :1]
            scale = torch.ones(1)
            if part in self._scaled:
                name = scale_of(part)
                scale = self._files[name].numbers(name)  # [1] or [experts]
            column = scale.to(tensor.device).view(-1, *[1] * (rows.ndim - 1))
            scales.append(column.expand(rows.shape).contiguous())
        return scales


class _Blocks(_Raw, GgufFile):
    """A GGUF file's tensors as stored: bytes of blocks, or numbers."""

    def on_meta(self, name: str) -> Tensor:
        at = self.places[name]
        dtype = torch.uint8 if at.kind else at.dtype
        return torch.empty(at.stored_shape, dtype=dtype, device="meta")

    def begin(self, name: str) -> int:
        return self.places[name].begin


class _Pickled:
    """A ``.bin`` file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self.names = list(self._tensors)

    def on_meta(self, name: str) -> Tensor:
        return torch.empty_like(self._tensors[name], device="meta")

    def read(self, name: str) -> Tensor:
        return self._tensors[name].clone()

    def sample(self, name: str) -> Tensor:
        return _sample(self._tensors[name])


_Reader = _Safetensors | _Gguf | _Pickled


def _readable(path: Path) -> AbstractContextManager[None]:
    return explain_errors(f"cannot read {path}", f"; {AGAIN}")
