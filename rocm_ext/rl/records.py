"""Records of sampled answers: ``samples.jsonl``, ``verdicts.jsonl``, and ``turns.jsonl`` for open conversations.

A line has a step (or cycle) and a phase. A run appends lines, and rewrites a file to remove some. When it resumes, it
reads the files once: unfinished steps continue with their records. What training needs of finished steps, the pass
rates of prompts, is in the checkpoint.
"""

import base64
import errno
import json
import math
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, read_lines, rewrite_lines
from rocm_ext.base.log import log
from rocm_ext.base.types import Json, Message
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.runs.records import SampleKey
from rocm_ext.sampling import Completion
from rocm_ext.verifiers import Result, Verdict

_AT_ONCE = 1024  # records that a rank sends to the others at a time, to save memory
# tokens sampled before it, its ids, whether these replace all before it
Given = tuple[int, Sequence[int], bool]
# the steps that asked a prompt and its pass rates there, by prompt
Asked = dict[str, list[tuple[int, float | None]]]
# step or cycle, "sample" or "eval", round of a step's sampling
Scope = tuple[int, str, int]


@dataclass(frozen=True)
class Sample:
    """A line of ``samples.jsonl``.

    Attributes:
        prompt_id: id of the prompt.
        sample: index of the answer among the prompt's.
        seed: seed of everything random about the answer.
        finish_reason, text, tokens: see :class:`rocm_ext.sampling.Completion`.
        logprobs: log-probabilities as in :class:`rocm_ext.sampling.Completion`, rounded to 1e-6.
        routes: as in :class:`rocm_ext.sampling.Completion`, int16 (little-endian), compressed by zlib, in base64.
        given: in a conversation, the ids between the ``tokens`` that the model sampled.
        messages: in a conversation, all messages after the prompt; ``text`` is the model's last one.
        tools: in a conversation, the JSON schemas of the functions that the model could call.
    """

    prompt_id: str
    sample: int
    seed: int
    finish_reason: str
    text: str
    tokens: list[int]
    logprobs: list[float]
    routes: str | None = None
    given: Sequence[Given] | None = None
    messages: Sequence[Message] | None = None
    tools: Sequence[Json] | None = None

    @classmethod
    def of(cls, completion: Completion) -> "Sample":
        """Convert a completion to its record."""
        request, routes = completion.request, completion.routes
        return cls(
            request.prompt_id,
            request.sample,
            request.seed,
            completion.finish_reason,
            completion.text,
            completion.tokens,
            [round(value, 6) for value in completion.logprobs],
            None if routes is None else packed_routes(routes),
        )

    def chosen_experts(self) -> np.ndarray:
        """Return ``routes`` as [n, layers * chosen] int16, for the n tokens; a UserError if the record has none."""
        if self.routes is None:
            raise UserError(
                f"the answer to prompt {self.prompt_id}, sample {self.sample}, has no routes to replay"
            )
        content = zlib.decompress(base64.b64decode(self.routes))
        experts = np.frombuffer(content, "<i2").astype(np.int16)
        return experts.reshape(len(self.tokens), -1)

    @property
    def key(self) -> SampleKey:
        """The prompt's id and the index of the answer."""
        return self.prompt_id, self.sample

    def sequences(self, prompt: Sequence[int]) -> Iterator[tuple[list[int], list[bool], slice]]:
        """Yield the sequences that the model computed after ``prompt``: one, unless a chat template rewrote history.

        Yields:
            Ids [s], a mask [s] of the ids that the model sampled, and the slice of ``tokens`` with these ids.
        """
        ids = list(prompt)
        sampled = [False] * len(prompt)
        begun = 0  # sampled tokens before this sequence
        at = 0  # sampled tokens so far
        end = len(self.tokens)
        rest: Given = (end, (), False)
        for before, given, fresh in [*(self.given or ()), rest]:
            ids += self.tokens[at:before]
            sampled += [True] * (before - at)
            at = before
            if fresh:
                if at > begun:
                    yield ids, sampled, slice(begun, at)
                ids = []
                sampled = []
                begun = at
            ids += given
            sampled += [False] * len(given)
        yield ids, sampled, slice(begun, end)

    def record(self) -> Json:
        """Return the line's content; ``asdict`` would take as long as all other work outside model and verifier."""
        return {key: value for key, value in vars(self).items() if value is not None}


def packed_routes(routes: np.ndarray) -> str:
    """Return the experts that routers chose, as :class:`Sample` has them."""
    compressed = zlib.compress(routes.astype("<i2").tobytes())
    return base64.b64encode(compressed).decode()


def key_of(record: Json) -> SampleKey:
    """Return which answer a line is about."""
    return record["prompt_id"], record["sample"]


def to_sample(record: Json) -> Sample:
    """Convert a line of ``samples.jsonl``."""
    names = Sample.__dataclass_fields__.keys() & record.keys()
    return Sample(**{name: record[name] for name in names})


def to_result(record: Json) -> Result:
    """Convert a line of ``verdicts.jsonl``."""
    verdict = Verdict(record["verdict"])
    return Result(verdict, record["reward"], record["detail"], record.get("parts", {}))


def measure(
    samples: Mapping[SampleKey, Sample], results: Mapping[SampleKey, Result]
) -> dict[str, float | None]:
    """Measure the lengths, the diversity and the correctness of a step's answers, also inside groups.

    A result without a reward (ERROR) counts in lengths and diversity alone.

    Returns:
        The measurements by their names in docs/grpo.md, which explains them; None where no answer has a value.
        ``entropy`` is the mean of -log p over sampled tokens. Without truncation and with log-probs at the sampling
        temperature, this estimate is unbiased.
    """
    lengths = {key: len(sample.tokens) for key, sample in samples.items()}
    groups: dict[str, list[SampleKey]] = defaultdict(list)
    entropies: list[float] = []
    for key, sample in samples.items():
        groups[key[0]].append(key)
        entropies += [-value for value in sample.logprobs]
    right = {}
    parts: dict[str, list[float]] = defaultdict(list)
    for key, result in results.items():
        if result.reward is not None:
            right[key] = is_correct(result)
        for name, value in result.parts.items():
            parts[f"reward/{name}"].append(value)
    distinct = []
    judged_groups = []
    for keys in groups.values():
        texts = {tuple(samples[key].tokens) for key in keys}
        distinct.append(len(texts) / len(keys))
        judged = [right[key] for key in keys if key in right]
        if judged:
            judged_groups.append(judged)
    values: dict[str, list[float]] = {
        "mean_tokens": list(lengths.values()),
        "mean_tokens_right": [lengths[key] for key, passed in right.items() if passed],
        "mean_tokens_wrong": [lengths[key] for key, passed in right.items() if not passed],
        "entropy": entropies,
        "distinct": distinct,
        "all_right": [all(judged) for judged in judged_groups],
        "all_wrong": [not any(judged) for judged in judged_groups],
        **parts,
    }
    means = {name: fmean(measured) if measured else None for name, measured in values.items()}
    passed_at = pass_at_ks([(len(judged), sum(judged)) for judged in judged_groups])
    return means | {f"pass_at_{k}": value for k, value in passed_at.items()}


def is_correct(result: Result) -> bool:
    """Return whether the verdict is CORRECT."""
    return result.verdict is Verdict.CORRECT


def pass_rates(
    results: Mapping[SampleKey, Result], passes: Callable[[Result], bool]
) -> dict[str, float | None]:
    """Compute by prompt the share of answers that passed; None for prompts without any reward.

    Answers without a reward (ERROR) do not count, because a verifier's failure says nothing about a prompt.
    """
    passed: dict[str, list[bool]] = {}
    for (prompt, _), result in results.items():
        of_prompt = passed.setdefault(prompt, [])
        if result.reward is not None:
            of_prompt.append(passes(result))
    return {prompt: fmean(of_prompt) if of_prompt else None for prompt, of_prompt in passed.items()}


class Records:
    """The samples and verdicts of a run.

    The constructor joins the lines of all ranks that a killed process left; all ranks call it. It warns if the last
    finished step or evaluation has lost its records: training does not read them again.

    Args:
        out: the run's output folder.
        ranks: all processes of the run.
        step: steps done; later ones are unfinished. A step of RAFT is a cycle.
        evaluated: step of the last evaluation; later ones are unfinished.
        passes: whether a result counts as passed in its prompt's pass rate.
        asked: see the attribute; of the finished steps. The records add to it.
        per_prompt: answers to a prompt in a step.
        all_samples: whether the run keeps the samples of all finished steps.

    Attributes:
        asked: by prompt, the steps that asked it and the share of its answers that passed; None where every verdict is
            ERROR.
    """

    def __init__(
        self,
        out: Path,
        ranks: Ranks,
        step: int,
        evaluated: int,
        passes: Callable[[Result], bool] = is_correct,
        asked: Asked | None = None,
        per_prompt: int = 1,
        all_samples: bool = True,
    ) -> None:
        self.asked: Asked = {} if asked is None else asked
        self._passes = passes
        self._samples = RecordFile(out / "samples.jsonl", ranks)
        self._verdicts = RecordFile(out / "verdicts.jsonl", ranks)
        self._turns = RecordFile(out / "turns.jsonl", ranks, itemgetter("behind"))
        self._files = (self._samples, self._verdicts, self._turns)
        ranks.barrier()
        if ranks.is_main:
            for file in self._files:
                file.merge()
        ranks.barrier()
        done = {"sample": step, "eval": evaluated}
        last_asked = [steps[-1][0] for steps in self.asked.values()]
        answers = per_prompt * last_asked.count(step)
        for file in self._files:
            # answers of the last finished work
            newest: dict[str, set[SampleKey]] = {"sample": set(), "eval": set()}
            for line in file.lines():
                phase = line["phase"]
                if line["step"] > done[phase]:
                    file.keep(line)
                elif line["step"] == done[phase]:
                    newest[phase].add(key_of(line))
            lost = []
            has_all = file is self._verdicts or (file is self._samples and all_samples)
            if has_all and len(newest["sample"]) < answers:
                lost.append(f"step {step}")
            if file is not self._turns and evaluated >= 0 and not newest["eval"]:
                lost.append(f"the evaluation at {evaluated}")
            if lost and ranks.is_main:
                log.warning("%s lacks lines of %s, which reports and comparisons then cannot show; restore the file if "
                            "you have a copy", file.part, " and ".join(lost))  # fmt: skip
        ranks.barrier()  # the main rank may rewrite the files next

    def begin(self, step: int, prompts: Iterable[str]) -> None:
        """Add the prompts of a step to ``asked`` before they have verdicts."""
        for prompt in prompts:
            self.asked.setdefault(prompt, []).append((step, None))

    def begun(self, step: int) -> set[str]:
        """Return the prompts of a step with answers of an earlier process, before this one asks them."""
        first_round = (step, "sample", 0)
        answers = self._samples.left.get(first_round, ())
        return {prompt for prompt, _ in answers}

    def finish(self, step: int, results: Mapping[SampleKey, Result]) -> None:
        """Add the verdicts of a finished step to ``asked``."""
        for prompt, rate in pass_rates(results, self._passes).items():
            rates = dict(self.asked.get(prompt, ()))
            rates[step] = rate
            self.asked[prompt] = sorted(rates.items(), key=itemgetter(0))

    def phase(
        self, step: int, phase: str, round_: int = 0, policy: int | None = None
    ) -> tuple["PhaseRecords", "PhaseRecords", "PhaseRecords"]:
        """Open the samples, the verdicts and the turns of a phase, ``sample`` or ``eval``.

        Args:
            step: number of the step; of an evaluation, the step before it.
            round_: number of the round of a step's sampling, from 0.
            policy: step of the sampling adapter, for the lines of new samples. None for lines without it.
        """
        scope = (step, phase, round_)
        extra = {} if policy is None else {"policy": policy}
        return (
            PhaseRecords(self._samples, scope, extra),
            PhaseRecords(self._verdicts, scope, {}),
            PhaseRecords(self._turns, scope, {}),
        )

    def verdicts(self, step: int, phase: str) -> dict[SampleKey, Result]:
        """Read the verdicts of a finished phase from the file."""
        verdicts = {}
        for line in self._verdicts.lines():
            if line["step"] == step and line["phase"] == phase:
                verdicts[key_of(line)] = to_result(line)
        return verdicts

    def samples(self, wanted: Mapping[int, Collection[SampleKey]]) -> dict[int, list[Sample]]:
        """Read the ``wanted`` samples of finished steps, in the order of ``wanted``.

        Raises:
            UserError: a sample is missing.
        """
        if not any(wanted.values()):
            return {step: [] for step in wanted}
        read: dict[int, dict[SampleKey, Sample]] = {step: {} for step in wanted}
        for line in self._samples.lines():
            step, key = line["step"], key_of(line)
            if line["phase"] == "sample" and key in wanted.get(step, ()):
                read[step][key] = to_sample(line)
        samples = {}
        for step, keys in wanted.items():
            missing = set(keys) - read[step].keys()
            if missing:
                raise UserError(
                    f"samples.jsonl lacks answers that the run trained on, such as {(step, min(missing))}; restore it"
                )
            samples[step] = [read[step][key] for key in keys]
        return samples

    def keep_samples_from(self, step: int, at_once: bool = False) -> None:
        """Remove the samples of all steps before ``step`` from the file; verdicts and evaluations stay.

        Unless ``at_once``, this waits until the file has doubled since its last rewrite, so that the time per step does
        not grow with the evaluations in it.
        """
        if at_once or self._samples.doubled():
            self._samples.rewrite(lambda line: line["step"] >= step or line["phase"] == "eval")

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


class PhaseRecords:
    """The samples, the verdicts or the turns of one phase.

    Attributes:
        file: their file.
        records: records of an earlier process and of this rank, by the file's key.
    """

    def __init__(self, file: "RecordFile", scope: Scope, extra: Mapping[str, int]) -> None:
        self.file, self._scope, self._extra = file, scope, extra
        self.records: dict[Any, Json] = file.left.pop(scope, {})
        self._new: list[Json] = []

    def append(self, record: Json) -> None:
        """Append one record and write it at once."""
        record = {**self._extra, **record}
        self.file.append(self._scope, record)
        self._new.append(record)
        self.records[self.file.key(record)] = record

    def drop(self, unwanted: Callable[[Json], bool]) -> None:
        """Remove the ``unwanted`` records; call it on every rank, on opening or after :meth:`collect`."""
        dropped = {key for key, record in self.records.items() if unwanted(record)}
        if dropped:
            for key in dropped:
                del self.records[key]
            self.file.rewrite(
                lambda line: _scope(line) != self._scope or key_of(line) not in dropped
            )

    def collect(self) -> None:
        """Give every rank the records of all, and move them to the main rank's file."""
        for record in self.file.collect(self._scope, self._new):
            self.records[key_of(record)] = record
        self._new = []


class RecordFile:
    """A file of records. Each rank appends to a part of it until :meth:`collect` moves the lines to the main rank's.

    One phase can be collected while another has lines in the ranks' parts.

    Args:
        path: the file.
        ranks: all processes of the run.
        key: returns a line's key in its phase.

    Attributes:
        part: this rank's part; on the main rank, the file.
        left: records of unfinished phases of an earlier process, until the phase opens.
    """

    def __init__(self, path: Path, ranks: Ranks, key: Callable[[Json], Any] = key_of) -> None:
        self._path, self._ranks, self.key = path, ranks, key
        self.part = path if ranks.is_main else path.with_suffix(f".rank{ranks.rank}.jsonl")
        self.left: dict[Scope, dict[Any, Json]] = defaultdict(dict)
        self._handle: Any = None
        self._rewritten = 0  # bytes after the last rewrite
        self._uncollected: set[Scope] = set()  # phases with lines of this process only
        self._lock = threading.RLock()  # a thread may append while the others collect or rewrite

    def merge(self) -> None:
        """Cut a line that a kill left incomplete, and move the lines of other ranks here."""
        path = self._path
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                os.truncate(path, _complete(path))
            for part in sorted(path.parent.glob(f"{path.stem}.rank*.jsonl")):
                with part.open("rb") as source, path.open("ab") as file:
                    file.write(source.read(_complete(part)))
                part.unlink()

    def lines(self) -> Iterable[Json]:
        """Read the file line by line."""
        return read_lines(self._path, keys=("step", "phase", "prompt_id", "sample"))

    def keep(self, line: Json) -> None:
        """Keep a line of an unfinished phase in :attr:`left`."""
        record = dict(line)
        for key in ("step", "phase", "round"):
            record.pop(key, None)
        self.left[_scope(line)][self.key(line)] = record

    def append(self, scope: Scope, record: Json) -> None:
        """Write a record of a phase to this rank's part."""
        with self._lock:
            self._uncollected.add(scope)
            self._write([record], scope)

    def _write(self, records: Iterable[Json], scope: Scope) -> None:
        step, phase, round_ = scope
        beginning: Json = {"step": step, "phase": phase}
        if round_:
            beginning["round"] = round_
        with self._lock, disk_errors(self.part):
            if self._handle is None:  # without a buffer, a kill damages at most one line
                self._handle = self.part.open("ab", buffering=0)
            for record in records:
                content = (json.dumps({**beginning, **record}) + "\n").encode()
                written = self._handle.write(content)
                if written != len(content):  # the disk is full
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def collect(self, scope: Scope, new: list[Json]) -> list[Json]:
        """Move a phase's lines, of this rank ``new``, to the main rank's file, and return the records of all ranks."""
        with self._lock:
            self._uncollected.discard(scope)
        if self._ranks.world == 1:
            self.close()
            return new
        collected: list[Json] = []
        most = max(self._ranks.gather(len(new)))
        for start in range(0, most, _AT_ONCE):
            of_main, *of_others = self._ranks.gather(new[start : start + _AT_ONCE])
            others = list(chain.from_iterable(of_others))
            collected += of_main + others
            if self._ranks.is_main:
                self._write(others, scope)
        self._ranks.barrier()
        with self._lock:
            self.close()
            if not self._ranks.is_main:  # a kill before this leaves lines twice, which count once
                if self._uncollected:  # lines of coming steps, sampled during training
                    rewrite_lines(self.part, lambda line: _scope(line) != scope)
                else:
                    self.part.unlink(missing_ok=True)
        return collected

    def rewrite(self, keep: Callable[[Json], bool]) -> None:
        """Remove lines from the main rank's file; every rank calls it."""
        if self._ranks.is_main:
            with self._lock:
                self.close()
                rewrite_lines(self._path, keep)
                self._rewritten = _size(self._path)
        self._ranks.barrier()

    def discard(self) -> None:
        """Remove all lines but those in :attr:`left`."""
        with self._lock:
            self.close()
            if self.left and self._ranks.is_main:
                rewrite_lines(self._path, lambda line: _scope(line) in self.left)
            else:
                self.part.unlink(missing_ok=True)

    def doubled(self) -> bool:
        """Whether the file is twice as large as after the last rewrite of this process, the same on every rank."""
        return self._ranks.agree(self._ranks.is_main and _size(self._path) >= 2 * self._rewritten)

    def close(self) -> None:
        """Close this rank's part."""
        with self._lock:
            if self._handle is not None:
                self._handle.close()
                self._handle = None


def _scope(line: Json) -> Scope:
    return line["step"], line["phase"], line.get("round", 0)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _complete(path: Path) -> int:
    """Return a file's bytes up to the end of its last complete line."""
    with path.open("rb") as file:  # not all file systems can map it
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                return start + at + 1
            end = start
    return 0


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased estimate of the probability that one of ``k`` answers is right (Chen et al. 2021, arXiv:2107.03374).

    Args:
        n: answers drawn.
        correct: how many of them are right.
        k: at most ``n``.
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def pass_at_ks(groups: Sequence[tuple[int, int]]) -> dict[int, float]:
    """The mean of :func:`pass_at_k` over prompts, for k = 1, 2, 4 … up to the most answers that a prompt has.

    Args:
        groups: number of answers and of right ones, by prompt. A prompt with fewer than k answers is left out.
    """
    most = max((n for n, _ in groups), default=0)
    means = {}
    k = 1
    while k <= most:
        means[k] = fmean(pass_at_k(n, correct, k) for n, correct in groups if n >= k)
        k *= 2
    return means
