"""A decoder of torchtune's layers with LoRA, for Llama's and Qwen's dense models.

Models of a folder keep Hugging Face's row order, so weights and PEFT adapters only change their names.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
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

from rocm_ext.base.errors import UserError, nearest, refuse
from rocm_ext.data.batches import MicroBatch
from rocm_ext.model.attention import Lengths
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.families import LINEAR, Architecture, Rope, from_hf, to_hf
from rocm_ext.model.lora import Sizes, adapted_linear, plain
from rocm_ext.model.native.layers import Attention, HalvesRoPE
from rocm_ext.model.native.sampler import NativeSampler, joined_kind
from rocm_ext.model.token_rows import token_rows

_OUTPUT, _ALL = "lm_head", "all-linear"


class NativeDecoder(TransformerDecoder, Decoder):
    """A decoder of torchtune's modules.

    Without ``renames``, rows are not in Hugging Face's order, and torchtune's converters apply.
    """

    @property
    def packs(self) -> bool:  # type: ignore[override]
        """Whether it takes packed rows. Gemma 2's attention, for example, needs padded rows."""
        return all(isinstance(getattr(layer, "attn", None), Attention) for layer in self.layers)

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
        return self.run(batch.tokens, batch.positions, [mask] * len(self.layers))

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
            plain = {k: v for k, v in vars(rope).items() if isinstance(v, int | float | str | bool | type(None))}
            key = (type(rope), tuple(sorted(plain.items(), key=lambda item: item[0])))
            module.pos_embeddings = shared.setdefault(key, rope)
        # Llama's tables need real values
        with torch.device("cpu") if device.type == "meta" else device:
            for rope in shared.values():
                rope.rope_init()  # type: ignore[operator]
        for _, rows in token_rows(self):
            rows.ids = rows.ids.to(device)

    def joined_weights(self) -> list[list[str]]:
        return [
            [f"{plain(name)}.{part}.weight" for part in kind.parts]
            for name, module in self.named_modules()
            if (kind := joined_kind(module)) is not None
        ]

    def check_sampling(self) -> int:
        for layer in self.layers:
            attention = getattr(layer, "attn", None)
            if not isinstance(attention, Attention):
                raise UserError(
                    f"sampling from this model is not supported: it has attention {type(attention).__name__}. "
                    "Sample on a server: engine._component_=rocm_ext.sampling.OpenAIEngine"
                )
        return self.max_seq_len

    def sampler(self, merge: bool | None = None, device: torch.device | None = None) -> NativeSampler:
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
            if type(rope) is Qwen2RotaryPositionalEmbeddings:  # ours rotates the same, bit for bit, in fewer kernels
                with rope.cache.device:
                    layer.attn.pos_embeddings = HalvesRoPE(rope.dim, rope.max_seq_len, Rope(rope.base))
    names = ("tok_embeddings", "layers", "max_seq_len", "num_heads", "head_dim", "norm", "output")
    return NativeDecoder(**{name: getattr(theirs, name) for name in names}).train(theirs.training)


def build(
    architecture: Architecture, targets: Iterable[str] | str | None, kind: Any, sizes: Sizes, quantize_base: bool
) -> NativeDecoder:
    """Build a decoder with LoRA; for arguments see :func:`rocm_ext.model.from_checkpoint`.

    ``kind`` is torchtune's class of adapted layers, with its dropout.

    Raises:
        UserError: the model lacks a layer of ``targets`` or of a pattern in ``sizes``.
    """
    return _Builder(architecture, _targets(targets, architecture.tied), kind, sizes, quantize_base).decoder()


def _targets(given: Iterable[str] | str | None, tied: bool) -> frozenset[str]:
    if given is None or given == _ALL:
        return frozenset(LINEAR)
    names = frozenset([given] if isinstance(given, str) else map(str, given))
    known = [*LINEAR, _OUTPUT]
    refuse(f"target_modules has {name!r}, which is no layer{nearest(name, known)}" for name in sorted(names - {*known}))
    if not names:
        raise UserError(f"target_modules is empty; expected {_ALL} or some of {', '.join(known)}")
    if tied and _OUTPUT in names:
        raise UserError(f"target_modules has {_OUTPUT}, but the model's output layer is its embeddings")
    return names


class _Builder:
    """Builds the modules of one decoder."""

    def __init__(
        self, architecture: Architecture, targets: frozenset[str], kind, sizes: Sizes, quantize_base: bool
    ) -> None:
        self.architecture, self._targets, self._kind, self._sizes = architecture, targets, kind, sizes
        self._4bit, self._adapted = quantize_base, list[str]()  # published names of the adapted layers

    def decoder(self) -> NativeDecoder:
        a = self.architecture
        embeddings = nn.Embedding(a.vocabulary, a.width)
        output = TiedLinear(embeddings) if a.tied else self._linear(_OUTPUT, a.width, a.vocabulary)
        decoder = NativeDecoder(
            tok_embeddings=embeddings,
            layers=nn.ModuleList(self._layer(f"model.layers.{i}") for i in range(a.layers)),
            max_seq_len=a.positions,
            num_heads=a.heads,
            head_dim=a.head_dim,
            norm=self._norm(a.width),
            output=output,
        )
        self._sizes.check_keys(self._adapted)
        decoder.architecture, decoder.renames = a, (to_hf, from_hf)
        return decoder

    def _layer(self, name: str) -> TransformerSelfAttentionLayer:
        a = self.architecture
        mlp = FeedForward(
            gate_proj=self._linear(f"{name}.mlp.gate_proj", a.width, a.intermediate),
            up_proj=self._linear(f"{name}.mlp.up_proj", a.width, a.intermediate),
            down_proj=self._linear(f"{name}.mlp.down_proj", a.intermediate, a.width),
        )
        norms = {"sa_norm": self._norm(a.width), "mlp_norm": self._norm(a.width)}
        return TransformerSelfAttentionLayer(attn=self._attention(f"{name}.self_attn"), mlp=mlp, **norms)

    def _attention(self, name: str) -> Attention:
        a = self.architecture
        wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
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
        if name.rpartition(".")[2] not in self._targets:
            return nn.Linear(width, out, bias=bias)
        self._adapted.append(name)
        four_bits = self._4bit and name != _OUTPUT  # torchtune keeps output layers in 16 bits
        return adapted_linear(partial(self._kind, quantize_base=four_bits), self._sizes, name, width, out, bias)
