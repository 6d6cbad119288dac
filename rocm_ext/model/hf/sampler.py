"""A copy of a model of transformers for sampling: a second module tree with attention over slots."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.model.attention import SlotCache, Slots, span_for
from rocm_ext.model.hf.attention import SLOTS, ForwardPass, forward_pass
from rocm_ext.model.hf.checkpoint import persistent_buffers
from rocm_ext.model.hf.experts import ROUTES, Replay, experts_of
from rocm_ext.model.lora import Dora, ExpertLora, Lora, adapters, dense, expert_loras, plain
from rocm_ext.model.names import replace_parameter
from rocm_ext.model.plan_cache import remembered
from rocm_ext.model.products import use_frozen_products
from rocm_ext.model.sampler import (
    MIN_ROWS,
    Sampler,
    SamplingLinear,
    SequenceMemory,
    merges,
    one_step,
    stays_quantized,
)
from rocm_ext.model.token_rows import TokenRows, attach, token_rows
from rocm_ext.model.weights.quantized import frozen

_CHOSEN = ("num_experts_per_tok", "moe_k")
# small temporaries, and the pieces between them; measured 1.0 to 1.4 with 19 architectures
_SLACK = 1.5
# linear attention over chunks of 64 tokens: fp32 matrices, per token and head
_CHUNK_BYTES = 8 * 64 * 4
_TOGETHER = 2048  # tokens of prompts that run together, with padding
_PROBE = 2  # tokens of the prefill that shows the cache's shapes
_ATTENTION = "its attention is not that of transformers' interface"
_ADAPTED = (".lora_a", ".lora_b", f".{TokenRows.NAME}")  # ends of the names of an adapter's modules
_SERVER = "sample on a server: engine._component_=rocm_ext.sampling.OpenAIEngine"


# ---- the cache of slots


class _Attention(Slots, CacheLayerMixin):
    """Keys and values of one layer, as transformers asks for them."""

    def __init__(self, cache: "TransformersSlots", window: int | None) -> None:
        CacheLayerMixin.__init__(self)
        Slots.__init__(self, cache, window)
        self.is_sliding = window is not None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values in the first n slots; return these slots' keys and values."""
        return self.write(key_states[:, :, 0], value_states[:, :, 0])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of positions that attention reads, and 0."""
        return min(self._cache.span, self.places), 0

    def get_seq_length(self) -> int:
        """Return the positions before the newest token of the longest slot."""
        return self._cache.span - 1

    def get_max_length(self) -> int:
        """Return the number of positions that a slot stores."""
        return self.places


class _Nothing(DummyLayer):
    """A layer without a cache."""

    def put(self, rows: slice, prefix, known: int) -> None:
        pass

    def held(self, known: int) -> list[Tensor]:
        return []


class _Recurrent(LinearAttentionLayer):
    """States of one layer, [slots, …]; transformers' code sees the running rows."""

    def __init__(self, cache: "TransformersSlots", states: int) -> None:
        super().__init__(number_of_states=states)
        self._slots = cache.slots
        self._all: dict[tuple[str, int], Tensor] = {}

    def begin(self, n: int) -> None:
        """Show the first ``n`` slots to the model."""
        for (kind, index), tensor in self._all.items():
            getattr(self, kind)[index] = tensor[:n]

    def put(self, rows: slice, prefix, known: int) -> None:
        """Copy the states of one sequence into slots."""
        for kind in ("conv_states", "recurrent_states"):
            for index, tensor in getattr(prefix, kind).items():
                if tensor is None:
                    continue
                if (kind, index) not in self._all:
                    _, *shape = tensor.shape
                    self._all[kind, index] = tensor.new_zeros(self._slots, *shape)
                    getattr(self, f"is_{kind}_initialized")[index] = True
                    self.has_previous_state[index] = True
                    self.device = tensor.device
                    self.dtype = tensor.dtype
                    if kind == "conv_states":
                        self.conv_kernel_size[index] = shape[-1]
                self._all[kind, index][rows] = tensor if known else 0

    def held(self, known: int) -> list[Tensor]:
        return list(self._all.values())


class _Both(_Recurrent, _Attention):  # type: ignore[misc, override]
    """A layer with both."""

    def __init__(self, cache: "TransformersSlots", states: int) -> None:
        _Attention.__init__(self, cache, None)
        _Recurrent.__init__(self, cache, states)

    lazy_initialization = _Attention.lazy_initialization  # type: ignore[assignment]
    get_max_length = _Attention.get_max_length

    def put(self, rows: slice, prefix, known: int) -> None:
        _Recurrent.put(self, rows, prefix, known)
        _Attention.put(self, rows, prefix, known)

    def held(self, known: int) -> list[Tensor]:
        return [*_Recurrent.held(self, known), *_Attention.held(self, known)]


class TransformersSlots(SlotCache, Cache):
    """The cache of several sequences, one per slot.

    Args:
        config: transformers' config of the model.
        slots, length: number of slots, and positions per slot.
        rounded: returns a ring's positions for a window. None if every layer attends to all positions.

    Raises:
        UserError: the model has an unsupported kind of layer.
    """

    def __init__(
        self, config, slots: int, length: int, rounded: Callable[[int], int] | None
    ) -> None:
        SlotCache.__init__(self, 0, slots, length)
        self._rounded = rounded
        Cache.__init__(self, layers=[self._layer(theirs) for theirs in layers_of(config)])

    def _layer(self, theirs) -> Any:
        if isinstance(theirs, LinearAttentionAndFullAttentionLayer):
            return _Both(self, theirs.number_of_states)
        if isinstance(theirs, LinearAttentionLayer):
            return _Recurrent(self, theirs.number_of_states)
        if isinstance(theirs, DummyLayer):
            return _Nothing()
        return _Attention(self, getattr(theirs, "sliding_window", None) if self._rounded else None)

    def ring(self, window: int | None) -> int:
        if window is None or self._rounded is None:
            return self._length
        return min(self._length, self._rounded(max(1, window)))  # some configs say 0 and use none

    @property
    def is_linear(self) -> list[bool]:
        """Whether a layer has only states, by layer; transformers asks."""
        return [type(layer) is _Recurrent for layer in self.layers]

    def begin(self, positions: Tensor, span: int) -> None:
        super().begin(positions, span)
        for layer in self.layers:
            if isinstance(layer, _Recurrent):
                layer.begin(len(positions))


class _WholeWindow(DynamicLayer):
    """All keys and values of a prefill in sliding attention, because rows have different lengths."""

    is_sliding = True

    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        self.sliding_window = sliding_window


_KINDS = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, DummyLayer)


def layers_of(config) -> list[Any]:
    """Return new cache layers for the prefill of a model; refuse unsupported kinds."""
    # Llama 4 also scales queries by the number of cached tokens
    if "chunked_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        raise UserError("it has chunked attention")
    layers = list(DynamicCache(config=config).layers)
    for i, layer in enumerate(layers):
        if type(layer) is DynamicSlidingWindowLayer:
            layers[i] = _WholeWindow(layer.sliding_window)
        elif type(layer) not in _KINDS:
            raise UserError(f"it needs {type(layer).__name__}")
    return layers


def row_of(layers: list[Any], row: int, known: int) -> Cache:
    """Return a copy of the first ``known`` positions of one row of a prefill's cache."""
    rows = slice(row, row + 1)

    def states_of(states: dict[int, Tensor | None]) -> dict[int, Tensor | None]:
        of_row = dict(states)
        for i, state in states.items():
            if state is not None:
                of_row[i] = state[rows].clone()
        return of_row

    copies = []
    layer: Any
    for layer in layers:
        one = copy.copy(layer)
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            one.keys = layer.keys[rows, :, :known].clone()
            one.values = layer.values[rows, :, :known].clone()
        if isinstance(layer, LinearAttentionLayer):
            one.conv_states = states_of(layer.conv_states)
            one.recurrent_states = states_of(layer.recurrent_states)
        copies.append(one)
    return Cache(layers=copies)


# ---- the sampler


class TransformersSampler(Sampler):
    """Forward passes of a model of transformers.

    Args:
        source: the model, with adapters.
        merge: see :func:`rocm_ext.model.sampler.sampler_of`.
        device: device for sampling, by default the weights' device.

    Attributes:
        together: whether prompts are computed together, padded on the right. The rounding in a prompt's cache then
            depends on the others, so CPUs compute one prompt at a time. Models whose layers have states also do.
    """

    splits_rows = False
    mask_bytes = 40

    def __init__(self, source, merge: bool | None, device: torch.device | None) -> None:
        if device is None:
            device = source.tok_embeddings.weight.device
        self.together = device.type != "cpu" and not source.memory.states
        self._rounded = partial(span_for, device)
        state, linear = _weights(source, merges(source, merge))
        model = source.empty_model(SLOTS)
        layers = dict(adapters(source))
        adapted: list[Any] = []
        for name, layer in linear.items():
            model.set_submodule(name, layer)
            adapted.append((layer, [layers[name]]))
        decoder = source.wrapped(model).eval().requires_grad_(False)
        decoder.kernel = source.kernel
        decoder.load_state_dict(state, assign=True)
        use_frozen_products(decoder)
        for name, lora in expert_loras(source).items():  # separate from the weights, in any dtype
            owner, _, leaf = f"{name}{ExpertLora.SUFFIX}".rpartition(".")
            decoder.get_submodule(owner).add_module(leaf, lora)
        placed = decoder.tok_embeddings.weight.device
        if placed.type != "meta":
            decoder.place_buffers(placed)
        self._config = model.config
        tied = decoder.output_layer if decoder.tied else None
        for name, rows in token_rows(source):
            copied = rows.copy()
            adapted.append((copied, [rows]))
            attach(copied, decoder.get_submodule(name), tied)
        self._chosen = chosen_of(self._config)
        super().__init__(decoder, adapted, source.memory, source.num_heads, bool(decoder.tied))

    def _share(self, parameter: Tensor) -> float:  # experts' weights are [experts, …]
        if parameter.ndim == 2:
            return 1.0
        return min(1.0, self._chosen / len(parameter))

    @property
    def bytes_per_row(self) -> int:
        return self._row_bytes(False)

    def step_bytes(self, length: int) -> int:
        return super().step_bytes(length) + self._row_bytes(self.fixed_shapes) - self.bytes_per_row

    def _row_bytes(self, every: bool) -> int:
        """Return the bytes of one token, computed by its experts or, with fixed shapes, by ``every`` expert."""
        width = self.decoder.tok_embeddings.weight.shape[1]
        widest = 0
        for layer in self.decoder.layers:
            numbers = 0
            for parameter in layer.parameters():
                if parameter.ndim == 2:
                    numbers += len(parameter)
                elif parameter.ndim == 3:
                    experts, first, second = parameter.shape
                    numbers += (experts if every else self._chosen) * (first + second)
            widest = max(widest, numbers)
        per_number = 2 * self.dtype.itemsize + 4  # in and out, and fp32 in norms and activations
        return int(_SLACK * (widest + 6 * width) * per_number)

    def _ring(self, window: int) -> int:
        return self._rounded(window)

    def prefill_bytes(self, prompts: Sequence[int], most: int) -> int:
        longest = max(prompts)
        total = sum(prompts)
        held = max(min(most, total), longest)
        at_once = held if self.together else longest
        per_position = sum(size for size, _ in self.memory.keys)  # prompts keep more than windows
        states = self.memory.states * (1 + held * len(prompts) // total)
        rows = max(1, at_once // longest)
        scores = rows * longest**2 * (8 + self._score_bytes)
        chunks = self._heads * _CHUNK_BYTES if self.memory.states else 0
        working = at_once * (per_position + self.bytes_per_row + chunks)
        return held * per_position + states + working + scores

    def new_cache(self, slots: int, length: int) -> TransformersSlots:
        rounded = self._rounded if self.memory.windows else None
        return TransformersSlots(self._config, slots, length, rounded)

    def keep_routes(self, slots: int) -> Tensor:
        experts = experts_of(self.decoder).values()
        routes = torch.zeros(
            slots, len(experts), self._chosen, dtype=torch.int16, device=self.device
        )
        for layer, module in enumerate(experts):
            vars(module)[ROUTES] = routes[:, layer]
        return routes

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Cache]:
        caches = []
        for group in self._groups(prompts):
            longest = max(1, *map(len, group))
            tokens = torch.zeros(len(group), longest, dtype=torch.long)
            for row, prompt in enumerate(group):
                tokens[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)
            tokens = tokens.to(self.device)
            layers, _ = _prefill(self.decoder.body, self._config, tokens, self.decoder.kernel)
            for row, prompt in enumerate(group):
                caches.append(row_of(layers, row, len(prompt)))
        return caches

    def _groups(self, prompts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
        """Divide prompts among calls."""
        groups: list[list[Sequence[int]]] = []
        for prompt in prompts:
            if groups and self.together:
                larger = [*groups[-1], prompt]
                if len(larger) * max(map(len, larger)) <= _TOGETHER:
                    groups[-1] = larger
                    continue
            groups.append([prompt])
        return groups

    @torch.no_grad()
    def step(
        self, tokens: Tensor, positions: Tensor, cache: TransformersSlots, span: int
    ) -> Tensor:
        cache.begin(positions, span)
        rows = {"input_ids": tokens[:, None], "position_ids": positions[:, None]}
        with forward_pass(rows["position_ids"], self.decoder.kernel, cache, self.fixed_shapes):
            hidden = self.decoder.body(**rows, cache=cache, use_cache=True).last_hidden_state
        return self.decoder.output(hidden[:, 0])


def chosen_of(config) -> int:
    """Return the experts of a token in a layer, from transformers' config of a model."""
    config = config.get_text_config()
    for key in _CHOSEN:
        count = getattr(config, key, None)
        if isinstance(count, int):
            return count
    return 1


def _prefill(
    run: Callable[..., Any], config, tokens: Tensor, kernel: str
) -> tuple[list[Any], ForwardPass]:
    """Return the cache's layers after ``tokens`` [n, s], and the pass, with the model's use of attention."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    positions = index.expand(tokens.shape)
    cache = Cache(layers=layers_of(config))
    with forward_pass(positions, kernel) as now:
        run(input_ids=tokens, position_ids=positions, cache=cache, use_cache=True)
    return cache.layers, now


def _fake_prefill(decoder, replay: Replay | None = None) -> tuple[list[Any], ForwardPass]:
    """Compute :func:`_prefill` of two tokens on fake tensors; ``replay`` gives their experts."""
    body = decoder.body
    with FakeTensorMode():
        if replay is not None:
            routes = torch.zeros(_PROBE, replay.layers * replay.chosen, dtype=torch.long)
            replay.begin(routes)
        fakes = {}
        for name, tensor in chain(body.named_parameters(), body.named_buffers()):
            fakes[name] = torch.empty(tensor.shape, dtype=tensor.dtype)

        def run(**given) -> Any:
            return functional_call(body, fakes, (), given)

        tokens = torch.zeros(1, _PROBE, dtype=torch.long)
        return _prefill(run, decoder.model_.config, tokens, "auto")


@torch.no_grad()
def replay_of(source) -> Replay:
    """Prepare a model for the replay of its routers' choices.

    Raises:
        UserError: the model cannot be sampled from in this process, or has no experts or unknown routers.
    """
    source.check_sampling()
    decoder = source.wrapped(source.empty_model(SLOTS)).eval()
    chosen = chosen_of(decoder.model_.config)  # type: ignore[union-attr]
    trial = Replay(decoder, chosen)
    name = type(source.model_).__name__
    if not trial.layers:
        raise UserError(
            f"router_replay is True, and {name} has no experts; set router_replay=False"
        )
    _fake_prefill(decoder, trial)
    if trial.counts != [1] * trial.layers:
        raise UserError(
            f"router_replay is True, and {name} does not choose experts with one topk in each layer; "
            "set router_replay=False"
        )
    return Replay(source, chosen)


@torch.no_grad()
def memory_of(source) -> SequenceMemory:
    """Return the memory of a sequence in a model, from a prefill on fake tensors.

    Raises:
        UserError: the model cannot be sampled from in this process; the message names it and the reason.
    """
    name = type(source.model_).__name__
    try:
        decoder = source.wrapped(source.empty_model(SLOTS)).eval()
        strangers, attended, found = remembered([_memory_of, decoder], lambda: _memory_of(decoder))
        memory = SequenceMemory(*found)
        if strangers:
            raise UserError("its cache is not that of transformers' interface")
        if len(memory.keys) > attended:
            raise UserError(_ATTENTION)
    except Exception as error:  # the model's code may raise anything
        # its code may not know this attention
        cause = _ATTENTION if SLOTS in str(error) else one_line(error)
        raise UserError(
            f"{name} cannot be sampled from in this process: {cause}; {_SERVER}"
        ) from error
    return memory._replace(scores=memory.scores or source.kernel in ("math", "eager"))


def _memory_of(decoder) -> tuple[int, int, SequenceMemory]:
    """Simulate a prefill: return the numbers of layers with an unknown cache and with attention, and the memory."""
    layers, prefill = _fake_prefill(decoder)
    keys = []
    states = unknown = 0
    most = 0  # numbers per position in the largest layer
    for layer in layers:
        has_state = any(getattr(layer, "has_previous_state", {}).values())
        if not has_state and not getattr(layer, "is_initialized", False):
            unknown += 1
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            size = (layer.keys.nbytes + layer.values.nbytes) // _PROBE  # type: ignore[union-attr]
            most = max(most, size // layer.keys.element_size())  # type: ignore[union-attr]
            window = getattr(layer, "sliding_window", None) if prefill.windows else None
            keys.append((size, window))
        if isinstance(layer, LinearAttentionLayer):
            for state in chain(layer.conv_states.values(), layer.recurrent_states.values()):
                states += 0 if state is None else state.nbytes
    memory = SequenceMemory(
        keys=keys,
        states=states,
        windows=prefill.windows,
        scores=prefill.scores,
        expanded=4 * prefill.read if prefill.read > most else 0,
        positions=min(decoder.max_seq_len, _short(decoder.body)),
    )
    return unknown, prefill.layers, memory


@torch.no_grad()
def obstacle_of(source) -> str:
    """Say why no graph can replay a decoding step. The text is empty if one can.

    A step on the meta device shows it. Tensors there have no values: in a graph no shape depends on values, and nothing
    is copied between host and device.
    """
    bare = source.wrapped(source.empty_model(SLOTS))
    vars(bare)["memory"] = source.memory
    for name, weight in source.named_parameters():
        if stays_quantized(weight):
            replace_parameter(bare, plain(name), frozen(weight.detach().to("meta")))

    def step() -> str:
        sampler = TransformersSampler(bare, False, torch.device("cuda"))
        sampler.fixed_shapes = True
        try:
            sampler.decoder.place_buffers(sampler.device)
            one_step(sampler, MIN_ROWS, _NoCopies())
        except Exception as error:  # the model's code may raise anything
            return f"a step of {type(source.model_).__name__} depends on values or needs the host ({one_line(error)})"
        return ""

    return remembered([obstacle_of, bare], step)


class _NoCopies(TorchDispatchMode):
    """Refuses copies between host and device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket.__name__ in ("_to_copy", "copy_"):
            devices = set()
            for leaf in tree_leaves((args, out)):
                if isinstance(leaf, Tensor):
                    devices.add(leaf.device.type)
            if len(devices) > 1:
                raise UserError(f"a copy between {' and '.join(sorted(devices))}")
        return out


@torch.no_grad()
def _weights(source, merge: bool) -> tuple[dict[str, Tensor], dict[str, SamplingLinear]]:
    """Return the copy's weights by name, and its layers that have an adapter."""
    linear = {}
    state = {}
    for name, layer in adapters(source):
        if isinstance(layer, Lora | Dora):
            linear[name] = SamplingLinear([layer], merge)
            for key, parameter in linear[name].named_parameters():
                state[f"{name}.{key}"] = parameter.detach()
    for wrapped, parameter in source.named_parameters():
        name = plain(wrapped)
        owner, _, _ = name.rpartition(".")
        if owner in linear or owner.endswith(_ADAPTED):
            continue
        weight = parameter.detach()
        state[name] = weight if stays_quantized(parameter) else dense(weight)
    for wrapped, buffer in persistent_buffers(source).items():
        state[plain(wrapped)] = buffer
    return state, linear


def _short(model: nn.Module) -> int:
    """Return the longest row whose rotations a cache can keep.

    In a longer row LongRoPE uses other frequencies for all positions, also for keys that the cache holds.
    """
    limit = 2**31
    module: Any
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            limit = min(limit, module.config.rope_parameters["original_max_position_embeddings"])
    return limit
