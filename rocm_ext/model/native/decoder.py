"""A decoder of torchtune's layers with LoRA, for Llama's and Qwen's dense models, and its copy that samples.

Models of a folder keep Hugging Face's row order, so weights and PEFT adapters only change their names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.peft import DoRALinear, LoRALinear

from rocm_ext.base.errors import UserError, nearest, refuse
from rocm_ext.data.batches import MicroBatch
from rocm_ext.model.attention import Lengths, SlotCache
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.families import Architecture, Rope
from rocm_ext.model.lora import Dora, Lora, Sizes, adapted_linear, dense, plain
from rocm_ext.model.names import LINEAR, OUTPUT, NativeNames, last_part
from rocm_ext.model.native.layers import Attention, HalvesRoPE, PrefixCache, Prompts
from rocm_ext.model.sampler import MIN_ROWS, Sampler, SamplingLinear, SequenceMemory, merges
from rocm_ext.model.token_rows import TokenRows, token_rows
from rocm_ext.model.weights.quantized import frozen

_ALL = "all-linear"


class NativeDecoder(TransformerDecoder, Decoder):
    """A decoder of torchtune's modules.

    Without ``names``, rows are not in Hugging Face's order, and torchtune's converters apply.
    """

    @property
    def packs(self) -> bool:  # type: ignore[override]
        """Whether it takes packed rows. Gemma 2's attention, for example, needs padded rows."""
        attentions = [getattr(layer, "attn", None) for layer in self.layers]
        return all(isinstance(attention, Attention) for attention in attentions)

    @property
    def shares(self) -> bool:  # type: ignore[override]
        return self.packs

    @property
    def kernel(self) -> str:
        return getattr(self.layers[0].attn, "kernel", "auto")  # type: ignore[union-attr, arg-type]

    @kernel.setter
    def kernel(self, kernel: str) -> None:
        for layer in self.layers:
            layer.attn.kernel = kernel  # type: ignore[union-attr, assignment]

    def hidden_states(self, batch: MicroBatch) -> Tensor:
        mask = Lengths(batch.lengths, batch.shared) if batch.lengths else None
        masks = [mask] * len(self.layers)
        return self.run(batch.tokens, batch.positions, masks)

    def run(self, tokens: Tensor, positions: Tensor, masks: Sequence[Any]) -> Tensor:
        """Run the model up to its output layer.

        Args:
            tokens: [b, s], or [n] in a step of sampling.
            positions: the tokens' positions in their sequences, shaped like ``tokens``.
            masks: one mask per layer; see :class:`rocm_ext.model.native.layers.Attention`.

        Returns:
            [b, s, d] or [n, d].
        """
        h = self.tok_embeddings(tokens)
        for layer, mask in zip(self.layers, masks, strict=True):
            h = layer(h, mask=mask, input_pos=positions)  # type: ignore[operator]
        return self.norm(h)  # type: ignore[operator]

    def place_buffers(self, device: torch.device) -> None:
        """Compute RoPE's tables on ``device``; layers with equal tables share them.

        torchtune keeps one table per layer: 3.7 GB for 28 layers at 131k positions.
        """
        shared: dict[Any, nn.Module] = {}
        for module in list(self.modules()):
            rope = getattr(module, "pos_embeddings", None)
            if rope is None or not hasattr(rope, "rope_init"):
                continue
            settings = [type(rope)]
            for item in vars(rope).items():
                if isinstance(item[1], int | float | str | None):
                    settings.append(item)
            module.pos_embeddings = shared.setdefault(tuple(settings), rope)
        # Llama's tables need real values
        with torch.device("cpu") if device.type == "meta" else device:
            for rope in shared.values():
                rope.rope_init()  # type: ignore[operator]
        for _, rows in token_rows(self):
            rows.ids = rows.ids.to(device)

    def joined_weights(self) -> list[list[str]]:
        groups = []
        for name, module in self.named_modules():
            kind = _joined_kind(module)
            if kind is not None:
                groups.append([f"{plain(name)}.{part}.weight" for part in kind.parts])
        return groups

    @property
    def transposes_tied(self) -> bool:
        return isinstance(self.output, TiedLinear)

    def transposed_weights(self) -> list[str]:
        names = []
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | LoRALinear | DoRALinear) and ".lora_" not in name:
                names.append(f"{plain(name)}.weight")
        return names

    def check_sampling(self) -> int:
        for layer in self.layers:
            attention = getattr(layer, "attn", None)
            if not isinstance(attention, Attention):
                raise UserError(
                    f"sampling from this model is not supported: it has attention {type(attention).__name__}. "
                    "Sample on a server: engine._component_=rocm_ext.sampling.OpenAIEngine"
                )
        return self.max_seq_len

    def sampler(
        self, merge: bool | None = None, device: torch.device | None = None
    ) -> "NativeSampler":
        self.check_sampling()
        return NativeSampler(self, merge)


def native(theirs: TransformerDecoder) -> NativeDecoder:
    """Make a :class:`NativeDecoder` from torchtune's decoder; its parts keep their names and weights."""
    if isinstance(theirs, NativeDecoder):
        return theirs
    for layer in theirs.layers:
        if type(getattr(layer, "attn", None)) is MultiHeadAttention:
            layer.attn = Attention.of(layer.attn)  # type: ignore[arg-type]
            rope = layer.attn.pos_embeddings
            # ours rotates the same, bit for bit, in fewer kernels
            if type(rope) is Qwen2RotaryPositionalEmbeddings:
                with rope.cache.device:
                    made = HalvesRoPE(rope.dim, rope.max_seq_len, Rope(rope.base))
                layer.attn.pos_embeddings = made
    names = ("tok_embeddings", "layers", "max_seq_len", "num_heads", "head_dim", "norm", "output")
    parts = {name: getattr(theirs, name) for name in names}
    return NativeDecoder(**parts).train(theirs.training)


def build(
    architecture: Architecture,
    targets: Iterable[str] | str | None,
    kind: partial[nn.Module],
    sizes: Sizes,
) -> NativeDecoder:
    """Build a decoder with LoRA; for arguments see :func:`rocm_ext.model.from_checkpoint`.

    ``kind`` is torchtune's class of adapted layers, with its dropout and quantisation.

    Raises:
        UserError: the model lacks a layer of ``targets`` or of a pattern in ``sizes``.
    """
    names = _targets(targets, architecture.tied)
    return _Builder(architecture, names, kind, sizes).decoder()


def _targets(given: Iterable[str] | str | None, tied: bool) -> frozenset[str]:
    if given is None or given == _ALL:
        return frozenset(LINEAR)
    listed = [given] if isinstance(given, str) else given
    names = frozenset(map(str, listed))
    known = [*LINEAR, OUTPUT]
    refuse(
        f"target_modules has {name!r}, which is no layer{nearest(name, known)}"
        for name in sorted(names - {*known})
    )
    if not names:
        raise UserError(f"target_modules is empty; expected {_ALL} or some of {', '.join(known)}")
    if tied and OUTPUT in names:
        raise UserError(
            f"target_modules has {OUTPUT}, but the model's output layer is its embeddings"
        )
    return names


@dataclass
class _Builder:
    """Builds the modules of one decoder; ``adapted`` gets the published names of the adapted layers."""

    architecture: Architecture
    targets: frozenset[str]
    kind: partial[nn.Module]
    sizes: Sizes
    adapted: list[str] = field(default_factory=list)

    def decoder(self) -> NativeDecoder:
        a = self.architecture
        embeddings = nn.Embedding(a.vocabulary, a.width)
        output: Any = TiedLinear(embeddings)
        if not a.tied:
            output = self._linear(OUTPUT, a.width, a.vocabulary)
        layers = [self._layer(f"model.layers.{i}") for i in range(a.layers)]
        decoder = NativeDecoder(
            tok_embeddings=embeddings,
            layers=nn.ModuleList(layers),
            max_seq_len=a.positions,
            num_heads=a.heads,
            head_dim=a.head_dim,
            norm=self._norm(a.width),
            output=output,
        )
        self.sizes.check_keys(self.adapted)
        decoder.architecture = a
        decoder.names = NativeNames()
        return decoder

    def _layer(self, name: str) -> TransformerSelfAttentionLayer:
        a = self.architecture
        mlp = FeedForward(
            gate_proj=self._linear(f"{name}.mlp.gate_proj", a.width, a.intermediate),
            up_proj=self._linear(f"{name}.mlp.up_proj", a.width, a.intermediate),
            down_proj=self._linear(f"{name}.mlp.down_proj", a.intermediate, a.width),
        )
        return TransformerSelfAttentionLayer(
            attn=self._attention(f"{name}.self_attn"),
            mlp=mlp,
            sa_norm=self._norm(a.width),
            mlp_norm=self._norm(a.width),
        )

    def _attention(self, name: str) -> Attention:
        a = self.architecture
        wide = a.heads * a.head_dim
        narrow = a.kv_heads * a.head_dim
        attention = Attention(
            embed_dim=a.width,
            num_heads=a.heads,
            num_kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            q_proj=self._linear(f"{name}.q_proj", a.width, wide, a.qkv_bias),
            k_proj=self._linear(f"{name}.k_proj", a.width, narrow, a.qkv_bias),
            v_proj=self._linear(f"{name}.v_proj", a.width, narrow, a.qkv_bias),
            output_proj=self._linear(f"{name}.o_proj", wide, a.width, a.out_bias),
            pos_embeddings=HalvesRoPE(a.head_dim, a.positions, a.rope),
            q_norm=self._norm(a.head_dim) if a.head_norms else None,
            k_norm=self._norm(a.head_dim) if a.head_norms else None,
            max_seq_len=a.positions,
            attn_dropout=a.attention_dropout,
        )
        attention.norms_first = a.head_norms
        return attention

    def _norm(self, width: int) -> RMSNorm:
        return RMSNorm(width, eps=self.architecture.norm_eps)

    def _linear(self, name: str, width: int, out: int, bias: bool = False) -> nn.Module:
        if last_part(name) not in self.targets:
            return nn.Linear(width, out, bias=bias)
        self.adapted.append(name)
        kind = self.kind
        if name == OUTPUT:  # torchtune keeps output layers in 16 bits
            kind = partial(kind, quantize_base=False)
        return adapted_linear(kind, self.sizes, name, width, out, bias)


# ---- the copy that samples


class NativeSampler(Sampler):
    """Forward passes of a :class:`NativeDecoder`; for ``merge`` see :func:`rocm_ext.model.sampler.sampler_of`."""

    splits_rows = True
    mask_bytes = 10

    @torch.no_grad()
    def __init__(self, source, merge: bool | None) -> None:
        copies = _Copies(merges(source, merge))
        decoder = copies.of(source)
        attention = _bare(source.layers[0]).attn
        dtype = decoder.tok_embeddings.weight.dtype
        size = 2 * attention.num_kv_heads * attention.head_dim * dtype.itemsize
        memory = SequenceMemory(
            keys=[(size, None)] * len(source.layers),
            states=0,
            windows=False,
            scores=source.kernel in ("math", "eager"),
            expanded=0,
            positions=source.max_seq_len,
        )
        tied = isinstance(source.output, TiedLinear)
        super().__init__(decoder, copies.adapted, memory, attention.num_heads, tied)

    @property
    def bytes_per_row(self) -> int:
        """Bytes that a pass holds at once for one token, in addition to the cache.

        The larger of two parts: attention holds its input, q, k and v, a sequence's k and v with a copy per query head,
        and its output; the MLP holds attention's result, gate, up, the activation, and one more tensor.
        """
        layer = self.decoder.layers[0]
        width, wide = layer.mlp.w2.weight.shape
        q = layer.attn.num_heads * layer.attn.head_dim
        k = layer.attn.num_kv_heads * layer.attn.head_dim
        of_attention = 3 * width + 5 * q + 2 * k
        of_mlp = 4 * width + 4 * wide
        return max(of_attention, of_mlp) * self.dtype.itemsize

    def prefill_bytes(self, prompts: Sequence[int], most: int) -> int:
        longest = max(prompts)
        rows = max(min(most, sum(prompts)), longest)
        scores = longest**2 * self._score_bytes
        return int(rows * (self.cache_bytes(1) + self.bytes_per_row)) + scores

    def new_cache(self, slots: int, length: int) -> SlotCache:
        cache = SlotCache(len(self.decoder.layers), slots, length)
        attention = self.decoder.layers[0].attn
        shape = 1, attention.num_kv_heads, 1, attention.head_dim
        row = torch.empty(shape, dtype=self.dtype, device=self.device)
        for layer in cache.layers:
            layer.lazy_initialization(row, row)
        return cache

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[PrefixCache]:
        """Compute the keys and values of ``prompts``, packed end to end."""
        sequences = [list(prompt) for prompt in prompts]
        padding = MIN_ROWS - sum(map(len, sequences))
        if padding > 0:
            sequences.append([0] * padding)
        lengths = [len(sequence) for sequence in sequences]
        tokens = []
        positions: list[int] = []
        for sequence in sequences:
            tokens += sequence
            positions += range(len(sequence))
        packed = torch.tensor([tokens, positions], device=self.device)  # [2, s]
        caches = [PrefixCache() for _ in prompts]
        masks = [Prompts(lengths, caches)] * len(self.decoder.layers)
        self.decoder.run(packed[:1], packed[1:], masks)
        return caches

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: SlotCache, span: int) -> Tensor:
        cache.begin(positions, span)
        hidden = self.decoder.run(tokens, positions, cache.layers)
        return self.decoder.output(hidden)


def _bare(module) -> Any:
    """Return ``module`` without the wrappers of checkpointing and of torch.compile."""
    for wrapper in ("_checkpoint_wrapped_module", "_orig_mod"):
        module = getattr(module, wrapper, module)
    return module


class SamplingAttention(Attention):
    """Attention with one product for q, k and v."""

    parts = ("q_proj", "k_proj", "v_proj")
    joined: SamplingLinear

    def project(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """As in the base class; q and k are one tensor unless they have norms."""
        qkv = self.split_heads(self.joined(x))  # [..., heads + 2 kv_heads, head_dim]
        heads = self.num_heads
        kv_heads = self.num_kv_heads
        if self.q_norm is None:
            qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), dim=-2)
            return [qk], v
        q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=-2)
        return [q, k], v


class SamplingMLP(FeedForward):
    """MLP with one product for gate and up."""

    parts = ("w1", "w3")
    joined: SamplingLinear

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        gate, up = self.joined(x).chunk(2, dim=-1)
        return self.w2(self.activation(gate) * up)


def _joined_kind(module: nn.Module) -> Any:
    """Return the class of a module's copy that has one product for several linear layers, if it has one."""
    if type(module) is Attention:
        return SamplingAttention
    if type(module) is FeedForward and module.w3 is not None:
        return SamplingMLP
    return None


class _Copies:
    """Copies of modules that share their weights, with linear layers for sampling.

    Args:
        merge: add the adapters' updates to the weights.

    Attributes:
        adapted: pairs of copies and layers, for layers with adapters and rows of tokens.
    """

    def __init__(self, merge: bool) -> None:
        self._merge = merge
        self._made: dict[Any, Any] = {}
        self.adapted: list[tuple[Any, list[Any]]] = []

    def of(self, module) -> Any:
        """Return the copy of ``module``, with copies of its parts."""
        module = _bare(module)
        if module not in self._made:
            self._made[module] = self._new(module)
        return self._made[module]

    def _new(self, module) -> Any:
        made: Any
        if isinstance(module, TiedLinear | nn.Linear | LoRALinear | DoRALinear):
            if isinstance(module, TiedLinear):
                made = SamplingLinear([self.of(module.tied_module)], False, transpose=True)
            else:
                made = self._linear([module])
            if hasattr(module, TokenRows.NAME):
                made.rows = self.of(module.token_rows)
            return made
        if isinstance(module, TokenRows):
            made = module.copy()
            self.adapted.append((made, [module]))
            return _quick(made, made._parameters, made._buffers)
        if type(module) is nn.SiLU:
            return _SteadySiLU()
        # without the constructor, and without hooks of FSDP and others
        kind = _joined_kind(module)
        made = object.__new__(_without_hooks(kind or type(module)))  # type: ignore[arg-type]
        vars(made).update(vars(module) | vars(nn.Module()))
        vars(made)["training"] = False
        made._buffers = dict(module._buffers)
        made._parameters = dict(module._parameters)
        for name, parameter in made._parameters.items():
            if parameter is not None:
                made._parameters[name] = frozen(dense(parameter.detach()))
        parts = getattr(kind, "parts", ())
        made._modules = {}
        for name, child in module._modules.items():
            if name not in parts:
                made._modules[name] = self.of(child)
        if parts:
            layers = [_bare(getattr(module, part)) for part in parts]
            made._modules["joined"] = self._linear(layers)
        for name, value in vars(module).items():
            if isinstance(value, TiedLinear):  # it is no module
                vars(made)[name] = self.of(value)
        return _quick(made, made._modules, made._parameters)

    def _linear(self, layers: list[Any]) -> SamplingLinear:
        linear = SamplingLinear(layers, self._merge, transpose=True)
        _quick(linear, linear._parameters)
        if any(isinstance(layer, Lora | Dora) for layer in layers):
            self.adapted.append((linear, layers))
        return linear


def _quick(module: nn.Module, *parts: Mapping[str, object]) -> nn.Module:
    """Return ``module`` with ``parts`` as plain attributes, which Python looks up faster."""
    for named in parts:
        vars(module).update(named)
    return module


@cache
def _without_hooks(kind) -> type:
    """Return a subclass of ``kind`` whose calls go straight to ``forward``."""
    return type(kind.__name__, (kind,), {"__call__": kind.forward})


class _SteadySiLU(nn.Module):
    """SiLU that rounds the same in any batch.

    On CPUs torch's SiLU rounds differently at the end of a thread's share, and the shares depend on the batch. exp
    rounds the same everywhere.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        if x.is_cuda or x.dtype != torch.float32:
            return F.silu(x)
        return x / (1 + torch.exp(-x))

    __call__ = forward
