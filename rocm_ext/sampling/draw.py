"""Draw tokens from logits; a draw depends only on its row's logits, seed and position.

A hash of seed and position gives a uniform number, which selects a token from the row's cumulative distribution.
``torch.multinomial`` draws from a generator that all rows share, so a sample would depend on the rest of its batch.
"""

import torch
from torch import Tensor

from rocm_ext.sampling.engine import Sampling

_BLOCK = 512  # tokens per block of the two-stage search
_NUCLEUS = 1024  # number of most probable tokens that nearly always hold top_p


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one uniform number per row with SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): [n], fp64 in [0, 1).

    SplitMix64 computes any element of a stream directly.

    Args:
        seeds: [n], int64; the rows' streams.
        positions: [n], int64; the elements of the streams.
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
        sampling: temperature and truncation. As in transformers, top_k applies first, then top_p to the
            remaining tokens, then min_p. Ties with the least probable allowed token are allowed.

    Returns:
        tokens [n], int64, and their log-probs [n], fp32, at ``sampling.logprobs_temperature`` without truncation.
    """
    logits, temperature = logits.float(), sampling.logprobs_temperature
    peak = logits.amax(-1, keepdim=True)
    weights = _weights(logits, peak, temperature)
    total = weights.sum(-1)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        if sampling.temperature != temperature:
            weights = _weights(logits, peak, sampling.temperature)
        weights = _truncate(weights, sampling)  # frees the other weights before the search copies these
        tokens = _search(weights, uniform)
    return tokens, (logits.gather(-1, tokens[:, None]) - peak).squeeze(-1) / temperature - total.log()


def _weights(logits: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """Return unnormalised probabilities at a temperature; a row's largest is 1."""
    distance = logits - peak
    return (distance if temperature == 1 else distance.div_(temperature)).exp_()


def draw_bytes(sampling: Sampling, itemsize: int, vocabulary: int) -> int:
    """Bytes that :func:`draw` holds at most per logit, including the logit of ``itemsize`` bytes."""
    logits = itemsize if itemsize == 4 else itemsize + 4
    more = [4 if vocabulary % _BLOCK else 0]  # in addition to one fp32 copy, the weights
    if sampling.temperature not in (0, sampling.logprobs_temperature):
        more.append(4)
    if truncations := (sampling.top_k is not None) + (sampling.min_p is not None):
        more.append(1 + 4 * truncations)
    if sampling.top_p is not None and sampling.top_p < 1:
        more.append(28)  # a full sort, which is rare
    return logits + 4 + max(more)


def _truncate(weights: Tensor, sampling: Sampling) -> Tensor:
    """Set to zero the weights of tokens that ``sampling`` excludes: [n, v], unnormalised; a row's largest is 1."""
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
    """Find the token where a row's cumulative sum passes the share ``uniform`` of its total: [n, v], [n] -> [n].

    The search first finds a block, then a token in it, so it builds no cumulative sum over the vocabulary. Sums are in
    fp64 where precision matters.
    """
    n, vocabulary = weights.shape
    if vocabulary % _BLOCK:  # torch's pad copies all weights even if it adds no columns
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % _BLOCK))
    blocks = weights.reshape(n, -1, _BLOCK)
    sums = blocks.sum(-1).double()
    bounds = sums.cumsum(-1)
    target = (uniform * bounds[:, -1])[:, None]
    block = torch.searchsorted(bounds, target, right=True).clamp_(max=sums.shape[-1] - 1)
    inside = blocks[torch.arange(n, device=weights.device), block.squeeze(-1)].double().cumsum(-1)
    # The target's share of its block. It is scaled to the block's fp64 sum below, because the fp32 sum is rounded.
    share = (target - (bounds - sums).gather(-1, block)) / sums.gather(-1, block)
    # Keep the target below the block's sum, so that a last token of weight 0 is never drawn.
    wanted = share.clamp_(0.0, 1.0 - 2.0**-40) * inside[:, -1:]
    token = torch.searchsorted(inside, wanted, right=True).clamp_(max=_BLOCK - 1)
    return (block * _BLOCK + token).squeeze(-1).clamp_(max=vocabulary - 1)  # NaN gives an index past the end
