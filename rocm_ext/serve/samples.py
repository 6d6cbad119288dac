"""Sampling calls of the protocol: what they ask, and their answers, many calls in one batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from tinker.types import SampleRequest
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.losses import Objective
from rocm_ext.losses.objective import Columns, Terms
from rocm_ext.sampling import Completion, Request, Sampling, sample_seed
from rocm_ext.serve.adapters import Adapters, Sampler
from rocm_ext.serve.protocol import NOTHING, Sampled, TopK, sampled, text_tokens
from rocm_ext.train.scoring import compute, score
from rocm_ext.training.model import Model

MOST_SAMPLES = 4096
MOST_TOP = 1024
_GREEDY = 1e-5  # temperatures below are greedy, as in vLLM: divided by them, logits overflow
# keys with their usual value, and what to do
_NOT_SERVED = {
    "target_prompt_logprobs": (None, ""),
    "prompt_alt_tokens_k": (0, ""),
    # recipes of tinker-cookbook ask this by default, so the message says what to change there
    "record_stability_info": (
        None,
        ": only the hosted service records what loss_fn stable_reinforce needs; take another loss_fn, such as "
        "importance_sampling or ppo",
    ),
}


@dataclass(frozen=True)
class Asked:
    """A sampling call.

    Attributes:
        sampler: the adapter.
        tokens: the prompt.
        samples: number of answers.
        sampling: how to draw them, except for their length.
        most: most tokens of an answer; None for as many as the model takes.
        seed: determines the answers.
        prompt_logprobs: whether the prompt's log-probs are wanted, of its ``last`` tokens or of all.
        prompt_top, sample_top: number of most probable tokens wanted at each position.
    """

    sampler: Sampler
    tokens: tuple[int, ...]
    samples: int
    sampling: Sampling
    most: int | None
    seed: int
    prompt_logprobs: bool
    last: int | None
    prompt_top: int
    sample_top: int

    @property
    def kind(self) -> tuple[Sampler, Sampling]:
        """Calls of one kind share a batch."""
        return self.sampler, self.sampling


def read(
    request: SampleRequest, name: str, sampler: Sampler, vocabulary: int, window: int
) -> Asked:
    """Read a sampling call; ``name``, the request's id, determines answers without a seed.

    Raises:
        UserError: it asks for what is not served, or a value is out of range; the message names it.
    """
    for key, (usual, advice) in _NOT_SERVED.items():
        if getattr(request, key) not in (usual, False, None):
            raise UserError(f"{key} is not served{advice}")
    tokens = text_tokens(request.prompt, vocabulary)
    given = request.sampling_params
    _check("num_samples", request.num_samples, 1, MOST_SAMPLES)
    for key in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        _check(key, getattr(request, key), 0, min(MOST_TOP, vocabulary))
    room = window - len(tokens)
    if room < 1:
        raise UserError(f"the prompt has {len(tokens)} tokens; the model takes {window - 1}")
    if given.max_tokens is not None:
        _check("max_tokens", given.max_tokens, 1, room)
    if request.prompt_logprobs_last_n is not None:
        _check("prompt_logprobs_last_n", request.prompt_logprobs_last_n, 1, max(1, len(tokens) - 1))
    texts, ids = _stops(given.stop)
    sampling = Sampling(
        1,
        temperature=0.0 if 0 <= given.temperature < _GREEDY else given.temperature,
        top_k=None if given.top_k == -1 else given.top_k,
        top_p=None if given.top_p == 1 else given.top_p,
        stop_strings=texts,
        stop_tokens=ids,
    )
    seed = sample_seed(0, "request", name, 0) if given.seed is None else given.seed
    return Asked(
        sampler,
        tokens,
        request.num_samples,
        sampling,
        given.max_tokens,
        seed,
        bool(request.prompt_logprobs),
        request.prompt_logprobs_last_n,
        request.topk_prompt_logprobs,
        request.topk_sample_logprobs,
    )


def _stops(stop: Any) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """Return the texts and the ids that end an answer; None for the tokenizer's ids."""
    if stop is None:
        return (), None
    if isinstance(stop, str):
        return (stop,), None
    stop = list(stop)
    if all(isinstance(item, str) for item in stop) and stop:
        return tuple(stop), None
    if all(isinstance(item, int) for item in stop):
        return (), tuple(stop)  # [] stops at nothing
    raise UserError("stop must be texts or ids of tokens, not both")


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UserError(f"{name} is {value}; expected {least} to {most}")


def answer(adapters: Adapters, calls: Sequence[Asked]) -> list[bytes]:
    """Answer calls of one kind in one batch."""
    model = adapters.ready(calls[0].sampler)
    requests, places = _requests(calls, adapters.window)
    answers: dict[tuple[int, int], Completion] = {}
    for batch in _batches(requests, adapters.window):
        longest = max(request.most or 1 for request in batch)
        for completion in model.generate(batch, replace(calls[0].sampling, max_new_tokens=longest)):
            answers[places[completion.request.key]] = completion
    results: list[bytes] = []
    for number, call in enumerate(calls):
        own = [answers[number, sample] for sample in range(call.samples)]
        results.append(_result(model, call, own))
    return results


def _requests(
    calls: Sequence[Asked], window: int
) -> tuple[list[Request], dict[tuple[str, int], tuple[int, int]]]:
    """Return the engine's requests, and for the key of each the number of its call and of the sample in it.

    Calls with the same prompt, as of a group of episodes, become samples of one prompt, which is computed once.
    """
    by_prompt: dict[tuple[int, ...], list[Request]] = {}
    places = {}
    for number, call in enumerate(calls):
        length = call.most or window - len(call.tokens)
        same = by_prompt.setdefault(call.tokens, [])
        name = str(len(by_prompt)) if not same else same[0].prompt_id
        for sample in range(call.samples):
            seed = sample_seed(call.seed, "sample", "", sample)
            request = Request(name, len(same), seed, call.tokens, most=length)
            same.append(request)
            places[request.key] = number, sample
    return list(chain.from_iterable(by_prompt.values())), places


def _batches(requests: Sequence[Request], window: int) -> list[list[Request]]:
    """Cut requests to batches in which the longest prompt and the longest answer fit the model together."""
    batches: list[list[Request]] = []
    prompt = length = 0
    for request in requests:
        prompt = max(prompt, len(request.tokens))
        length = max(length, request.most or 1)
        if not batches or prompt + length > window:
            batches.append([])
            prompt, length = len(request.tokens), request.most or 1
        batches[-1].append(request)
    return batches


def _result(model: Model, call: Asked, completions: Sequence[Completion]) -> bytes:
    """Return the answer of a call in protobuf."""
    sequences = []
    for completion in completions:
        top = None
        if call.sample_top:
            tokens = [*call.tokens, *completion.tokens]
            found = _most_probable(model, tokens, len(completion.tokens), call.sample_top)
            begin = len(call.tokens)
            top = TopK(found.ids[begin:], found.logprobs[begin:])
        stopped = completion.finish_reason == "stop"
        sequences.append(Sampled(completion.tokens, completion.logprobs, stopped, top))
    logprobs = top = None
    if call.prompt_logprobs:
        logprobs = _prompt_logprobs(model, call.tokens, call.last)
    if call.prompt_top:
        top = _most_probable(model, call.tokens, call.last, call.prompt_top)
    return sampled(sequences, logprobs, top)


def _prompt_logprobs(model: Model, tokens: Sequence[int], last: int | None) -> np.ndarray:
    """Return the log-probs of a prompt's tokens, [n] fp32: NaN for the first, and before the ``last`` ones."""
    scored = np.full(len(tokens), np.nan, np.float32)
    rows = _row(tokens, last)
    if rows is not None:
        (values,) = score(model.learner, rows)
        scored[len(tokens) - len(values) :] = values
    return scored


def _most_probable(model: Model, tokens: Sequence[int], last: int | None, k: int) -> TopK:
    """Return the k most probable tokens of each position, [n, k]: nothing for the first, and before the ``last``."""
    ids = np.zeros((len(tokens), k), np.int32)
    logprobs = np.full((len(tokens), k), NOTHING, np.float32)
    rows = _row(tokens, last)
    if rows is not None:
        objective = _MostProbable(k)
        compute(model.learner, rows, objective)
        found = torch.cat([values for values, _ in objective.found]).cpu().numpy()
        names = torch.cat([names for _, names in objective.found]).cpu().numpy()
        logprobs[len(tokens) - len(found) :] = found
        ids[len(tokens) - len(found) :] = names
    return TopK(ids, logprobs)


def _row(tokens: Sequence[int], last: int | None) -> Rows | None:
    """Return a row whose labels are the ``last`` tokens but the first of all; None if there is none."""
    ids = np.asarray(tokens, np.int32)
    labels = ids.copy()
    masked = 1 if last is None else max(1, len(ids) - last)
    labels[:masked] = IGNORE
    if masked >= len(ids):
        return None
    return Rows([ids], [labels], [(len(ids),)], {"rows": 1}, {})


class _MostProbable(Objective):
    """Records the most probable tokens of every label's position; its value is 0."""

    over_vocabulary = True

    def __init__(self, k: int) -> None:
        super().__init__()
        self._k = k
        self.found: list[tuple[Tensor, Tensor]] = []

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Never called: see :meth:`compare`."""
        raise NotImplementedError

    def compare(self, logits: Tensor, other: Any, gradient: bool) -> Terms:
        """Record the tokens of a chunk."""
        best = logits.float().log_softmax(dim=-1).topk(self._k)
        self.found.append((best.values, best.indices))
        return torch.zeros(len(logits), device=logits.device), None
