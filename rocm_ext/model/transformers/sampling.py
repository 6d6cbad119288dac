"""A copy of a model of transformers for sampling, which shares the weights that no adapter changes.

The copy is transformers' module tree once more: no wrappers of training, no dropout, attention over slots. Sampling
never writes to the weights under training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.model.adapters.peft_experts import expert_loras
from rocm_ext.model.adapters.peft_files import merged_layer
from rocm_ext.model.lora import Dora, ExpertLora, Lora, adapters, dense, factors, plain
from rocm_ext.model.transformers.decoder import TransformersDecoder, empty_model
from rocm_ext.model.transformers.slots import SLOTS, AttentionUse, SlotCache, forward_pass, layers_of, row_of
from rocm_ext.model.transformers.weights import persistent_buffers

_CHOSEN = ("num_experts_per_tok", "moe_k")
_SLACK = 1.5  # small temporaries, and the pieces between them; measured 1.0 to 1.4 with 19 architectures
_EXPANDED = 3  # times in fp32 that keys and values made of a smaller cache are in memory; measured 2.5
_MASK_BYTES = 40  # a step's positions and masks, per position of a slot
_CHUNK_BYTES = 8 * 64 * 4  # linear attention over chunks of 64 tokens: fp32 matrices, per token and head
_TOGETHER = 2048  # tokens of prompts that run together, with padding
_PROBE = 2  # tokens of the prefill that shows the cache's shapes
_ATTENTION = "its attention is not that of transformers' interface"
_SERVER = "sample on a server: engine._component_=rocm_ext.sampling.OpenAIEngine"


class Sampler:
    """Forward passes for sampling; :meth:`TransformersDecoder.sampler` makes one.

    Args:
        source: the model, with adapters.
        merge: add the adapters' updates to the weights; None: only to fp32 weights.
        rounded: returns the places that a ring takes for a window.
        together: compute prompts together, padded on the right, where no layer has states. A prompt's cache then
            depends on the others by rounding.

    Attributes:
        together: whether prompts are computed together.
        device, dtype: of the weights.
        max_seq_len: positions that the model supports; with LongRoPE, those of short rows.
        vocabulary: logits per row.
        weight_bytes: bytes of weights that a step of many rows reads.
        splits_rows: False: a matrix product of many rows is one call.
        flops_per_token: operations of the matrix products for one token.
        bytes_per_row: bytes that a pass holds at once for one token, in addition to the cache; an estimate.

    Raises:
        UserError: this model cannot be sampled from in this process.
    """

    splits_rows = False

    def __init__(
        self, source: TransformersDecoder, merge: bool | None, rounded: Callable[[int], int], together: bool
    ) -> None:
        self._needs = source.needs
        self.together = together and not self._needs.states
        merge = _merges(source, merge)
        self._adapted = _adapted(source)
        model = empty_model(source, SLOTS)
        state, replaced = _weights(source, merge)
        for name, layer in replaced.items():
            model.set_submodule(name, layer)
        self._decoder = TransformersDecoder(model, source.architecture).eval().requires_grad_(False)
        self._decoder.kernel = source.kernel
        self._decoder.load_state_dict(state, assign=True)
        for name, lora in expert_loras(source).items():  # it stays beside the weights, in any dtype
            owner, _, leaf = f"{name}{ExpertLora.SUFFIX}".rpartition(".")
            self._decoder.get_submodule(owner).add_module(leaf, lora)
        embeddings = self._decoder.tok_embeddings.weight
        self.device, self.dtype = embeddings.device, embeddings.dtype
        if self.device.type != "meta":
            _move_buffers(self._decoder, self.device)
        self.max_seq_len, self.vocabulary = self._needs.positions, len(embeddings)
        self._config, self._rounded, self._heads = model.config, rounded, source.num_heads
        parameters = {name: p for name, p in self._decoder.named_parameters() if p.ndim > 1}
        if not self._decoder.tied:
            parameters = {name: p for name, p in parameters.items() if p is not embeddings}
        self.weight_bytes = sum(p.nbytes for p in parameters.values())
        self.flops_per_token = 2.0 * sum(p.numel() * self._share(p) for p in parameters.values())
        self.bytes_per_row = self._row_bytes()

    @property
    def _chosen(self) -> int:
        config = self._config.get_text_config()
        return next((n for key in _CHOSEN if isinstance(n := getattr(config, key, None), int)), 1)

    def _share(self, parameter: Tensor) -> float:
        """Share of a weight that one token is multiplied with; those of experts are [experts, …]."""
        return 1.0 if parameter.ndim == 2 else min(1.0, self._chosen / len(parameter))

    def _row_bytes(self) -> int:
        width = self._decoder.tok_embeddings.weight.shape[1]
        widest = 0
        for layer in self._decoder.layers:
            shapes = [p.shape for p in layer.parameters()]
            outputs = sum(shape[0] for shape in shapes if len(shape) == 2)
            experts = sum(shape[1] + shape[2] for shape in shapes if len(shape) == 3)
            widest = max(widest, outputs + self._chosen * experts)
        # in and out, and fp32 in norms and activations
        return int(_SLACK * (widest + 6 * width) * (2 * self.dtype.itemsize + 4))

    def cache_bytes(self, length: float) -> float:
        """Bytes of a slot of ``length`` positions."""
        return self._needs.states + sum(
            size * (length if window is None else min(length, self._rounded(window)))
            for size, window in self._needs.keys
        )

    def free(self) -> None:
        """Free the weights, even if a caller keeps this object."""
        vars(self).clear()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the adapter's present values into the copy, in place; see :meth:`rocm_ext.sampling.decoder.Decoder`.

        Experts need no copy: they share the adapter under training.
        """
        for name, layer in self._adapted.items():
            mine: Any = self._decoder.get_submodule(name)
            if isinstance(mine, _Adapted):
                mine.refresh(layer)
            else:
                mine.weight.copy_(merged_layer(layer, dense(layer.weight.detach())))

    def step_bytes(self, length: int) -> int:
        """Bytes that a step holds per slot of ``length`` positions, without logits; an estimate."""
        return self.bytes_per_row + length * (_MASK_BYTES + self._score_bytes + _EXPANDED * self._needs.expanded)

    @property
    def _score_bytes(self) -> int:
        return self._heads * (3 * self.dtype.itemsize + 5) if self._needs.scores else 0

    def prefill_bytes(self, prompts: Sequence[int], most: int) -> int:
        """Bytes that hold the caches of prompts of these lengths and compute them; an estimate.

        Args:
            prompts: tokens of each prompt.
            most: tokens of prompts that are computed before the first answer.
        """
        held = max(min(most, sum(prompts)), max(prompts))
        at_once = held if self.together else max(prompts)
        per_position = sum(size for size, _ in self._needs.keys)  # prompts keep more than the window
        states = self._needs.states * (1 + held * len(prompts) // sum(prompts))
        scores = max(prompts) ** 2 * (8 + self._score_bytes) * max(1, at_once // max(prompts))
        chunks = self._heads * _CHUNK_BYTES if self._needs.states else 0
        return held * per_position + states + at_once * (per_position + self.bytes_per_row + chunks) + scores

    def new_cache(self, slots: int, length: int) -> SlotCache:
        """Return a cache of ``slots`` sequences of ``length`` positions; its memory is allocated at first use."""
        return SlotCache(self._config, slots, length, self._rounded if self._needs.windows else None)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Cache]:
        """Compute the cache of ``prompts``.

        Args:
            prompts: token ids of each prompt.

        Returns:
            One cache per prompt.
        """
        caches = []
        for group in self._groups(prompts):
            longest = max(1, *map(len, group))
            padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in group]
            tokens = torch.tensor(padded, device=self.device)
            layers, _ = _prefill(self._decoder.body, self._config, tokens, self._decoder.kernel)
            caches += [row_of(layers, row, len(prompt)) for row, prompt in enumerate(group)]
        return caches

    def _groups(self, prompts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
        groups: list[list[Sequence[int]]] = []
        for prompt in prompts:
            new = [*groups[-1], prompt] if groups else []
            if self.together and new and len(new) * max(map(len, new)) <= _TOGETHER:
                groups[-1] = new
            else:
                groups.append([prompt])
        return groups

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: SlotCache, span: int) -> Tensor:
        """Decode one token in each of the first n slots.

        Args:
            tokens: [n], the newest token of each slot.
            positions: [n], its position.
            cache: of all earlier tokens.
            span: places that attention reads; more than the largest of ``positions``.

        Returns:
            Logits [n, v] of the next tokens.
        """
        cache.begin(positions, span)
        rows = {"input_ids": tokens[:, None], "position_ids": positions[:, None]}
        with forward_pass(positions[:, None], self._decoder.kernel, cache):
            hidden = self._decoder.body(**rows, past_key_values=cache, use_cache=True).last_hidden_state
        return self._decoder.output(hidden[:, 0])


class _Adapted(nn.Module):
    """A linear layer and its adapter: ``(x Wᵀ + x Aᵀ Bᵀ) * scale + bias``; all are in one dtype.

    Args:
        layer: the layer under training.
    """

    def __init__(self, layer: Lora | Dora) -> None:
        super().__init__()
        self.weight = _frozen(dense(layer.weight.detach()))
        self.bias = None if layer.bias is None else _frozen(dense(layer.bias.detach()))
        dtype = self.weight.dtype
        a, b, factor = factors(layer)
        self.a, self.b = _frozen(a.to(dtype, copy=True)), _frozen(b.to(dtype))
        self.factor = None if factor is None else _frozen(factor.to(dtype))

    def refresh(self, layer: Lora | Dora) -> None:
        """Copy the present values of the layer under training."""
        for mine, value in zip((self.a, self.b, self.factor), factors(layer), strict=True):
            if mine is not None and value is not None:
                mine.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        out = F.linear(x, self.weight) + F.linear(F.linear(x, self.a), self.b)
        if self.factor is not None:
            out = out * self.factor
        return out if self.bias is None else out + self.bias


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _prefill(run: Callable[..., Any], config: Any, tokens: Tensor, kernel: str) -> tuple[list[Any], AttentionUse]:
    """Return the cache's layers after ``tokens`` [n, s], and what the model's code asked for."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    cache = Cache(layers=layers_of(config))
    with forward_pass(positions, kernel) as asked:
        run(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
    return cache.layers, asked


@dataclass(frozen=True)
class Needs:
    """What a model keeps of a sequence.

    Attributes:
        keys: bytes per position and window of each layer with keys; None: it attends to all positions.
        states: bytes of all recurrent states.
        windows: whether any layer has a window.
        scores: whether attention holds its scores in memory.
        expanded: bytes per position, in fp32, of a layer's keys and values that the model makes of its cache in each
            step (DeepSeek); 0 if it keeps them.
        positions: of the longest sequence.
    """

    keys: list[tuple[int, int | None]]
    states: int
    windows: bool
    scores: bool
    expanded: int
    positions: int


@torch.no_grad()
def needs_of(source: TransformersDecoder) -> Needs:
    """Find out what a model keeps of a sequence, from a prefill on fake tensors.

    Raises:
        UserError: this model cannot be sampled from in this process; the message names it and the reason.
    """
    name = type(source.model_).__name__
    try:
        model = empty_model(source, SLOTS)
        body = TransformersDecoder(model, source.architecture).eval().body
        with FakeTensorMode():
            tensors = [*body.named_parameters(), *body.named_buffers()]
            fakes = {key: torch.empty(t.shape, dtype=t.dtype) for key, t in tensors}
            layers, asked = _prefill(
                lambda **given: functional_call(body, fakes, (), given),
                model.config,
                torch.zeros(1, _PROBE, dtype=torch.long),
                "auto",
            )
    except Exception as error:  # the model's code may raise anything
        cause = _ATTENTION if SLOTS in str(error) else one_line(error)  # its code does not know this attention
        raise UserError(f"{name} cannot be sampled from in this process: {cause}; {_SERVER}") from error
    keys, states, used, kept = [], 0, 0, 0
    for layer in layers:
        used += getattr(layer, "is_initialized", False) or any(getattr(layer, "has_previous_state", {}).values())
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            size = (layer.keys.nbytes + layer.values.nbytes) // _PROBE  # type: ignore[union-attr]
            kept = max(kept, size // layer.keys.element_size())  # type: ignore[union-attr]
            keys.append((size, getattr(layer, "sliding_window", None) if asked.windows else None))
        if isinstance(layer, LinearAttentionLayer):
            every = [*layer.conv_states.values(), *layer.recurrent_states.values()]
            states += sum(t.nbytes for t in every if t is not None)
    problems = {
        "its cache is not that of transformers' interface": used < len(layers),
        _ATTENTION: len(keys) > asked.layers,
    }
    if bad := [what for what, found in problems.items() if found]:
        raise UserError(f"{name} cannot be sampled from in this process: {bad[0]}; {_SERVER}")
    expanded = 4 * asked.read if asked.read > kept else 0
    scores = asked.scores or source.kernel in ("math", "eager")
    return Needs(keys, states, asked.windows, scores, expanded, min(source.max_seq_len, _short(body)))


def copied_bytes(source: TransformersDecoder, merge: bool | None) -> int:
    """Bytes that a :class:`Sampler` adds to the model's; it gathers sharded weights and dequantises 4-bit ones."""
    merged = {f"{name}.weight" for name in _adapted(source)} if _merges(source, merge) else set()
    itemsize = source.tok_embeddings.weight.dtype.itemsize
    return sum(
        p.numel() * itemsize
        for name, p in source.named_parameters()
        if plain(name) in merged or hasattr(p, "full_tensor") or hasattr(p, "get_original_weight")
    )


def _merges(source: TransformersDecoder, merge: bool | None) -> bool:
    return source.tok_embeddings.weight.dtype == torch.float32 if merge is None else merge


def _adapted(source: TransformersDecoder) -> dict[str, Lora | Dora]:
    return {name: layer for name, layer in adapters(source) if isinstance(layer, Lora | Dora)}


@torch.no_grad()
def _weights(source: TransformersDecoder, merge: bool) -> tuple[dict[str, Tensor], dict[str, nn.Module]]:
    """Return the copy's weights by name, and the layers that keep their adapter beside the weight."""
    adapted = _adapted(source)
    replaced: dict[str, nn.Module] = {} if merge else {name: _Adapted(layer) for name, layer in adapted.items()}
    state = {f"{name}.{key}": p.detach() for name, layer in replaced.items() for key, p in layer.named_parameters()}
    for key, parameter in source.named_parameters():
        name = plain(key)
        owner, _, leaf = name.rpartition(".")
        if owner in replaced or leaf == "magnitude" or owner.rpartition(".")[2] in ("lora_a", "lora_b"):
            continue
        state[name] = dense(parameter.detach())
        if owner in adapted and leaf == "weight":
            state[name] = merged_layer(adapted[owner], state[name])
    state.update({plain(name): buffer for name, buffer in persistent_buffers(source).items()})
    return state, replaced


def _short(model: nn.Module) -> int:
    """Positions up to which a model's rotations are those of short rows.

    LongRoPE takes other frequencies for all positions of a longer row. A cache holds keys of the shorter one's.
    """
    every = (module for module in model.modules() if getattr(module, "rope_type", None) == "longrope")
    return min((each.config.rope_parameters["original_max_position_embeddings"] for each in every), default=2**31)  # type: ignore


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
