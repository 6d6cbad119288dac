"""Check that servers sample with the adapter that they have loaded.

A server answers a few prompts. The check compares its log-probs with ours for the same tokens: with the new adapter,
with the one before, and without any. It uses sampled tokens, because servers compute a prompt's log-probs without the
output layer's adapter (vLLM issue 51594) or from a stale cache (vLLM issue 42019).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.base.log import log
from rocm_ext.rl.records import Sample
from rocm_ext.rl.selection import to_rows
from rocm_ext.sampling import Completion, Request, Sampling
from rocm_ext.train.learner import Learner
from rocm_ext.train.scoring import reference, score

_ANSWERS, _TOKENS = 6, 32  # about 200 log-probs tell adapters apart whose log-probs differ by a hundredth
_FAR = 0.1  # nats per token; rounding to bf16 on both sides gives about 0.01
_SURE = 3.0  # standard errors
_LEAST = 0.003  # nats per token; adapters that differ less do not stop a run, because rounding may hide the difference
_FEWEST = 8  # tokens that have a standard error


class ServerCheck:
    """Checks the adapters of sessions on servers.

    Args:
        learner: the model, set up.
        warn_unclear: whether to warn of a server whose log-probs do not show which adapter it has.
    """

    def __init__(self, learner: Learner, warn_unclear: bool = True) -> None:
        self._learner, self._warn_unclear = learner, warn_unclear
        self._warned: set[tuple[str, str]] = set()

    def check(
        self,
        session: Any,
        requests: Sequence[tuple[Request, Sampling]],
        adapter: Path,
        earlier: tuple[str, Mapping[str, Tensor]] | None,
    ) -> None:
        """Check that the servers of ``session`` sample with ``adapter``.

        Every rank calls this, because sharded weights are gathered from all. The main rank asks the servers.

        Args:
            session: a session with ``ask_each``.
            requests: requests with the prompts to ask, the same on all ranks.
            adapter: folder of the adapter that the session has loaded; the learner has the same one.
            earlier: name and weights of an adapter that a server may have kept; None for the first adapter.

        Raises:
            UserError: a server samples with the earlier adapter, or without an adapter.
        """
        ranks = self._learner.runtime.ranks
        asked = list({request.tokens: request for request, _ in requests}.values())[:_ANSWERS]
        sampling = Sampling(min(_TOKENS, requests[0][1].max_new_tokens))
        given = ranks.on_main(lambda: self._usable(session.ask_each(asked, sampling)))
        answers = [answer for of_server in given.values() for answer in of_server]
        if not answers:
            return
        ours = self._logprobs(answers)
        with reference(self._learner):
            others = {"without an adapter": self._logprobs(answers)}
        if earlier is not None:
            name, state = earlier
            with reference(self._learner, state, name):
                others[f"with {name}"] = self._logprobs(answers)
        ranks.on_main(lambda: self._compare(given, adapter, ours, others))

    def _usable(self, given: Mapping[str, Sequence[Completion]]) -> dict[str, list[Completion]]:
        usable = {}
        for url, answers in given.items():
            usable[url] = [c for c in answers if len(c.logprobs) == len(c.tokens) > 0]
            if answers and not usable[url]:
                self._warn(url, "returns no log-probs with token ids, so nothing checks that it uses new adapters")
        return usable

    def _logprobs(self, answers: Sequence[Completion]) -> Tensor:
        """Return the log-probs of the tokens of ``answers``, end to end, on the CPU."""
        prompts = {answer.request.prompt_id: answer.request.tokens for answer in answers}
        rows, _ = to_rows([Sample.of(answer) for answer in answers], prompts)
        return torch.from_numpy(np.concatenate(score(self._learner, rows))).double()

    def _compare(
        self, given: Mapping[str, Sequence[Completion]], adapter: Path, ours: Tensor, others: Mapping[str, Tensor]
    ) -> None:
        start = 0
        for url, answers in given.items():
            served = torch.tensor([value for answer in answers for value in answer.logprobs], dtype=torch.float64)
            rows = slice(start, start + len(served))
            start += len(served)
            if len(served) >= _FEWEST:
                before = {name: values[rows] for name, values in others.items()}
                self._judge(url, adapter, served, ours[rows], before)

    def _judge(self, url: str, adapter: Path, served: Tensor, ours: Tensor, others: Mapping[str, Tensor]) -> None:
        """Compare a server's log-probs with ours under ``adapter`` and under ``others``."""
        far, tokens = _gap(served, ours), f"its log-probs of {len(served)} tokens differ"
        shares = {other: _share(served, ours, before) for other, before in others.items()}
        stale = [other for other, (_, high) in shares.items() if high < 0.5 and _gap(ours, others[other]) >= _LEAST]
        unclear = [other for other, (low, _) in shares.items() if low <= 0.5 and _gap(ours, others[other])]
        for other in sorted(stale or unclear, key=lambda other: _gap(served, others[other]))[:1]:
            figures = (
                f"{tokens}, in nats per token, by {far:.2g} from ours with {adapter} and by "
                f"{_gap(served, others[other]):.2g} from ours {other}"
            )
            if stale:
                raise UserError(
                    f"{url} does not sample with the adapter that it has loaded: {figures}. Restart this server, then "
                    "continue with resume_from_checkpoint=True"
                )
            if self._warn_unclear:
                self._warn(url, f"does not show clearly which adapter it samples with: {figures}")
        if far > _FAR:
            self._warn(
                url,
                f"serves something else than our model: {tokens} by {far:.2g} nats per token from ours. Its weights "
                "may be quantised or of another model, or its chat template differs",
            )

    def _warn(self, url: str, what: str) -> None:
        kind = (url, what[:20])
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s %s", url, what)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())


def _share(served: Tensor, new: Tensor, old: Tensor) -> tuple[float, float]:
    """Estimate the share s in ``served = old + s (new - old) + noise``: 1 with the new adapter, 0 with the old one.

    Returns:
        The interval of s: least squares, with standard errors that allow for unequal noise (HC1, White 1980).
    """
    step, seen = new - old, served - old
    if not (square := float(step @ step)):
        return -math.inf, math.inf
    share = float(seen @ step) / square
    noise = (seen - share * step) * step
    error = math.sqrt(float(noise @ noise) * len(step) / (len(step) - 1)) / square
    return share - _SURE * error, share + _SURE * error
