"""The choice of a step's or cycle's prompts: pure functions of the records, without torch.

It does not depend on the order of the prompts. Hashes of the seed and the prompt's id take the place of random numbers,
so a resumed run chooses the same.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.sampling import sample_seed

Asked = Mapping[str, Sequence[tuple[int, float | None]]]  # by prompt, oldest first: (step, pass rate of the group)

START = 0.2  # share of the prompts that easy_to_hard begins with
PRIOR = 0.25  # weight of the assumption that a pass rate is 1/2, as a share of one group
NEWEST = 16  # groups of a prompt that count; the weight of an older one would be below 2 ** -16


def choose(
    prompts: Sequence[str],
    asked: Asked,
    step: int,
    steps: int,
    *,
    count: int,
    curriculum: str,
    seed: int,
    exclude: Collection[str] = (),
) -> list[str]:
    """Choose the prompts of a step, or of a round of refills.

    - ``none``: those that were asked least often. A hash breaks ties, a new one for each pass over the prompts.
    - ``informative``: a weighted draw without replacement (Efraimidis and Spirakis, 2006). A prompt's weight is
      p (1 - p), the variance of one answer's reward, with its estimated pass rate p; see :func:`pass_rate`. The
      estimate never reaches 0 or 1, so every prompt keeps a chance.
    - ``easy_to_hard``: a curriculum by competence (arXiv:1903.09848). Prompts are ranked by estimated pass rate, those
      without one at the mean of the others. Chosen as with ``none`` from the easiest, whose share grows linearly from
      20 % in the first step to all in the last.

    Args:
        prompts: ids of all training prompts.
        asked: for each prompt asked before, the step and the pass rate of each of its groups, oldest first; the rate is
            None if no answer of the group has a reward.
        step: number of this step, from 1.
        steps: number of steps of the run.
        count: number of prompts to choose.
        curriculum: ``none``, ``informative`` or ``easy_to_hard``.
        seed: the run's seed.
        exclude: prompts that this step asked already.

    Returns:
        Prompt ids; fewer than ``count`` if there are no more.

    Raises:
        UserError: ``curriculum`` has another value.
    """
    ids, places, hashes = _index(tuple(prompts))
    free = np.ones(len(ids), bool)
    free[[places[prompt] for prompt in exclude if prompt in places]] = False
    if curriculum == "informative":
        rates = _pass_rates(places, asked)
        weights = np.where(np.isnan(rates), 0.25, rates * (1 - rates))
        keys = -np.log(_uniform(hashes, seed, "informative", step)) / weights
        chosen = _lowest(np.flatnonzero(free), keys, count)
    elif curriculum in ("none", "easy_to_hard"):
        if curriculum == "easy_to_hard":
            progress = (step - 1) / max(1, steps - 1)
            share = math.ceil((START + (1 - START) * min(1.0, progress)) * len(ids) - 1e-9)
            order = _easiest_first(_pass_rates(places, asked), hashes, seed)
            free[order[max(share, count + len(exclude)) :]] = False
        chosen = _least_often(np.flatnonzero(free), ids, asked, hashes, seed, count)
    else:
        raise UserError(f"curriculum must be none, informative or easy_to_hard, found {curriculum!r}")
    return [ids[place] for place in chosen]


def choose_unsolved(
    prompts: Sequence[str],
    last_asked: Mapping[str, tuple[int, float]],
    cycle: int,
    *,
    count: int | None,
    skip_solved: bool,
    retry_unsolved_after: int | None,
    seed: int,
) -> list[str]:
    """Choose the prompts of a cycle by the pass rates of their last answers.

    Args:
        prompts: ids of all training prompts.
        last_asked: for each prompt asked before, the last cycle that asked it and the share of its answers that
            passed.
        cycle: number of this cycle, from 1.
        count: maximum number of prompts; None: all that qualify.
        skip_solved: skip prompts whose answers all passed, because they teach nothing more.
        retry_unsolved_after: number of cycles until a prompt without a passing answer is asked again (1: in the next
            cycle); None: never.
        seed: breaks ties between prompts that were last asked in the same cycle.

    Returns:
        Prompt ids, the longest unasked first; fewer than ``count`` if fewer qualify.
    """

    def qualifies(prompt: str) -> bool:
        if prompt not in last_asked:
            return True
        asked, rate = last_asked[prompt]
        if rate == 0:
            return retry_unsolved_after is not None and cycle - asked >= retry_unsolved_after
        return rate < 1 or not skip_solved

    def order(prompt: str) -> tuple[int, int]:
        asked, _ = last_asked.get(prompt, (0, 0.0))
        return asked, sample_seed(seed, "prompts", prompt, cycle - 1)

    return sorted(filter(qualifies, prompts), key=order)[:count]


def pass_rate(history: Sequence[tuple[int, float | None]]) -> float | None:
    """Estimate a prompt's pass rate under the present policy.

    The estimate is the mean over the prompt's groups, each with half the weight of the next newer one, since the policy
    changes; and over a rate of 1/2 with a quarter of the newest group's weight. With one group of 8 answers, this
    equals the mean of a Beta distribution with a uniform prior.

    Args:
        history: steps and pass rates of the prompt's groups, see :func:`choose`.

    Returns:
        A rate between 0 and 1, both excluded; None if no rate was measured.
    """
    total = weight = 0.0
    for _, rate in history[-NEWEST:]:
        if rate is not None:
            total, weight = total / 2 + rate, weight / 2 + 1
    return (total + PRIOR / 2) / (weight + PRIOR) if weight else None


def _pass_rates(places: Mapping[str, int], asked: Asked) -> np.ndarray:
    """Return float64 [prompts]: estimated rates, NaN where there are none."""
    rates = np.full(len(places), np.nan)
    known = [(place, pass_rate(asked[prompt])) for prompt, place in places.items() if prompt in asked]
    rates[[place for place, _ in known]] = np.array([rate for _, rate in known], np.float64)  # None becomes NaN
    return rates


@lru_cache(maxsize=2)  # the prompts of a run stay the same
def _index(prompts: tuple[str, ...]) -> tuple[list[str], dict[str, int], np.ndarray]:
    """Return the ids, the place of each and a hash of each (uint64 [prompts])."""
    digests = b"".join(hashlib.blake2b(prompt.encode(), digest_size=8).digest() for prompt in prompts)
    return list(prompts), {prompt: place for place, prompt in enumerate(prompts)}, np.frombuffer(digests, np.uint64)


def _mixed(hashes: np.ndarray, *salt: object) -> np.ndarray:
    """Hash ``hashes`` again, with ``salt``: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    text = "\0".join(map(str, salt)).encode()
    mixed = hashes ^ np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _uniform(hashes: np.ndarray, *salt: object) -> np.ndarray:
    """Return float64 in (0, 1)."""
    return ((_mixed(hashes, *salt) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _lowest(places: np.ndarray, keys: np.ndarray, count: int) -> list[int]:
    """Return up to ``count`` of ``places``, those with the lowest keys, in their order."""
    values = keys[places]
    if count < len(places):
        near = np.argpartition(values, count)[:count]
        places, values = places[near], values[near]
    return places[np.argsort(values)].tolist()


def _least_often(
    places: np.ndarray, ids: Sequence[str], asked: Asked, hashes: np.ndarray, seed: int, count: int
) -> list[int]:
    """Return up to ``count`` of ``places``, those asked least often first."""
    times = np.fromiter((len(asked.get(prompt, ())) for prompt in ids), np.int64, len(ids))[places]
    chosen: list[int] = []
    for often in np.unique(times).tolist():
        if len(chosen) < count:
            equal = places[times == often]
            chosen += _lowest(equal, _mixed(hashes, seed, "pass", often), count - len(chosen))
    return chosen


def _easiest_first(rates: np.ndarray, hashes: np.ndarray, seed: int) -> np.ndarray:
    """Return the places of all prompts, the highest pass rate first."""
    measured = rates[~np.isnan(rates)]
    usual = math.fsum(measured) / len(measured) if len(measured) else 0.5
    return np.lexsort((_mixed(hashes, seed, "rank"), -np.where(np.isnan(rates), usual, rates)))
