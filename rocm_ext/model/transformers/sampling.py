"""A copy of a model of transformers for sampling.

The copy is transformers' module tree once more, with attention over slots.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.model.adapters.peft_experts import expert_loras
from rocm_ext.model.lora import Dora, ExpertLora, Lora, adapters, dense, plain
from rocm_ext.model.sampler import Needs, Sampler, SamplingLinear, merges
from rocm_ext.model.slots import span_for
from rocm_ext.model.transformers.slots import SLOTS, AttentionUse, TransformersSlots, forward_pass, layers_of, row_of
from rocm_ext.model.transformers.weights import persistent_buffers

if TYPE_CHECKING:
    from rocm_ext.model.transformers.decoder import TransformersDecoder

_CHOSEN = ("num_experts_per_tok", "moe_k")
_SLACK = 1.5  # small temporaries, and the pieces between them; measured 1.0 to 1.4 with 19 architectures
_CHUNK_BYTES = 8 * 64 * 4  # linear attention over chunks of 64 tokens: fp32 matrices, per token and head
_TOGETHER = 2048  # tokens of prompts that run together, with padding
_PROBE = 2  # tokens of the prefill that shows the cache's shapes
_ATTENTION = "its attention is not that of transformers' interface"
_SERVER = "sample on a server: engine._component_=rocm_ext.sampling.OpenAIEngine"


class TransformersSampler(Sampler):
    """Forward passes of a model of transformers; :meth:`TransformersDecoder.sampler` makes one.

    Args:
        source: the model, with adapters.
        merge: see :func:`rocm_ext.model.sampler.sampler_of`.
        device: that samples; None: the weights' own.

    Attributes:
        together: whether prompts are computed together, padded on the right. A prompt's cache then depends on the
            others by rounding, so CPUs compute one at a time; so do models whose layers have states.
    """

    splits_rows = False
    mask_bytes = 40

    def __init__(self, source: "TransformersDecoder", merge: bool | None, device: torch.device | None) -> None:
        device = source.tok_embeddings.weight.device if device is None else device
        self.together = device.type != "cpu" and not source.needs.states
        self._rounded = partial(span_for, device)
        state, linear = _weights(source, merges(source, merge))
        model = source.empty_model(SLOTS)
        for name, layer in linear.items():
            model.set_submodule(name, layer)
        decoder = source.wrapped(model).eval().requires_grad_(False)
        decoder.kernel = source.kernel
        decoder.load_state_dict(state, assign=True)
        for name, lora in expert_loras(source).items():  # it stays beside the weights, in any dtype
            owner, _, leaf = f"{name}{ExpertLora.SUFFIX}".rpartition(".")
            decoder.get_submodule(owner).add_module(leaf, lora)
        placed = decoder.tok_embeddings.weight.device
        if placed.type != "meta":
            decoder.place_buffers(placed)
        self._config = model.config
        layers = _adapted(source)
        adapted = [(layer, [layers[name]]) for name, layer in linear.items()]
        super().__init__(decoder, adapted, source.needs, source.num_heads, bool(decoder.tied))

    @property
    def _chosen(self) -> int:
        config = self._config.get_text_config()
        return next((n for key in _CHOSEN if isinstance(n := getattr(config, key, None), int)), 1)

    def _share(self, parameter: Tensor) -> float:
        """Share of a weight that one token is multiplied with; those of experts are [experts, …]."""
        return 1.0 if parameter.ndim == 2 else min(1.0, self._chosen / len(parameter))

    @property
    def bytes_per_row(self) -> int:
        """Bytes that a pass holds at once for one token, in addition to the cache; an estimate."""
        width = self.decoder.tok_embeddings.weight.shape[1]
        widest = 0
        for layer in self.decoder.layers:
            shapes = [p.shape for p in layer.parameters()]
            outputs = sum(shape[0] for shape in shapes if len(shape) == 2)
            experts = sum(shape[1] + shape[2] for shape in shapes if len(shape) == 3)
            widest = max(widest, outputs + self._chosen * experts)
        # in and out, and fp32 in norms and activations
        return int(_SLACK * (widest + 6 * width) * (2 * self.dtype.itemsize + 4))

    def _ring(self, window: int) -> int:
        return self._rounded(window)

    def prefill_bytes(self, prompts: Sequence[int], most: int) -> int:
        """Bytes that hold the caches of prompts of these lengths and compute them; an estimate.

        Args:
            prompts: tokens of each prompt.
            most: tokens of prompts that are computed before the first answer.
        """
        held = max(min(most, sum(prompts)), max(prompts))
        at_once = held if self.together else max(prompts)
        per_position = sum(size for size, _ in self.needs.keys)  # prompts keep more than the window
        states = self.needs.states * (1 + held * len(prompts) // sum(prompts))
        scores = max(prompts) ** 2 * (8 + self._score_bytes) * max(1, at_once // max(prompts))
        chunks = self._heads * _CHUNK_BYTES if self.needs.states else 0
        return held * per_position + states + at_once * (per_position + self.bytes_per_row + chunks) + scores

    def new_cache(self, slots: int, length: int) -> TransformersSlots:
        """Return a cache of ``slots`` sequences of ``length`` positions; its memory is allocated at first use."""
        return TransformersSlots(self._config, slots, length, self._rounded if self.needs.windows else None)

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
            layers, _ = _prefill(self.decoder.body, self._config, tokens, self.decoder.kernel)
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
    def step(self, tokens: Tensor, positions: Tensor, cache: TransformersSlots, span: int) -> Tensor:
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
        with forward_pass(positions[:, None], self.decoder.kernel, cache):
            hidden = self.decoder.body(**rows, past_key_values=cache, use_cache=True).last_hidden_state
        return self.decoder.output(hidden[:, 0])


def _prefill(run: Callable[..., Any], config: Any, tokens: Tensor, kernel: str) -> tuple[list[Any], AttentionUse]:
    """Return the cache's layers after ``tokens`` [n, s], and what the model's code asked for."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    cache = Cache(layers=layers_of(config))
    with forward_pass(positions, kernel) as asked:
        run(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True)
    return cache.layers, asked


@torch.no_grad()
def needs_of(source: "TransformersDecoder") -> Needs:
    """Find out what a model keeps of a sequence, from a prefill on fake tensors.

    Raises:
        UserError: this model cannot be sampled from in this process; the message names it and the reason.
    """
    name = type(source.model_).__name__
    try:
        model = source.empty_model(SLOTS)
        body = source.wrapped(model).eval().body
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


def _adapted(source: "TransformersDecoder") -> dict[str, Lora | Dora]:
    return {name: layer for name, layer in adapters(source) if isinstance(layer, Lora | Dora)}


@torch.no_grad()
def _weights(source: "TransformersDecoder", merge: bool) -> tuple[dict[str, Tensor], dict[str, SamplingLinear]]:
    """Return the copy's weights by name, and its layers that have an adapter."""
    linear = {name: SamplingLinear([layer], merge) for name, layer in _adapted(source).items()}
    state = {f"{name}.{key}": p.detach() for name, layer in linear.items() for key, p in layer.named_parameters()}
    for key, parameter in source.named_parameters():
        owner = plain(key).rpartition(".")[0]
        if owner not in linear and owner.rpartition(".")[2] not in ("lora_a", "lora_b"):
            state[plain(key)] = dense(parameter.detach())
    state.update({plain(name): buffer for name, buffer in persistent_buffers(source).items()})
    return state, linear


def _short(model: nn.Module) -> int:
    """Positions up to which a model's rotations are those of short rows.

    LongRoPE takes other frequencies for all positions of a longer row. A cache holds keys of the shorter one's.
    """
    every = (module for module in model.modules() if getattr(module, "rope_type", None) == "longrope")
    return min((each.config.rope_parameters["original_max_position_embeddings"] for each in every), default=2**31)  # type: ignore
