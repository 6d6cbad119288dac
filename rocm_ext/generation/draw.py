"""From logits to tokens: every draw depends on its row's logits, seed and position alone.

One uniform number per token, from a hash of seed and position, is looked up in the row's cumulative
distribution. ``torch.multinomial`` would draw from a generator that all rows share, so that a sample
would depend on what else was in the batch.
"""

import torch
from torch import Tensor

from rocm_ext.generation.base import Sampling

_BLOCK = 512  # tokens whose weights are summed before they are searched
_NUCLEUS = 1024  # most probable tokens that hold top_p nearly always


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """[n] fp64 in [0, 1): number ``positions`` of the stream of each of ``seeds`` (int64 [n] both).

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), which reaches any place of a stream at once.
    """
    z = seeds + (positions + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15; int64 wraps around
    z = (z ^ _shift(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return _shift(z ^ _shift(z, 31), 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # torch's >> keeps the sign


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [n, v].
        uniform: [n] in [0, 1), fp64.
        sampling: temperature and truncation: first top_k, then top_p of what is left, then min_p, as in
            transformers. Tokens as probable as the last one allowed are allowed too.

    Returns:
        tokens [n], int64, and their log-probs [n], fp32, under the unmodified distribution.
    """
    logits = logits.float()
    peak = logits.amax(-1, keepdim=True)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, _log_probs(logits, peak, tokens, (logits - peak).exp_().sum(-1))
    weights = (logits - peak).exp_()
    total = weights.sum(-1)
    if sampling.temperature != 1:
        weights = ((logits - peak) / sampling.temperature).exp_()
    tokens = _search(_truncate(weights, sampling), uniform)
    return tokens, _log_probs(logits, peak, tokens, total)


def draw_bytes(sampling: Sampling, itemsize: int, vocabulary: int) -> int:
    """The most bytes that :func:`draw` holds for each logit of ``itemsize`` bytes, that one included."""
    logits = itemsize if itemsize == 4 else itemsize + 4
    more = [4 if vocabulary % _BLOCK else 0]  # beside one copy, the weights
    if sampling.temperature not in (0, 1):
        more.append(8)
    if sampling.top_k is not None or sampling.min_p is not None:
        more.append(5)
    if sampling.top_p is not None and sampling.top_p < 1:
        more.append(28)  # all of them sorted, which is rare
    return logits + 4 + max(more)


def _log_probs(logits: Tensor, peak: Tensor, tokens: Tensor, total: Tensor) -> Tensor:
    return (logits.gather(-1, tokens[:, None]) - peak).squeeze(-1) - total.log()


def _truncate(weights: Tensor, sampling: Sampling) -> Tensor:
    """``weights`` [n, v], which sum to anything and whose largest is 1, with zeros for what may not be drawn."""
    vocabulary = weights.shape[-1]
    if sampling.top_k is not None and sampling.top_k < vocabulary:
        least = weights.topk(sampling.top_k).values[:, -1:]
        weights = weights.masked_fill(weights < least, 0.0)
    if sampling.top_p is not None and sampling.top_p < 1:
        wanted = weights.sum(-1, dtype=torch.float64) * sampling.top_p
        most = weights.topk(min(_NUCLEUS, vocabulary)).values
        held = most.cumsum(-1, dtype=torch.float64)
        if bool((held[:, -1] < wanted).any()):
            most = weights.sort(descending=True).values
            held = most.cumsum(-1, dtype=torch.float64)
        last = (held < wanted[:, None]).sum(-1, keepdim=True).clamp_(max=most.shape[-1] - 1)
        weights = weights.masked_fill(weights < most.gather(-1, last), 0.0)
    if sampling.min_p is not None:
        weights = weights.masked_fill(weights < sampling.min_p, 0.0)
    return weights


def _search(weights: Tensor, uniform: Tensor) -> Tensor:
    """[n]: where the cumulative sum of each row of ``weights`` [n, v] passes ``uniform`` of its total.

    In two stages, so that no cumulative sum of a whole vocabulary is built, in fp64 where it matters.
    """
    n, vocabulary = weights.shape
    if vocabulary % _BLOCK:  # padding copies all weights, even where it adds nothing
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % _BLOCK))
    blocks = weights.reshape(n, -1, _BLOCK)
    sums = blocks.sum(-1).double()
    bounds = sums.cumsum(-1)
    target = (uniform * bounds[:, -1])[:, None]
    block = torch.searchsorted(bounds, target, right=True).clamp_(max=sums.shape[-1] - 1)
    inside = blocks[torch.arange(n, device=weights.device), block.squeeze(-1)].double().cumsum(-1)
    # how far into its block; scaled to the block's sum in fp64, which rounding let differ from its sum in fp32
    share = (target - (bounds - sums).gather(-1, block)) / sums.gather(-1, block)
    # a last token with weight 0 cannot be drawn: the sum that must be passed stays under the block's
    wanted = share.clamp_(0.0, 1.0 - 2.0**-40) * inside[:, -1:]
    place = torch.searchsorted(inside, wanted, right=True).clamp_(max=_BLOCK - 1)
    return (block * _BLOCK + place).squeeze(-1).clamp_(max=vocabulary - 1)  # NaN would point beyond
