"""Whether a verifier accepts the right answers in its data."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rocm_ext.errors import UserError
from rocm_ext.verifiers.base import Result, Verdict
from rocm_ext.verifiers.build import build
from rocm_ext.verifiers.workers import Pool

GOLD_FIELDS = ("solution", "completion", "canonical_solution", "answer")


@dataclass
class Summary:
    """The verdicts on the rows' gold answers.

    Attributes:
        rows: rows checked.
        verdicts: how many answers got each verdict.
        mean_reward: over the answers with a reward, which ERROR has not; None if there are none.
        failures: (origin, result) of the first answers that are not CORRECT.
    """

    rows: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    mean_reward: float | None = None
    failures: list[tuple[str, Result]] = field(default_factory=list)


def self_check(
    node: Mapping[str, Any],
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    gold_field: str | None = None,
    workers: int = 2,
    limit: int | None = None,
    timeout: float = 60.0,
    show: int = 10,
) -> Summary:
    """Verify each row's own gold answer.

    Args:
        node: the verifier, as for :func:`rocm_ext.verifiers.build`.
        rows: (origin, row) pairs; messages name the origin, such as ``file:line``.
        gold_field: the field with the gold answer; None: the first of solution, completion, canonical_solution and
            answer that a row has.
        workers: processes.
        limit: check the first ``limit`` rows only; None: all.
        timeout: seconds for one verification as a whole.
        show: keep at most this many failures.

    Raises:
        UserError: the verifier cannot be built or cannot run here, or a row lacks what it needs or a gold answer.
    """
    verifier = build(node)
    verifier.check()
    summary = Summary()
    total, counted = 0.0, 0
    waiting: deque[tuple[str, Future[Result]]] = deque()

    def take() -> None:
        nonlocal total, counted
        origin, future = waiting.popleft()
        result = future.result()
        summary.rows += 1
        summary.verdicts[result.verdict] += 1
        if result.reward is not None:
            total += result.reward
            counted += 1
        if result.verdict is not Verdict.CORRECT and len(summary.failures) < show:
            summary.failures.append((origin, result))

    with Pool(node, workers, timeout) as pool:
        for index, (origin, row) in enumerate(rows):
            if limit is not None and index >= limit:
                break
            try:
                verifier.check_row(row)
                gold = _gold(row, gold_field)
            except (UserError, ValueError) as error:
                raise UserError(f"{origin}: {error}") from error
            waiting.append((origin, pool.submit(gold, row)))
            if len(waiting) > 4 * workers * pool.batch_size:  # rows may not fit into memory
                take()
        while waiting:
            take()
    if not summary.rows:
        raise UserError("there are no rows to check the verifier with")
    summary.mean_reward = total / counted if counted else None
    return summary


def _gold(row: Mapping[str, Any], name: str | None) -> str:
    names = GOLD_FIELDS if name is None else (name,)
    found = next((key for key in names if row.get(key) is not None), None)
    if found is None:
        raise ValueError(f"no gold answer in {' or '.join(names)}; the row has {', '.join(row)}")
    return row[found] if isinstance(row[found], str) else str(row[found])
