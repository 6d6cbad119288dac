"""The scores of an evaluation's answers."""

from collections.abc import Mapping
from typing import Any

from rocm_ext.base.log import log
from rocm_ext.rl.rollout import Answers
from rocm_ext.runs.folder import GREEDY, SampleKey
from rocm_ext.runs.intervals import mcnemar
from rocm_ext.runs.scores import pass_at_k, wilson
from rocm_ext.verifiers import Result, Verdict


def score(answers: Answers, samples: int) -> dict[str, Any]:
    """Compute the content of ``eval.json``.

    It has pass@1 of the greedy answers, and pass@k of the sampled ones for k = 1, 2, 4 … up to ``samples``. An answer
    passes if its verdict is CORRECT; an ERROR does not pass. The interval of pass@k counts each prompt as one trial,
    so it is wider than necessary.

    Args:
        answers: answers to the requests of :meth:`rocm_ext.rl.prompts.PromptSet.evaluation_requests`.
        samples: number of sampled answers per prompt.
    """
    right = {key: result.verdict is Verdict.CORRECT for key, result in answers.results.items()}
    greedy = [passed for (_, sample), passed in right.items() if sample == GREEDY]
    drawn: dict[str, int] = {}
    for (prompt, sample), passed in right.items():
        if sample != GREEDY:
            drawn[prompt] = drawn.get(prompt, 0) + passed
    at: dict[str, Any] = {}
    k = 1
    while drawn and k <= samples:
        value = sum(pass_at_k(samples, correct, k) for correct in drawn.values()) / len(drawn)
        at[str(k)] = {"pass": value, "interval": wilson(value * len(drawn), len(drawn))}
        k *= 2
    return {
        "prompts": len(greedy),
        "correct": sum(greedy),
        "pass_at_1": sum(greedy) / len(greedy),
        "interval": wilson(sum(greedy), len(greedy)),
        "pass_at_k": at,
        "samples_per_prompt": samples,
        "verdicts": dict(sorted(answers.verdicts().items())),
        "truncated": sum(sample.finish_reason == "length" for sample in answers.samples.values()),
    }


def report_gain(before: Mapping[str, bool], after: Mapping[str, bool], chosen: str, looks: int) -> None:
    """Log how the chosen adapter does on the held-out prompts against the initial model, with a paired test.

    The best of several evaluations on the same prompts scores too high, so the p-value is multiplied by their number
    (Bonferroni).

    Args:
        before: whether the initial model's greedy answer is right, by prompt id; empty: it was not evaluated.
        after: the same for the chosen adapter.
        chosen: name of the chosen adapter, such as ``cycle 3``.
        looks: number of evaluations that the adapter was chosen from.
    """
    if not before or before.keys() != after.keys():
        return
    gained = sum(right and not before[prompt] for prompt, right in after.items())
    lost = sum(right and not after[prompt] for prompt, right in before.items())
    p = mcnemar(lost, gained)
    told = f"{chosen} against the initial model: {gained} of {len(after)} held-out prompts gained, {lost} lost"
    told += f"; McNemar p = {p:.2g}"
    if looks > 1:
        told += (
            f", {min(1.0, looks * p):.2g} for the best of {looks} looks at the same prompts (Bonferroni). This choice "
            "makes its score too high: measure it on other prompts with rocm-ext eval"
        )
    log.info("%s", told)
    if gained <= lost:
        log.warning("no adapter scores higher on the held-out prompts than the initial model")


def greedy(results: Mapping[SampleKey, Result]) -> dict[str, bool]:
    """Return whether the greedy answer to each prompt is right, by prompt id."""
    return {
        prompt: result.verdict is Verdict.CORRECT for (prompt, sample), result in results.items() if sample == GREEDY
    }
