"""The prompts of a run, rendered to tokens; requests for answers; and the choice of a step's prompts.

The choice is a pure function of the records, whatever the order of the prompts. It draws from hashes of the seed and
the prompt's id, so a resumed run chooses the same.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base.errors import UserError, refuse
from rocm_ext.base.importing import import_component
from rocm_ext.base.log import warn
from rocm_ext.base.types import Json
from rocm_ext.config.checks.training import UNJUDGED
from rocm_ext.config.components import prompt_sets
from rocm_ext.data.messages import to_tools, to_turns
from rocm_ext.data.overview import Overview, equal, numbers, sequence, shared
from rocm_ext.data.prompts import Prompt, check_disjoint
from rocm_ext.data.render import render_conversation, render_history, render_prompt
from rocm_ext.data.rows import check_vocabulary, key
from rocm_ext.data.tokenizer import defused, special_token_lines, special_tokens_in
from rocm_ext.distributed.ranks import rank
from rocm_ext.environments import Ask, Environments, Message
from rocm_ext.plan import workload
from rocm_ext.rl.records import Asked, Sample
from rocm_ext.runs.records import GREEDY
from rocm_ext.sampling import Request, Sampling, sample_seed
from rocm_ext.verifiers import Result, build
from rocm_ext.verifiers.selfcheck import try_out

if TYPE_CHECKING:
    from torchtune.modules import TransformerDecoder

    from rocm_ext.train.learner import Learner

START = 0.2  # share of the prompts that easy_to_hard begins with
PRIOR = 0.25  # weight of the assumption that a pass rate is 1/2, as a share of one group
NEWEST = 16  # groups of a prompt that count; the weight of an older one would be below 2 ** -16


class PromptSet:
    """``prompts`` and ``eval_prompts`` of a config.

    Args:
        cfg: config of a recipe that samples answers, or of another through
            :func:`rocm_ext.config.chosen_model.sampling_config`, as in evaluations of SFT and DPO.

    Attributes:
        training: prompts to train on; empty if ``prompts`` is null.
        held_out: prompts to evaluate on; empty if ``eval_prompts`` is null.
        sets: these prompts by the name of their set, which is empty if ``eval_prompts`` has no names.
        tokens: token ids of every prompt, by its id; empty until :meth:`render`.
        tools: JSON schemas of the environment's tools, added to the tools of every prompt.

    Raises:
        UserError: prompts cannot be read, a held-out prompt is also a training prompt, or two prompts share an id.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._cfg = cfg
        self.training = _read("prompts", cfg.prompts)
        self.sets: dict[str, list[Prompt]] = {}
        self.held_out: list[Prompt] = []
        self._verifiers: dict[str, Any] = {}  # of sets with their own
        for part, component, own in prompt_sets(cfg):
            name = part.partition(".")[2]
            prompts = _read(part, component)
            if own is not None:
                self._verifiers[name] = OmegaConf.to_container(own, resolve=True)
            if name:
                prompts = copy(prompts)  # a component may keep its own
                prompts[:] = [replace(p, id=f"{name}/{p.id}", set=name) for p in prompts]
            self.sets[name] = prompts
            self.held_out += prompts
        if cfg.stop_after_no_gain and not self.held_out:
            raise UserError("stop_after_no_gain needs held-out prompts: set eval_prompts")
        check_disjoint(self.training, self.held_out)
        self.tokens: dict[str, list[int]] = {}
        self.tools: tuple[Json, ...] = ()
        # the environment's first messages for the first prompt
        self._begun: Ask | list[Message] | None = None
        self._by_id: dict[str, Prompt] = {}
        for prompt in self:
            earlier = self._by_id.setdefault(prompt.id, prompt)
            if earlier is not prompt:
                cure = ""
                nameless = prompt in self.held_out and not prompt.set
                if nameless and earlier in self.training:
                    cure = (
                        ", or give the held-out prompts a name, eval_prompts: {NAME: {...}}, which is then a part of "
                        "their ids"
                    )
                raise UserError(
                    f"{prompt.origin} has the id {prompt.id!r} of {earlier.origin}; change it{cure}"
                )

    def render(self, tokenizer: Any) -> None:
        """Fill ``tokens`` as SFT rows are rendered."""
        find_special_tokens = special_tokens_in(tokenizer)
        self.tools = defused(tokenizer)(self.tools)
        with_special_tokens = []
        for prompt in self:
            tools = [*prompt.tools, *self.tools]
            with _naming(prompt, UserError):
                self.tokens[prompt.id] = render_prompt(tokenizer, prompt.messages, tools or None)
            special = find_special_tokens(message["content"] for message in prompt.messages)
            if special:
                with_special_tokens.append((special, prompt.origin))
        warn(special_token_lines("prompts", len(self.tokens), with_special_tokens))
        if self.tools:
            first = next(iter(self))
            if self.tokens[first.id] == render_prompt(tokenizer, first.messages):
                raise UserError(
                    "the model's chat template has no place for the environment's tools; use another template"
                )
        self._check_beginning(tokenizer)

    def _check_beginning(self, tokenizer: Any) -> None:
        """Check that the environment's first messages leave room for the model's."""
        if self._begun is None:
            return
        first = next(iter(self))
        begun = self._begun
        try:
            if isinstance(begun, Ask):
                turns = to_turns(begun.messages, blank=True)
                tools = to_tools(begun.tools)
            else:
                turns = to_turns([*first.messages, *begun])
                tools = [*first.tools, *self.tools] or None
            length = len(render_history(tokenizer, turns, tools))
        except Exception:  # a program's messages and tools may be anything
            if not isinstance(begun, Ask):
                raise
            return  # a run refuses the request, and the program may make another
        added = length - len(self.tokens[first.id])
        if added > self._cfg.max_environment_tokens:
            raise UserError(
                f"max_environment_tokens is {self._cfg.max_environment_tokens}, and the environment's first messages "
                f"alone take {added} tokens behind the prompt of {first.origin}; set it to the most that a "
                "conversation's messages take, except the model's"
            )

    def overview(self, tokenizer: Any, window: int) -> Overview:
        """Describe the rendered prompts, for a model that takes ``window`` tokens."""
        longest_answer = workload.longest_answer(self._cfg)
        most = window - longest_answer
        content, hashes = self._describe(self.training, most)
        result = {"dataset": content, "longest_answer": longest_answer, "window": window}
        for name, prompts in self.sets.items():
            if prompts:
                held_out, hashes_held_out = self._describe(prompts, most)
                result[f"validation.{name}" if name else "validation"] = held_out | equal(
                    "trained_on",
                    shared(hashes_held_out, hashes),
                    [prompt.origin for prompt in prompts].__getitem__,
                    lambda i: self.training[i].origin,
                )

        def show(row: int) -> Json:
            prompt = self.training[row]
            tokens = self.tokens[prompt.id]
            shown = sequence(tokenizer, tokens, np.zeros(len(tokens), bool))
            return {"row": row, "origin": prompt.origin, "sequences": [shown]}

        lengths = [len(self.tokens[prompt.id]) for prompt in self.training]
        return Overview(result, lengths, show)

    def _describe(self, prompts: list[Prompt], most: int) -> tuple[Json, list[bytes]]:
        """Describe prompts, of which one with more than ``most`` tokens ends a run; return their hashes, too."""
        rendered = [self.tokens[prompt.id] for prompt in prompts]
        hashes = list(map(key, rendered))
        lengths = list(map(len, rendered))
        dropped = dict(getattr(prompts, "dropped", {}))
        too_long = []
        for prompt, length in zip(prompts, lengths, strict=True):
            if length > most:
                too_long.append(prompt.origin)
        if too_long:
            dropped["too_long_for_the_model"] = too_long
        rows = getattr(prompts, "read", len(prompts))
        counts = {"rows": rows}
        first = {}
        for reason, origins in dropped.items():
            counts[reason] = len(origins)
            first[reason] = origins[0]
        content = {"rows": rows, "counts": counts, "first": first}
        content |= numbers({"prompt": lengths}, hashes, lambda i: prompts[i].origin)
        return content, hashes

    def __iter__(self) -> Iterator[Prompt]:
        return iter((*self.training, *self.held_out))

    def __getitem__(self, prompt_id: str) -> Prompt:
        return self._by_id[prompt_id]

    def check_verifier(self, required: bool = True) -> dict[str, Json]:
        """Check that each verifier can run here and can verify its prompts' rows, and try it on an answer.

        The main rank tries it, unless ``max_error_share`` allows every answer to fail.

        Returns:
            The components of verifiers for worker processes, by set of prompts: the key is empty for the run's
            environment, or its verifier if it judges any prompt.

        Raises:
            UserError: the verifier cannot run, rejects a row (the message then names the row and the field), or fails
                on an answer; or prompts have none, and it is ``required``.
        """
        cfg = self._cfg
        if cfg.environment is not None:
            environment: Any = OmegaConf.to_container(cfg.environment, resolve=True)
            return {"": self._check_environment(environment)}
        judged: dict[str, list[Prompt]] = {}
        for prompt in self:
            judged_by = prompt.set if prompt.set in self._verifiers else ""
            judged.setdefault(judged_by, []).append(prompt)
        components = dict(self._verifiers)
        if "" in judged and cfg.verifier is not None:
            components[""] = OmegaConf.to_container(cfg.verifier, resolve=True)
        elif "" in judged and required:
            raise UserError(UNJUDGED)
        for name, component in components.items():
            self._check_one(component, judged[name])
        return components

    def _check_one(self, component: Json, prompts: Sequence[Prompt]) -> None:
        """Check a verifier, and that it can judge answers to ``prompts``."""
        verifier = build(component)
        verifier.check()
        for prompt in prompts:
            with _naming(prompt, UserError, ValueError):
                verifier.check_row(prompt.row)
        if rank() == 0 and self._cfg.max_error_share < 1:
            rows = [prompt.row for prompt in prompts]
            try_out(component, rows, self._cfg.verify_timeout)

    def _check_environment(self, component: Any) -> Json:
        """Check the prompts' rows, begin a conversation as a test, and take the environment's tools."""
        with Environments(component, self._cfg.verify_timeout) as environments:
            arguments = dict(component)
            name = arguments.pop(config.COMPONENT)
            example = import_component(name)({}, **arguments)
            for prompt in self:
                with _naming(prompt, UserError, ValueError):
                    example.check_row(prompt.row)
            self.tools = tuple(environments.tools)
            first = next(iter(self))
            begun = environments.begin((first.id, 0), first.row).result()
            if self._cfg.max_error_share >= 1:
                return component
            if not isinstance(begun, Result):
                self._begun = begun
            elif begun.reward is None:
                raise UserError(f"environment {name} fails to begin: {begun.detail}")
        return component

    def check_model(self, decoder: "TransformerDecoder", name: str = "model") -> None:
        """Check that the model, or another of this ``name``, can answer every prompt.

        Raises:
            UserError: prompt and answer exceed the model's context, or the tokenizer belongs to another model.
        """
        self.check_length(decoder.max_seq_len, name)
        highest = max(map(max, self.tokens.values()))
        check_vocabulary(highest, decoder.tok_embeddings.num_embeddings)

    def check_length(self, context: float, name: str = "model") -> None:
        """Check that every prompt and its answer have at most ``context`` tokens, which the model ``name`` takes."""
        new = workload.longest_answer(self._cfg)
        what = "max_new_tokens"
        if self._cfg.environment is not None:
            what += " + max_environment_tokens"
        problems = []
        for prompt in self:
            length = len(self.tokens[prompt.id])
            if length + new > context:
                problems.append(
                    f"{prompt.origin}: {length} tokens and {what} {new} are more than the {context} that the {name} "
                    f"takes; lower {what} or remove the prompt"
                )
        refuse(problems)

    def requests(
        self, prompts: Sequence[Prompt], step: int, sampling: Sampling
    ) -> list[tuple[Request, Sampling]]:
        """Return the requests for ``samples_per_prompt`` answers per prompt; ``step`` is part of the answers' seeds."""
        requests = []
        for prompt in prompts:
            for sample in range(self._cfg.samples_per_prompt):
                requests.append((self._request(prompt, step, sample), sampling))
        return requests

    def evaluation_requests(self, sampling: Sampling) -> list[tuple[Request, Sampling]]:
        """Return the requests of an evaluation: per held-out prompt a greedy answer and ``eval_samples`` sampled ones.

        Every evaluation of a run has the same. Greedy answers have the length limit and stop strings of ``sampling``.
        """
        greedy = replace(sampling, temperature=0, top_k=None, top_p=None, min_p=None)
        requests = []
        for prompt in self.held_out:
            requests.append((self._request(prompt, "eval", GREEDY), greedy))
            for sample in range(self._cfg.eval_samples):
                requests.append((self._request(prompt, "eval", sample), sampling))
        return requests

    def _request(self, prompt: Prompt, step: int | str, sample: int) -> Request:
        seed = sample_seed(self._cfg.seed, step, prompt.own_id, sample)
        tokens = tuple(self.tokens[prompt.id])
        tools = (*prompt.tools, *self.tools)
        return Request(prompt.id, sample, seed, tokens, prompt.messages, tools)

    def questions(self) -> workload.Questions:
        """Describe the prompts and the answers that are expected, before any sampling."""
        lengths = [len(tokens) for tokens in self.tokens.values()]
        return workload.Questions(
            prompts=len(self.training),
            held_out=len(self.held_out),
            longest=max(lengths),
            mean=fmean(lengths),
            answer=self._cfg.max_new_tokens / 2,
            source="the run's prompts",
        )

    def fingerprint_held_out(self) -> str:
        """Hash the held-out prompts as :meth:`fingerprint` does, by set, in the sets' order, with their verifiers."""
        parts = []
        for name, prompts in self.sets.items():
            verifier = self._verifiers.get(name, "")
            parts.append(f"{name} {self.fingerprint(prompts)} {verifier}".strip())
        return ", ".join(parts)

    def fingerprint(self, prompts: Sequence[Prompt]) -> str:
        """Hash the ids, tokens and rows of ``prompts`` with SHA-256, in hex; their order does not matter."""
        lines = []
        for prompt in prompts:
            content = [prompt.id, self.tokens[prompt.id], prompt.row]
            lines.append(json.dumps(content, sort_keys=True, default=str))
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def given_samples(
    prompts: PromptSet, column: str, learner: "Learner", most: int
) -> dict[str, Sample]:
    """Return the answers in ``column`` of the training prompts' rows, by prompt id.

    ``most`` is the longest prompt with answer that model and teacher take, in tokens.

    Raises:
        UserError: a row has no text there, or the models cannot take it; the message names the row.
    """
    samples = {}
    for prompt in prompts.training:
        text = prompt.row.get(column)
        if not isinstance(text, str) or not text.strip():
            raise UserError(
                f"{prompt.origin}: given_answers is {column}, and it is {text!r} here; expected a text"
            )
        turns = [*prompt.messages, {"role": "assistant", "content": text}]
        tools = [*prompt.tools, *prompts.tools]
        tokens, labels = render_conversation(
            learner.tokenizer, turns, tools=tools or None, last_turn=True
        )
        prompt_tokens = prompts.tokens[prompt.id]
        begin = len(prompt_tokens)
        end = 0
        for position, label in enumerate(labels, start=1):
            if label >= 0:
                end = position
        if tokens[:begin] != prompt_tokens or end <= begin:
            raise UserError(
                f"{prompt.origin}: the chat template renders the prompt otherwise where an answer follows"
            )
        if end > most:
            raise UserError(
                f"{prompt.origin}: prompt and answer have {end} tokens, and model and teacher take {most}"
            )
        answer = tokens[begin:end]
        samples[prompt.id] = Sample(prompt.id, 0, 0, "stop", text, answer, [])
    return samples


@contextmanager
def _naming(prompt: Prompt, *errors: type[Exception]) -> Iterator[None]:
    """Context in which ``errors`` become a UserError that names the row of ``prompt``."""
    try:
        yield
    except errors as error:
        raise UserError(f"{prompt.origin}: {error}") from error


def _read(key: str, component: DictConfig | None) -> list[Prompt]:
    if component is None:
        return []
    prompts = config.instantiate(component, key=key)
    if not prompts or not all(isinstance(prompt, Prompt) for prompt in prompts):
        raise UserError(
            f"{key}: {component._component_} must return a non-empty list of rocm_ext.data.prompts.Prompt"
        )
    return prompts if isinstance(prompts, list) else list(prompts)


# ---- the choice of prompts


def choose_by_curriculum(
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

    - ``none``: the prompts asked least often. A hash breaks ties, a new one in every pass over the prompts.
    - ``informative``: a weighted draw without replacement (Efraimidis and Spirakis, 2006). A prompt's weight is
      p (1 - p), the variance of one answer's reward, with its estimated pass rate p; see :func:`pass_rate`. The
      estimate never reaches 0 or 1, so every prompt keeps a chance. A prompt without an estimate has the mean weight
      of the others.
    - ``easy_to_hard``: a curriculum by competence (arXiv:1903.09848). Prompts are ranked by estimated pass rate; one
      without it has the mean of the others. ``none`` chooses among the easiest prompts; their share grows from 20 % in
      the first step to all in the last, linearly.

    Args:
        prompts: ids of all training prompts.
        asked: by prompt, the steps and pass rates of its groups, oldest first; a rate is None if no answer of the group
            has a reward.
        step: number of this step, from 1.
        steps: number of steps of the run.
        count: number of prompts to choose.
        curriculum: ``none``, ``informative`` or ``easy_to_hard``.
        seed: the run's seed.
        exclude: prompts that this step asked already.

    Returns:
        Prompt ids; fewer than ``count`` if there are no more.
    """
    indices, hashes = _index(tuple(prompts))
    excluded = [indices[prompt] for prompt in exclude if prompt in indices]
    free = np.ones(len(prompts), bool)
    free[excluded] = False
    if curriculum == "informative":
        rates = _pass_rates(indices, asked)
        weights = _filled(rates * (1 - rates), 0.25)
        bits = _mixed(hashes, seed, "informative", step) >> np.uint64(11)
        uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
        keys = -np.log(uniform) / weights
        chosen = _lowest(np.flatnonzero(free), keys, count)
    else:
        if curriculum == "easy_to_hard":
            progress = min(1.0, (step - 1) / max(1, steps - 1))
            share = START + (1 - START) * progress
            easy = math.ceil(share * len(prompts) - 1e-9)
            rates = _filled(_pass_rates(indices, asked), 0.5)
            easiest_first = np.lexsort((_mixed(hashes, seed, "rank"), -rates))
            harder = easiest_first[max(easy, count + len(exclude)) :]
            free[harder] = False
        chosen = []
        candidates = np.flatnonzero(free)
        groups = [asked.get(prompts[index], ()) for index in candidates.tolist()]
        times_asked = np.fromiter(map(len, groups), np.int64)
        for times in np.unique(times_asked).tolist():
            missing = count - len(chosen)
            if missing > 0:
                equally_often = candidates[times_asked == times]
                keys = _mixed(hashes, seed, "pass", times)
                chosen += _lowest(equally_often, keys, missing)
    return [prompts[index] for index in chosen]


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
        last_asked: by prompt, the last cycle that asked it and the share of its answers that passed.
        cycle: number of this cycle, from 1.
        count: maximum number of prompts. None for all that qualify.
        skip_solved: skip prompts whose answers all passed, because they teach nothing more.
        retry_unsolved_after: number of cycles until a prompt without a passing answer is asked again (1: in the next
            cycle). None for never.
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

    The estimate is a weighted mean over the prompt's groups and a prior rate of 1/2. A group has half the weight of the
    next newer one, since the policy changes; the prior has a quarter of the newest group's weight. With one group of 8
    answers, this is the mean of a Beta distribution with a uniform prior.

    Args:
        history: steps and pass rates of the prompt's groups, see :func:`choose_by_curriculum`.

    Returns:
        A rate between 0 and 1, both excluded; None if no rate was measured.
    """
    total = weight = 0.0
    for _, rate in history[-NEWEST:]:
        if rate is not None:
            total, weight = total / 2 + rate, weight / 2 + 1
    return (total + PRIOR / 2) / (weight + PRIOR) if weight else None


def _pass_rates(indices: Mapping[str, int], asked: Asked) -> np.ndarray:
    """Return float64 [prompts]: estimated rates, NaN where there are none."""
    rates = np.full(len(indices), np.nan)
    for prompt, index in indices.items():
        rate = pass_rate(asked.get(prompt, ()))
        if rate is not None:
            rates[index] = rate
    return rates


def _filled(values: np.ndarray, default: float) -> np.ndarray:
    """Replace NaN by the mean of the other ``values``, or by ``default`` if all are NaN."""
    missing = np.isnan(values)
    measured = values[~missing]
    if len(measured):
        default = math.fsum(measured) / len(measured)
    return np.where(missing, default, values)


@lru_cache(maxsize=2)  # the prompts of a run stay the same
def _index(prompts: tuple[str, ...]) -> tuple[dict[str, int], np.ndarray]:
    """Return the prompts' indices and their hashes (uint64 [prompts])."""
    indices = {prompt: index for index, prompt in enumerate(prompts)}
    digests = b"".join(map(_digest, prompts))
    return indices, np.frombuffer(digests, np.uint64)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _mixed(hashes: np.ndarray, *salt: object) -> np.ndarray:
    """Hash ``hashes`` again, with ``salt``: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    text = "\0".join(map(str, salt))
    mixed = hashes ^ np.uint64(int.from_bytes(_digest(text), "little"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _lowest(indices: np.ndarray, keys: np.ndarray, count: int) -> list[int]:
    """Return up to ``count`` of ``indices`` with the lowest keys, in the order of keys."""
    values = keys[indices]
    if count < len(indices):
        near = np.argpartition(values, count)[:count]
        indices, values = indices[near], values[near]
    return indices[np.argsort(values)].tolist()
