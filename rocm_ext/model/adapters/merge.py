"""Write merged models in Hugging Face's format, one weight file at a time."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import save_file
from torch import Tensor
from torchtune.training.checkpointing._utils import FormattedCheckpointFiles

from rocm_ext.base.errors import UserError, refuse
from rocm_ext.base.files import flush, json_object, replace_folder
from rocm_ext.base.hub import files_of
from rocm_ext.base.log import log
from rocm_ext.data.template import OF_PROCESSORS, TEMPLATE
from rocm_ext.model.adapters.peft_files import read_peft
from rocm_ext.model.adapters.peft_layers import split_experts, updates_by_weight
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.families import CONFIG, QUANTISED
from rocm_ext.model.lora import changed_weights, dense, expert_factors, merged_linear, plain
from rocm_ext.model.names import LORA_A, LORA_B, MAGNITUDE, ROWS
from rocm_ext.model.token_rows import by_layer, is_tied, layer_names
from rocm_ext.model.weights.checkpointer import (
    State,
    StoredWeights,
    on_meta,
    say_ahead,
    weight_files,
)

# Files that a merged model gets from the base model's folder
BESIDE_WEIGHTS = (
    "config.json", "generation_config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "*.model", "*.tiktoken", "tekken.json", "*.jinja", "chat_template.json",
    "*processor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*", "*.py",
)  # fmt: skip
UNKNOWN = "how many of their tokens the trained model accepts is unknown"
_AHEAD = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # numbers of layers for MTP
MERGED_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def base_tensors(cfg_checkpointer: DictConfig) -> tuple[Path, list[str], StoredWeights]:
    """Return the folder, names of weight files and tensors of the base model in the config's ``checkpointer``."""
    checkpointer: Any = OmegaConf.to_container(cfg_checkpointer, resolve=True)
    base = Path(checkpointer["checkpoint_dir"])
    files = checkpointer.get("checkpoint_files")
    if isinstance(files, dict):
        files = FormattedCheckpointFiles.from_dict(files).build_checkpoint_filenames()
    files = files or weight_files(base)
    return base, files, StoredWeights(base, files)


def merge(
    cfg_checkpointer: DictConfig,
    adapter: Path,
    out: Path,
    decoder: Decoder,
    complete: Callable[[Path], object] = lambda folder: None,
) -> None:
    """Merge a PEFT adapter into the checkpointer's base model and write a Hugging Face folder.

    It merges one weight at a time, in fp32, and rounds it by :func:`_round_by_chance`. It holds at most one file of the
    base model in memory, and the rest of a weight in two files. ``out`` appears only once it is complete. For a base
    model in Meta's format it logs a warning and writes nothing.

    Args:
        cfg_checkpointer: the config's ``checkpointer``.
        adapter: PEFT folder.
        out: folder to write.
        decoder: the model with this adapter.
        complete: writes further files into the folder, before it appears.

    Raises:
        UserError: the adapter changes a weight that the base model lacks, or a file of the base model is a link out of
            its folder.
    """
    base = Path(cfg_checkpointer.checkpoint_dir)
    if not (base / "config.json").is_file():
        log.warning(
            "skipping %s: %s is not a Hugging Face folder (it has no config.json)", out, base
        )
        return
    base, files, state = base_tensors(cfg_checkpointer)
    merged = MergedWeights(decoder, state, adapter)
    merged.check(base)
    say_ahead(merged._weights, f"are copied to {out} unchanged; {UNKNOWN}")
    beside = files_of(base, BESIDE_WEIGHTS)
    content = json_object((base / CONFIG).read_bytes()) or {}
    if "auto_map" not in content:  # no Python files are needed
        beside = {name: path for name, path in beside.items() if path.suffix != ".py"}
    with replace_folder(out) as folder:
        index = {}
        size = 0
        for file in files:
            tensors = {}
            for name in state.of_file(file):
                tensors[name] = merged.of(name).contiguous()
                size += tensors[name].nbytes
            target = "model.safetensors"  # transformers looks for a single file by this name
            if len(files) > 1:
                target = str(Path(file).with_suffix(".safetensors"))
            index.update(dict.fromkeys(tensors, target))
            save_file(tensors, folder / target, metadata={"format": "pt"})
            flush(folder / target)
        if len(set(index.values())) > 1:
            of_files = {"metadata": {"total_size": size}, "weight_map": index}
            (folder / "model.safetensors.index.json").write_text(json.dumps(of_files, indent=2))
        for name, path in beside.items():
            shutil.copy2(path, folder / name)
        _correct(folder / CONFIG, bool(getattr(merged._weights, "ahead", True)))
        if (adapter / TEMPLATE).is_file():  # the run's chat template
            shutil.copy2(adapter / TEMPLATE, folder / TEMPLATE)
            (folder / OF_PROCESSORS).unlink(missing_ok=True)  # transformers' processors prefer it
        complete(folder)


def _correct(path: Path, ahead: bool) -> None:
    """Remove the quantised format from a ``config.json``, and without ``ahead`` layers for MTP, which files lack."""
    content = json_object(path.read_bytes()) or {}
    changed = False
    for part in (content, content.get("text_config")):
        for key in QUANTISED:
            if isinstance(part, dict) and key in part:
                del part[key]
                changed = True
        for key in _AHEAD:
            if isinstance(part, dict) and part.get(key) and not ahead:
                log.warning("%s: %s is 0 instead of %s; the files lack them", path, key, part[key])
                part[key] = 0
                changed = True
    if changed:
        path.write_text(json.dumps(content, indent=2))


class MergedWeights:
    """A base model's tensors, ``state``, with an adapter, a PEFT folder; quantised tensors become bf16.

    They have the names of the base model's files. ``decoder`` is the model with this adapter.
    """

    def __init__(self, decoder: Decoder, state: State, adapter: Path) -> None:
        self._decoder = decoder
        self._state = state
        self._adapter = adapter
        self.config, stored = read_peft(adapter)
        self.experts, others = split_experts(stored, decoder, self.config)
        self.linear: dict[str, dict[str, Tensor]] = {}
        self.rows: dict[str, Tensor] = {}
        for name, parts in updates_by_weight(others).items():
            if ROWS in parts:
                self.rows[name] = parts[ROWS]
            else:
                self.linear[name] = parts
        self._weights = decoder.converted(state)  # base weights by the model's names
        self._ready: dict[str, Tensor] = {}  # pieces of merged weights that are not written yet
        # by a file's tensor, the weights that are made of it; only tensors of which a weight changes
        self._groups: dict[str, list[str]] = {}
        if self._weights is not state:
            for name in self._changed():
                if name in self._weights:
                    weights, pieces = self._weights.group(name)
                    self._groups |= dict.fromkeys(pieces, weights)
        self._same: dict[str, str] = {}  # a tied layer that the files hold twice
        if self.rows and is_tied(decoder):
            embeddings, output = (f"{name}.weight" for name in layer_names(decoder).values())
            if output in state:
                pieces = [name for name, weights in self._groups.items() if embeddings in weights]
                self._same[output] = pieces[0] if pieces else embeddings

    def _changed(self) -> list[str]:
        return [*self.linear, *self.experts, *self.rows]

    def check(self, base: Path) -> None:
        """Check that the base model in ``base`` has all weights that the adapter changes, in the same shapes.

        Raises:
            UserError: a weight is missing or has another shape, or the weights do not fit ``config.json``.
        """
        shapes = on_meta(self._weights)
        check_base(self._decoder, shapes, base)
        refuse(f"adapter {self._adapter} {problem}" for problem in self._problems(shapes, base))

    def _problems(self, shapes: State, base: Path) -> Iterator[str]:
        for name in self._changed():
            if name not in shapes:
                yield f"has weights for {name}, but {base} does not"
        trained = by_layer(self._decoder, self.config.tokens)
        if len(self.rows) < len(trained):
            yield f"is damaged: it lacks rows of {dict(self.config.tokens)}"
        for name, rows in self.rows.items():
            shape = list(shapes[name].shape)
            ids = self._ids(name)
            vocabulary, *width = shape
            if list(rows.shape[1:]) != width or ids[-1] >= vocabulary:
                yield f"has rows {ids} of {rows.shape[1]} values for {name}, which is {shape}"
        for name, parts in self.linear.items():
            rank, inputs = parts[LORA_A].shape
            outputs = len(parts[LORA_B])
            expected, _ = self.config.of(name.removesuffix(".weight"))
            shape = list(shapes[name].shape)
            if shape != [outputs, inputs] or rank != expected:
                yield f"has weights for {name} {[outputs, inputs]} of rank {rank}, but {base} has it {shape}"

    def weight(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a weight by the model's name: in ``dtype`` if the adapter changes it, else as stored.

        16-bit values are rounded as in a merged model; only fp32 is exact.
        """
        name = self._same.get(name, name)
        weight = dense(self._weights[name])
        return self._merged(name, weight, dtype) if name in self._changed() else weight

    def of(self, name: str) -> Tensor:
        """Return a copy of the tensor ``name`` of a file; call this once per tensor."""
        name = self._same.get(name, name)
        if self._weights is self._state:
            return self._merged(name, dense(self._state[name]))
        if name not in self._groups:
            return dense(self._state[name]).clone()
        if name not in self._ready:
            merged = {}
            for weight in self._groups[name]:
                merged[weight] = self._merged(weight, dense(self._weights[weight]))
            self._ready |= self._weights.taken_apart(merged)
        return self._ready.pop(name).clone()

    def _merged(self, name: str, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a weight with its update, in ``dtype`` or, without one, in the weight's."""
        dtype = dtype or weight.dtype
        if name in self.experts:
            return self._merged_experts(name, weight, dtype)
        if name in self.rows:
            rows = self.rows[name]
            _check_finite(rows, dtype, name)
            ids = torch.tensor(self._ids(name))
            return weight.to(dtype).index_copy(0, ids, rows.to(dtype))
        if name not in self.linear:
            return weight.clone()
        update = self.linear[name]
        a = update[LORA_A]
        b = update[LORA_B]
        scale = self.config.scale(name.removesuffix(".weight"))
        exact = merged_linear(weight.float(), a, b, scale, update.get(MAGNITUDE))
        return _round_by_chance(exact, dtype, name)

    def _merged_experts(self, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a fused weight of experts with its update; each expert is rounded by its own draw."""
        a, b, layer = self.experts[name]
        experts = len(weight)
        # [experts, r, in], [experts, out, r]
        a_by_expert, b_by_expert = expert_factors(a.float(), b.float(), experts)
        scale = self.config.scale(name)
        merged = torch.empty_like(weight, dtype=dtype)
        for i in range(experts):
            change = b_by_expert[i] @ a_by_expert[i]  # [out, in]
            if layer.transposed:
                change = change.T
            exact = weight[i].float() + scale * change
            merged[i] = _round_by_chance(exact, dtype, f"{name}.{i}")
        return merged

    def _ids(self, name: str) -> list[int]:
        return sorted(self.config.ids(name.removesuffix(".weight")))


def check_base(decoder: Decoder, shapes: State, base: Path) -> None:
    """Check that a base model's tensors fit its ``config.json``.

    Args:
        decoder: the decoder that ``config.json`` describes.
        shapes: the base model's tensors, by the names of ``decoder`` or, if it converts none, of the files.
        base: the base model's folder, for the message.
    """
    if decoder.names is None:
        return  # torchtune's converters know the names
    for name, parameter in decoder.named_parameters():
        if parameter.requires_grad:
            continue
        published = decoder.names.published(plain(name))
        shape = list(shapes[published].shape) if published in shapes else "missing"
        expected = list(parameter.shape)
        if shape != expected:
            raise UserError(
                f"{published} is {shape} in {base}, and {expected} by its {CONFIG}; download both again"
            )


def _round_by_chance(exact: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Round to 16 bits, up or down with the chance that keeps the mean: stochastic rounding (arXiv:1502.02551).

    The base weights lie on the 16-bit grid, so rounding to the nearest value would undo small changes everywhere.
    The same ``name`` of a weight gives the same result.

    Args:
        exact: values in fp32.
        dtype: bf16 or fp16; for other dtypes the values are cast.
    """
    _check_finite(exact, dtype, name)
    # number of bits that fp32's fraction has more
    dropped = {torch.bfloat16: 16, torch.float16: 13}.get(dtype)
    if dropped is None:
        return exact.to(dtype)
    generator = np.random.default_rng(crc32(name.encode()))
    step = 1 << dropped
    chance = generator.integers(0, step, tuple(exact.shape), np.uint16)
    bits = exact.contiguous().view(torch.int32)
    bits = bits + torch.from_numpy(chance.astype(np.int32))
    kept = bits & -step
    return kept.view(torch.float32).to(dtype)


def _check_finite(exact: Tensor, dtype: torch.dtype, name: str) -> None:
    extremes = torch.stack(exact.aminmax())
    if not extremes.abs().max() <= torch.finfo(dtype).max:  # also where they are NaN
        raise UserError(
            f"the merged {name} has values that are not finite in {dtype}; the adapter is damaged"
        )


def check_mergeable(decoder: Decoder, state: State) -> None:
    """Check that a merged model can have the names and shapes of the base model's tensors ``state``.

    Raises:
        UserError: transformers cannot undo the conversion of a weight that has an adapter.
    """
    converted = decoder.converted(state)
    if converted is state:
        return
    shapes = converted.on_meta()
    checked = set()
    for name in changed_weights(decoder):
        if name in checked or name not in shapes:  # loading refuses missing weights
            continue
        weights, _ = converted.group(name)
        checked.update(weights)
        try:
            converted.taken_apart({weight: shapes[weight] for weight in weights})
        except UserError as error:
            raise UserError(
                f"save_adapter_weights_only=False: {error}; set save_adapter_weights_only=True"
            ) from error
