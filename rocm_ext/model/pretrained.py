"""The model of a folder in Hugging Face's format, with LoRA: ``config.json`` decides which decoder builds it."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.kinds import check, integer
from rocm_ext.base.log import log
from rocm_ext.config.checks.training import PATTERNS
from rocm_ext.model.families import ModelConfig, foreign_config, read_architecture, stored_format


def from_checkpoint(
    checkpoint_dir: str,
    lora_rank: int = 16,
    lora_alpha: float = 32,
    lora_dropout: float = 0.0,
    target_modules: Iterable[str] | str | None = None,
    target_parameters: Iterable[str] | str | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    trainable_tokens: Any = None,
    use_dora: bool = False,
    quantize_base: bool | str = False,
    trust_remote_code: bool = False,
) -> Any:
    """Build the model of a folder with LoRA, for a config's ``model:``.

    The arguments resemble those of torchtune's LoRA builders. transformers builds architectures without a native
    decoder.

    Args:
        checkpoint_dir: folder in Hugging Face's format.
        lora_rank: r.
        lora_alpha: alpha.
        lora_dropout: dropout probability on the adapters' input.
        target_modules: layers to adapt, by PEFT's names (``q_proj``, ``down_proj``, …, ``lm_head``); None or
            ``all-linear``: all linear layers of attention and MLP.
        target_parameters: fused weights of experts to adapt, by PEFT's names (``experts.gate_up_proj``,
            ``experts.down_proj``); ``all-experts`` means all of them, None none.
        rank_pattern, alpha_pattern: exceptions from ``lora_rank`` and ``lora_alpha``, by ends of layers' names or
            regular expressions, as in PEFT; see :class:`rocm_ext.model.lora.Sizes`.
        trainable_tokens: tokens, as texts of the folder's tokenizer or ids, with trained rows in the embeddings and
            the output layer; ``{embed_tokens: […], lm_head: […]}`` gives the two layers different tokens. PEFT calls
            them ``trainable_token_indices``.
        use_dora: DoRA instead of LoRA.
        quantize_base: ``nf4`` or True: keep adapted layers' weights in 4 bits (NF4); ``fp8``: keep the layers' linear
            parts and experts in 8 bits, with one scale per row.
        trust_remote_code: run the folder's Python code if transformers does not have the architecture. This code may
            do all that you may do on this machine; read it first.

    Raises:
        UserError: the folder has no such model, or the model lacks a layer, parameter or token that an argument names.
    """
    # here, because a config's check reads the arguments alone, and torchtune's modules take a second
    from torchtune.modules.peft import DoRALinear, LoRALinear

    from rocm_ext.model.lora import Sizes
    from rocm_ext.model.native.decoder import build
    from rocm_ext.model.token_rows import train_tokens
    from rocm_ext.model.weights.checkpointer import blocks_in
    from rocm_ext.model.weights.quantized import FP8_ROWS, expect, expect_blocks

    given = {"lora_rank": lora_rank, "rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern}
    check(given, {"lora_rank": integer(1, 2**16), **PATTERNS}, "model.")
    named = [target_parameters] if isinstance(target_parameters, str) else target_parameters or ()
    sizes = Sizes(
        rank=lora_rank,
        alpha=lora_alpha,
        rank_pattern=rank_pattern or {},
        alpha_pattern=alpha_pattern or {},
        parameters=tuple(map(str, named)),
    )
    folder = Path(checkpoint_dir)
    form = stored_format(folder)
    blocks = blocks_in(folder)
    if (form or blocks) and quantize_base:
        raise UserError(
            f"quantize_base is {quantize_base}, but the weights in {folder} are quantised "
            f"({form.kind if form else 'GGUF'}) and stay so; set quantize_base: False"
        )
    if blocks and trainable_tokens is not None:
        raise UserError(
            f"trainable_tokens is set, but the weights in {folder} are a GGUF file's, into which no rows are merged; "
            "train from the model's weights in 16 bits"
        )
    if target_parameters is not None and use_dora:
        raise UserError(
            "target_parameters works with LoRA, not with DoRA, as in PEFT; set use_dora=False"
        )
    if target_parameters is not None and lora_dropout:
        raise UserError(
            "target_parameters works only without dropout, as in PEFT; set lora_dropout=0.0"
        )
    fp8 = quantize_base == "fp8"
    if fp8:
        form = FP8_ROWS
    kind = partial(
        DoRALinear if use_dora else LoRALinear,
        dropout=lora_dropout,
        quantize_base=bool(quantize_base) and not fp8,
    )
    foreign = foreign_config(folder, trust_remote_code)
    if foreign is not None:
        decoder = _by_transformers(foreign)(
            folder, foreign, kind, sizes, target_modules, target_parameters, trust_remote_code
        )
    else:
        architecture = read_architecture(folder)
        if target_parameters is not None:
            raise UserError(
                f"target_parameters is {target_parameters}, but {architecture.name} has no experts"
            )
        if architecture.window:
            positions = f"{architecture.positions:,}"
            log.info("%s: at most %s positions, its sliding window", checkpoint_dir, positions)
        decoder = build(architecture, target_modules, kind, sizes)
    if trainable_tokens is not None:
        train_tokens(decoder, trainable_tokens, folder)
    if blocks:
        return expect_blocks(decoder, blocks)
    return expect(decoder, form, quantizes=fp8)


def _by_transformers(config: ModelConfig) -> Callable[..., Any]:
    """Return the builder of transformers' models; refuse a missing transformers, or another major version."""
    try:
        from rocm_ext.model.hf.decoder import build as by_transformers
    except ImportError as error:
        name = (config.get("architectures") or [config.get("model_type")])[0]
        raise UserError(
            f"{name} has no decoder of this library's own; transformers' runs with the extra: "
            f"pip install 'torchtune-rocm[transformers]' ({one_line(error)})"
        ) from error
    return by_transformers
