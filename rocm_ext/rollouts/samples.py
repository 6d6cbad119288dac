"""Sampled answers and their verdicts as records, and the requests that they answer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rocm_ext.data.prompts import Prompt
from rocm_ext.files import read_lines
from rocm_ext.generation import Completion, Request, sample_seed
from rocm_ext.runs.reader import SampleKey
from rocm_ext.verifiers import Result, Verdict


@dataclass(frozen=True)
class Sample:
    """A line of ``samples.jsonl``.

    Attributes:
        prompt_id: id of the prompt.
        sample: index of the answer among the prompt's.
        seed: seed of the answer; it determines everything random about the answer.
        finish_reason, text, tokens: see :class:`rocm_ext.generation.Completion`.
        logprobs: log-probabilities as in :class:`rocm_ext.generation.Completion`, rounded to 1e-6.
    """

    prompt_id: str
    sample: int
    seed: int
    finish_reason: str
    text: str
    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, completion: Completion) -> "Sample":
        """Convert a completion to its record."""
        request = completion.request
        return cls(
            request.prompt_id,
            request.sample,
            request.seed,
            completion.finish_reason,
            completion.text,
            completion.tokens,
            [round(value, 6) for value in completion.logprobs],
        )

    @property
    def key(self) -> SampleKey:
        return self.prompt_id, self.sample

    def record(self) -> dict[str, Any]:
        """Return the line's content.

        This is the sample's own ``vars``, because copying with ``asdict`` took as long as all other work outside the
        model and the verifier.
        """
        return vars(self)


def sampling_requests(
    prompts: Sequence[Prompt], tokens: Mapping[str, Sequence[int]], samples: int, seed: int, cycle: int
) -> list[Request]:
    """Return the requests of a cycle: ``samples`` answers to each of ``prompts``.

    Args:
        prompts: prompts that the cycle asks.
        tokens: token ids of each prompt, by id.
        samples: number of answers per prompt.
        seed: the run's seed.
        cycle: number of the cycle; with ``seed`` it determines the seed of each answer.
    """
    return [
        Request(
            prompt.id,
            sample,
            sample_seed(seed, cycle, prompt.id, sample),
            tuple(tokens[prompt.id]),
            prompt.messages,
            prompt.tools,
        )
        for prompt in prompts
        for sample in range(samples)
    ]


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of a journal without an incomplete last one; [] if the file is missing.

    Raises:
        UserError: a line is damaged; the message names it.
    """
    return list(read_lines(path, keys=("prompt_id", "sample")))


def read_samples(path: Path) -> list[Sample]:
    """Read the samples of a phase, or those in ``kept.jsonl``."""
    return [to_sample(record) for record in read_records(path)]


def read_results(path: Path) -> dict[SampleKey, Result]:
    """Read the verdicts of a phase, by prompt id and sample index."""
    return {(record["prompt_id"], record["sample"]): to_result(record) for record in read_records(path)}


def to_sample(record: Mapping[str, Any]) -> Sample:
    """Convert a line of ``samples.jsonl``."""
    return Sample(**{field: record[field] for field in Sample.__dataclass_fields__})


def to_result(record: Mapping[str, Any]) -> Result:
    """Convert a line of ``verdicts.jsonl``."""
    return Result(Verdict(record["verdict"]), record["reward"], record["detail"])


def entropy(samples: Iterable[Sample]) -> float | None:
    """Estimate the entropy of the model's distribution, in nats per token.

    This is the mean of -log p over the sampled tokens. It is unbiased without truncation if the log-probs are those of
    the sampling temperature.

    Returns:
        The estimate; None if the samples have no log-probs.
    """
    logprobs = [value for sample in samples for value in sample.logprobs]
    return -fmean(logprobs) if logprobs else None
