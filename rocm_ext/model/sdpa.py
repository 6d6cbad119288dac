"""Attention of one sequence by the kernel that the key ``attention`` names."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from rocm_ext.base.errors import UserError
from rocm_ext.machine.numerics import SDPA_KERNELS

_NO_KERNEL = ("No available kernel", "No viable backend")  # what torch says on GPUs, and on CPUs


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: str,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with one of torch's kernels, or with its scores in memory.

    Args:
        q: [n, heads, queries, head_dim].
        k, v: [n, heads, keys, head_dim].
        kernel: auto: torch chooses; flash, efficient and math: this kernel of torch's; eager: plain matrix products in
            the dtype of q, where math computes in fp32. A GPU's flash kernel takes no masks: with one, torch chooses.
        mask: True where a query attends, or 0 there and -inf elsewhere; it broadcasts to [n, heads, queries, keys].
            None: causal.
        dropout: probability on attention weights.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        softcap: Gemma 2's c in ``c tanh(score / c)``.
        sinks: scores without values (gpt-oss); they broadcast to [n, heads, queries, 1].

    Returns:
        [n, heads, queries, head_dim].

    Raises:
        UserError: torch has no such kernel for these tensors, or none of its kernels computes capped scores or sinks.
    """
    plain = softcap is None and sinks is None
    if not plain and kernel not in ("auto", "eager"):
        raise UserError(
            "attention: no kernel of torch's computes this model's capped scores or sinks; set attention: eager"
        )
    if kernel == "eager" or not plain:
        return _by_scores(q, k, v, _allowed(q, k, mask), dropout, scale, softcap, sinks)
    if kernel == "flash" and mask is not None and q.device.type != "cpu":
        kernel = "auto"
    if kernel not in SDPA_KERNELS:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale
        )
    try:
        with sdpa_kernel(SDPA_KERNELS[kernel]):
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale
            )
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_KERNEL):
            raise
        dtype = str(q.dtype).removeprefix("torch.")
        raise UserError(
            f"attention: torch has no {kernel} kernel for {dtype} and head_dim {q.shape[-1]} on this "
            f"{'CPU' if q.device.type == 'cpu' else 'GPU'}; set attention: auto"
        ) from error


def _allowed(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return mask if mask.dtype == torch.bool else mask == 0


def _by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return F.dropout(weights, dropout) @ v


def check_kernel(kernel: str, device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int) -> None:
    """Run ``kernel`` on a small causal input.

    Args:
        kernel: see :func:`sdpa`.
        device, dtype, num_heads, head_dim: of the model.

    Raises:
        UserError: torch has no such kernel for this device, dtype and head_dim.
    """
    q = torch.zeros(1, num_heads, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # torch warns once for each reason that a kernel cannot run
        sdpa(q, q, q, kernel)
