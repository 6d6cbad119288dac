"""Build a torchtune decoder with LoRA from a folder in Hugging Face's format.

Weights keep Hugging Face's row order in every family, so they and PEFT adapters only change their names.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.modules.peft import DoRALinear, LoRALinear

from rocm_ext.base.errors import UserError, nearest, one_line
from rocm_ext.base.log import log
from rocm_ext.model.attention import HeadNormAttention
from rocm_ext.model.families import Architecture, foreign_config, read_architecture
from rocm_ext.model.names import LINEAR
from rocm_ext.model.rope import HalvesRoPE

_OUTPUT, _ALL = "lm_head", "all-linear"


class NativeDecoder(TransformerDecoder):
    """A torchtune decoder whose weights have the rows of Hugging Face's files.

    Attributes:
        architecture: what it computes, but for its weights.
    """

    architecture: Architecture


def from_checkpoint(
    checkpoint_dir: str,
    lora_rank: int = 16,
    lora_alpha: float = 32,
    lora_dropout: float = 0.0,
    target_modules: Iterable[str] | str | None = None,
    target_parameters: Iterable[str] | str | None = None,
    use_dora: bool = False,
    quantize_base: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """Build the model of a folder with LoRA, for a config's ``model:``.

    Only ``config.json`` is read. The other arguments are those of torchtune's LoRA builders. An architecture without a
    native decoder is built by transformers.

    Args:
        checkpoint_dir: folder in Hugging Face's format.
        lora_rank: r.
        lora_alpha: alpha.
        lora_dropout: dropout probability on the adapters' input.
        target_modules: layers to adapt, by PEFT's names (``q_proj``, ``down_proj``, …, ``lm_head``); None or
            ``all-linear``: all linear layers of attention and MLP.
        target_parameters: fused weights of experts to adapt, by PEFT's names (``experts.gate_up_proj``,
            ``experts.down_proj``); ``all-experts``: all of them; None: none.
        use_dora: DoRA instead of LoRA.
        quantize_base: keep adapted layers' weights in 4 bits (NF4).
        trust_remote_code: run Python code of the folder where the model's architecture is not transformers' own. This
            code may do all that you may do on this machine; read it first.

    Raises:
        UserError: the folder has no such model, or ``target_modules`` or ``target_parameters`` names what it does not
            have.
    """
    folder = Path(checkpoint_dir)
    if (foreign := foreign_config(folder, trust_remote_code)) is not None:
        return _by_transformers(foreign)(
            folder,
            foreign,
            rank=lora_rank,
            alpha=lora_alpha,
            dropout=lora_dropout,
            targets=target_modules,
            parameters=target_parameters,
            use_dora=use_dora,
            quantize_base=quantize_base,
            trust_remote_code=trust_remote_code,
        )
    architecture = read_architecture(folder)
    if target_parameters is not None:
        raise UserError(f"target_parameters is {target_parameters}, but {architecture.name} has no experts")
    if architecture.window:
        log.info("%s: at most %s positions, its sliding window", checkpoint_dir, f"{architecture.positions:,}")
    kind = DoRALinear if use_dora else LoRALinear
    adapted = partial(kind, rank=lora_rank, alpha=lora_alpha, dropout=lora_dropout)
    targets = _targets(target_modules, architecture.tied)
    return _Builder(architecture, targets, adapted, quantize_base).decoder()


def _by_transformers(config: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the builder of transformers' models.

    Raises:
        UserError: transformers is not installed, or another major version.
    """
    try:
        from rocm_ext.model.transformers.decoder import build
    except ImportError as error:
        name = (config.get("architectures") or [config.get("model_type")])[0]
        raise UserError(
            f"{name} has no decoder of this library's own; transformers' runs with the extra: "
            f"pip install 'torchtune-rocm[transformers]' ({one_line(error)})"
        ) from error
    return build


def _targets(given: Iterable[str] | str | None, tied: bool) -> frozenset[str]:
    if given is None or given == _ALL:
        return frozenset(LINEAR)
    names = frozenset([given] if isinstance(given, str) else map(str, given))
    known = [*LINEAR, _OUTPUT]
    for name in sorted(names.difference(known)):
        raise UserError(f"target_modules has {name!r}, which is no layer{nearest(name, known)}")
    if not names:
        raise UserError(f"target_modules is empty; expected {_ALL} or some of {', '.join(known)}")
    if tied and _OUTPUT in names:
        raise UserError(f"target_modules has {_OUTPUT}, but the model's output layer is its embeddings")
    return names


class _Builder:
    """Builds the modules of one decoder."""

    def __init__(self, architecture: Architecture, targets: frozenset[str], adapted, quantize_base: bool) -> None:
        self.architecture, self._targets, self._adapted, self._4bit = architecture, targets, adapted, quantize_base

    def decoder(self) -> NativeDecoder:
        a = self.architecture
        embeddings = nn.Embedding(a.vocabulary, a.width)
        if a.tied:
            output = TiedLinear(embeddings)
        elif _OUTPUT in self._targets:
            output = self._adapted(a.width, a.vocabulary)  # torchtune keeps output layers in 16 bits
        else:
            output = nn.Linear(a.width, a.vocabulary, bias=False)
        decoder = NativeDecoder(
            tok_embeddings=embeddings,
            layers=nn.ModuleList(self._layer() for _ in range(a.layers)),
            max_seq_len=a.positions,
            num_heads=a.heads,
            head_dim=a.head_dim,
            norm=self._norm(a.width),
            output=output,
        )
        decoder.architecture = a
        return decoder

    def _layer(self) -> TransformerSelfAttentionLayer:
        a = self.architecture
        mlp = FeedForward(
            gate_proj=self._linear("gate_proj", a.width, a.intermediate),
            up_proj=self._linear("up_proj", a.width, a.intermediate),
            down_proj=self._linear("down_proj", a.intermediate, a.width),
        )
        return TransformerSelfAttentionLayer(
            attn=self._attention(), mlp=mlp, sa_norm=self._norm(a.width), mlp_norm=self._norm(a.width)
        )

    def _attention(self) -> MultiHeadAttention:
        a = self.architecture
        wide, narrow = a.heads * a.head_dim, a.kv_heads * a.head_dim
        kind = HeadNormAttention if a.head_norms else MultiHeadAttention
        return kind(
            embed_dim=a.width,
            num_heads=a.heads,
            num_kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            q_proj=self._linear("q_proj", a.width, wide, a.qkv_bias),
            k_proj=self._linear("k_proj", a.width, narrow, a.qkv_bias),
            v_proj=self._linear("v_proj", a.width, narrow, a.qkv_bias),
            output_proj=self._linear("o_proj", wide, a.width, a.out_bias),
            pos_embeddings=HalvesRoPE(a.head_dim, a.positions, a.rope),
            q_norm=self._norm(a.head_dim) if a.head_norms else None,
            k_norm=self._norm(a.head_dim) if a.head_norms else None,
            max_seq_len=a.positions,
            attn_dropout=a.attention_dropout,
        )

    def _norm(self, width: int) -> RMSNorm:
        return RMSNorm(width, eps=self.architecture.norm_eps)

    def _linear(self, name: str, width: int, out: int, bias: bool = False) -> nn.Module:
        if name not in self._targets:
            return nn.Linear(width, out, bias=bias)
        return self._adapted(width, out, use_bias=bias, quantize_base=self._4bit)
