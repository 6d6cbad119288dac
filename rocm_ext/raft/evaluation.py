"""What an evaluation asks, and what its answers amount to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rocm_ext.data.prompts import Prompt
from rocm_ext.generation import Request, Sampling, sample_seed
from rocm_ext.raft.rollouts import Phase
from rocm_ext.runs.reader import GREEDY
from rocm_ext.runs.scores import pass_at_k, wilson
from rocm_ext.verifiers import Verdict


def eval_requests(
    prompts: Sequence[Prompt], tokens: Mapping[str, Sequence[int]], sampling: Sampling, samples: int, seed: int
) -> list[tuple[Request, Sampling]]:
    """A greedy answer to each prompt and ``samples`` more drawn at random: the same draws at every evaluation."""
    greedy = replace(sampling, temperature=0, top_k=None, top_p=None, min_p=None)
    requests = []
    for prompt in prompts:
        for sample in (GREEDY, *range(samples)):
            drawn = sample_seed(seed, "eval", prompt.id, sample)
            request = Request(prompt.id, sample, drawn, tuple(tokens[prompt.id]), prompt.messages)
            requests.append((request, greedy if sample == GREEDY else sampling))
    return requests


def score(phase: Phase, samples: int) -> dict[str, Any]:
    """``eval.json``: pass@1 of greedy answers, and pass@k for k = 1, 2, 4 … up to ``samples`` drawn ones.

    A pass is the verdict CORRECT; an ERROR counts as none. The interval of pass@k takes each prompt for one
    trial, which is wider than it need be.
    """
    right = {key: result.verdict is Verdict.CORRECT for key, result in phase.results.items()}
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
        "verdicts": dict(sorted(phase.verdicts().items())),
        "truncated": sum(sample.finish_reason == "length" for sample in phase.samples.values()),
    }
