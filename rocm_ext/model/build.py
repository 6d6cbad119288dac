"""Build a run's model, and load its weights."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder
from torchtune.training.precision import set_default_dtype

from rocm_ext import config
from rocm_ext.base.errors import UserError, explain_errors
from rocm_ext.base.log import log
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.machine.profile import Profile, check_locked
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.lora import (
    adapter_parameters,
    adapters,
    adopt,
    dense,
    init_adapters,
    is_plain,
    plain,
    reset,
    trained,
)
from rocm_ext.model.names import replace_parameter
from rocm_ext.model.native.decoder import native
from rocm_ext.model.native.layers import use_fused_norms
from rocm_ext.model.products import use_frozen_products
from rocm_ext.model.weights.checkpointer import (
    MODEL_KEY,
    State,
    StoredWeights,
    on_meta,
    sample,
    say_ahead,
)
from rocm_ext.model.weights.gguf_files import SUFFIX
from rocm_ext.model.weights.quantized import Quantized, fp8_rows, scaled_products


def build_model(cfg_model, dtype: torch.dtype, seed: int, device: torch.device) -> Decoder:
    """Build a decoder with fresh adapters and without base weights.

    Frozen parameters stay on the meta device. fp32 adapters and buffers are on ``device``. If ``device`` is the meta
    device, a native decoder's position tables are on the CPU.

    Args:
        cfg_model: the config's ``model``.
        dtype: dtype of the frozen parameters.
        seed: seed of the adapters' initial values.
        device: device of adapters and buffers.

    Raises:
        UserError: the component is not a LoRA builder of a text decoder.
    """
    with torch.device("meta"), set_default_dtype(dtype):
        decoder = config.instantiate(cfg_model, key="model")
    if isinstance(decoder, TransformerDecoder):
        decoder = native(decoder)
    if not isinstance(decoder, Decoder):
        raise UserError(
            f"model {cfg_model._component_} builds a {type(decoder).__name__}; only text decoders are supported: "
            "rocm_ext.model.from_checkpoint and torchtune's TransformerDecoder"
        )
    if cfg_model.get("quantize_base") == "fp8" and not decoder.quantizes:
        raise UserError(
            "model.quantize_base=fp8 is for rocm_ext.model.from_checkpoint; torchtune's builders take True"
        )
    if not decoder.layers:
        raise UserError(
            f"model {cfg_model._component_} builds a model without layers; set num_layers to at least 1"
        )
    adopt(decoder, cfg_model)
    init_adapters(decoder, seed, device)
    decoder.place_buffers(device)
    use_fused_norms(decoder)
    use_frozen_products(decoder)
    return decoder


def check_quantized(
    decoder: nn.Module, profile: Profile, overrides: list[str], ranks: int, budget: int
) -> list[str]:
    """Check that ``profile`` allows the base model to be quantised, if the config asks for it.

    Args:
        decoder: model with adapters.
        profile: the machine's profile, which may lock ``quantize_base``.
        overrides: keys set on the command line; an override lifts the lock.
        ranks: number of this run's processes, which share weights in 16 bits.
        budget: bytes that a rank may use. 16-bit weights above nine tenths of it leave no room to train and lift the
            lock.

    Returns:
        Warnings: one line if the lock is lifted.
    """
    asked = "fp8" if getattr(decoder, "quantizes", False) else True
    four_bits = any(layer._quantize_base for _, layer in adapters(decoder))
    if asked is True and not four_bits:
        return []
    key = "quantize_base"
    frozen = [p for p in decoder.parameters() if not p.requires_grad]
    unpacked = sum(2 * p.numel() for p in frozen) // ranks
    if key in profile.locked and unpacked > 0.9 * budget:
        sizes = f"16-bit weights take {unpacked / 2**30:.1f} GiB of {budget / 2**30:.1f}"
        reason = profile.locked[key].reason
        return [f"{key}={asked}: {sizes}, so the base model is quantised; {reason}"]
    lifted = [key] if key in overrides else []
    return check_locked(profile, {key: asked}, lifted)


@dataclass(frozen=True)
class Weights:
    """Base weights from the config's checkpointer.

    Attributes:
        state: tensors, by torchtune's names, or by the files' names if transformers builds the model.
        model_type: torchtune's ModelType name.
    """

    state: State
    model_type: str

    def fingerprint(self, architecture: str = "") -> str:
        """Hash that identifies the base model: names, shapes, dtypes and a sample of every tensor's values.

        ``architecture`` adds facts that decide the model's function and are not in the run's config.
        """
        digest = hashlib.sha256(architecture.encode())
        for name, tensor in sorted(on_meta(self.state).items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            values = sample(self.state, name)
            digest.update(values.float().cpu().numpy().tobytes())
        return digest.hexdigest()


def read_weights(cfg_checkpointer) -> Weights:
    """Open the base weights; :class:`StoredWeights` read a tensor at every access."""
    # torchtune reads the adapter only when it resumes
    cfg = config.without(cfg_checkpointer, "adapter_checkpoint")
    # torchtune raises a bare Exception for unknown names
    with explain_errors(f"checkpointer: cannot read {cfg.checkpoint_dir}"):
        state = config.instantiate(cfg, key="checkpointer").load_checkpoint()[MODEL_KEY]
    return Weights(state, str(cfg.model_type))


def load_weights(decoder: Decoder, weights: Weights, ranks: Ranks) -> None:
    """Copy ``weights`` into the frozen parameters, one tensor at a time; every rank copies its shard.

    Raises:
        UserError: parameters are missing, unexpected or of another shape, or have values that are not finite.
    """
    frozen = {name: p for name, p in decoder.named_parameters() if not p.requires_grad}
    buffers = decoder.buffers_to_load()
    state = decoder.converted(weights.state)
    if ranks.is_main:
        say_ahead(state, "are not trained")
    # every access allocates; others may be maps or parts of a larger tensor
    owned = isinstance(state, StoredWeights)
    stored = frozen | buffers
    expected = {plain(name): tensor for name, tensor in stored.items()}
    misfits = _misfits(expected, on_meta(state), "the checkpoint")
    if misfits:
        raise UserError(
            f"the checkpoint does not fit model: {misfits}. {_way_out(decoder, weights.state)}"
        )
    for name, buffer in buffers.items():
        buffer.copy_(state[plain(name)])
    extremes = {}
    quantized = {f"{name}.weight" for name, layer in adapters(decoder) if layer._quantize_base}
    joined = _joined(decoder, expected, quantized, ranks.device)
    larger = []  # weights that config.json says are quantised, and the files have in 16 bits
    for wrapped, parameter in frozen.items():
        name = plain(wrapped)
        full = state[name]
        if name in quantized:
            # torchao's, wherever it has it
            from torchtune.modules.low_precision.nf4_linear import to_nf4

            shard = full.to(ranks.device, torch.bfloat16).to(parameter.dtype)
            placed = to_nf4(shard)
        elif isinstance(parameter, Quantized) and (
            decoder.quantizes or isinstance(full, Quantized)
        ):
            if not isinstance(full, Quantized):
                multiplies = scaled_products(ranks.device, parameter.dtype)
                full = fp8_rows(full.to(ranks.device), parameter.transposed, multiplies)
            placed = full.with_parts(lambda part: part.to(ranks.device), parameter.dtype)
            shard = placed.finite_part()
        else:
            if isinstance(parameter, Quantized):
                larger.append(name)
            full = dense(full)
            if name in joined:
                placed = joined[name].copy_(full)
            else:
                placed = ranks.shard_like(full, parameter, copy=not owned)
            shard = placed.to_local() if hasattr(placed, "to_local") else placed  # type: ignore[operator]
        if shard.numel():
            lowest, highest = shard.aminmax()  # unlike a sum, without a copy in fp32
            extremes[name] = lowest.float() + highest.float()
        replace_parameter(decoder, wrapped, nn.Parameter(placed, requires_grad=False))
    _check_finite(extremes, state)
    if larger:
        log.warning(
            "%d weights, such as %s, take more memory than planned: config.json says that they are quantised, and the "
            "files have them otherwise", len(larger), larger[0]
        )  # fmt: skip
    for _, layer in trained(decoder):
        reset(layer)


def _joined(
    decoder: Decoder, weights: State, quantized: set[str], device: torch.device
) -> dict[str, Tensor]:
    """Allocate one tensor for every group of :meth:`Decoder.joined_weights`, so that sampling need not copy weights.

    Returns the rows for the weights, by name, without groups that have sharded or ``quantized`` weights.
    """
    rows: dict[str, Tensor] = {}
    for group in decoder.joined_weights():
        parts = [weights[name] for name in group]
        if quantized.isdisjoint(group) and all(map(is_plain, parts)):
            first = parts[0]
            sizes = list(map(len, parts))
            shape = sum(sizes), *first.shape[1:]
            tensor = torch.empty(shape, dtype=first.dtype, device=device)
            rows.update(zip(group, tensor.split(sizes), strict=True))
    return rows


def _way_out(decoder: Decoder, state: State) -> str:
    if decoder.names is None:
        return "Set model._component_ to the builder of these weights (size, base or instruct)"
    if isinstance(state, StoredWeights):
        for file in state.files:
            if file.endswith(SUFFIX):
                return f"Download {file} again"
    return "config.json and the weights must be of one model: download both again"


def _check_finite(extremes: State, state: State) -> None:
    # a NaN or infinity shows in the extremes, which take one transfer from the device
    values = list(extremes.values())
    if not values or torch.stack(values).isfinite().all():
        return
    bad = [name for name, value in extremes.items() if not value.isfinite()]
    advice = " in this dtype; set dtype=bf16 or fp32"
    stored_finite = all(state[name].isfinite().all() for name in bad)
    if not stored_finite:
        advice = "; the files are damaged: download them again"
    raise UserError(
        f"checkpointer: base weights {_first_three(bad, ', ')} have values that are not finite{advice}"
    )


def _misfits(parameters: State, state: State, where: str) -> str:
    """Name the first three tensors of ``state`` that are missing, unexpected or of another shape, if there are any."""
    problems = [f"missing {name}" for name in parameters if name not in state]
    problems += [f"unexpected {name}" for name in state if name not in parameters]
    for name, parameter in parameters.items():
        if name in state and state[name].shape != parameter.shape:
            shape = list(state[name].shape)
            problems.append(f"{name} is {shape} in {where}, {list(parameter.shape)} in the model")
    return _first_three(problems, "; ")


def _first_three(words: list[str], separator: str) -> str:
    more = f" and {len(words) - 3} more" if len(words) > 3 else ""
    return separator.join(words[:3]) + more


def check_adapter(decoder: Decoder, state: State, source: str) -> None:
    """Check that adapter weights ``state``, by torchtune's names, fit ``decoder``; ``source`` is for the message."""
    misfits = _misfits(adapter_parameters(decoder), state, "the adapter")
    if misfits:
        raise UserError(f"adapter {source} does not fit model: {misfits}")


def load_adapter(decoder: Decoder, state: State, source: str) -> None:
    """Copy adapter weights into ``decoder``; for arguments and errors see :func:`check_adapter`."""
    check_adapter(decoder, state, source)
    with torch.no_grad():
        for name, parameter in adapter_parameters(decoder).items():
            parameter.copy_(state[name])
