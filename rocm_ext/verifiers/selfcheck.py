"""Check that a verifier works: on the gold answers of its data, and on a trial answer before a run samples."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean

from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import COMPONENT, Component
from rocm_ext.base.types import Row
from rocm_ext.verifiers.base import Result, Verdict
from rocm_ext.verifiers.build import build
from rocm_ext.verifiers.workers import Pool

GOLD_FIELDS = ("solution", "completion", "canonical_solution", "answer")
TIMEOUT = 60.0  # seconds for one verification
SHOWN = 10  # the most failures in a summary
MADE_UP = "42"  # an answer to a row without a gold one


@dataclass(frozen=True)
class Summary:
    """The verdicts on the rows' gold answers.

    Attributes:
        rows: number of rows checked.
        verdicts: number of answers by verdict.
        mean_reward: mean over the answers with a reward, which excludes ERROR; None if there are none.
        failures: (origin, result) of the first ten answers that are not CORRECT.
    """

    rows: int
    verdicts: Counter[Verdict]
    mean_reward: float | None
    failures: list[tuple[str, Result]]


def self_check(
    node: Component,
    rows: Iterable[tuple[str, Row]],
    gold_field: str | None = None,
    workers: int = 2,
    limit: int | None = None,
) -> Summary:
    """Verify the gold answer of each row.

    Args:
        node: the verifier, as for :func:`rocm_ext.verifiers.build`.
        rows: (origin, row) pairs; messages name the origin, such as ``file:line``.
        gold_field: the field with the gold answer, by default the row's first of solution, completion,
            canonical_solution and answer.
        workers: number of processes.
        limit: number of rows to check, by default all.

    Raises:
        UserError: the verifier cannot be built or run here, or a row lacks a field or a gold answer.
    """
    verifier = build(node)
    verifier.check()
    names = GOLD_FIELDS if gold_field is None else (gold_field,)
    with Pool(node, workers, TIMEOUT) as pool:
        futures = []
        for origin, row in islice(rows, limit):
            try:
                verifier.check_row(row)
                gold = _gold(row, names)
                if gold is None:
                    raise UserError(
                        f"no gold answer in {' or '.join(names)}; the row has {', '.join(row)}"
                    )
            except (UserError, ValueError) as error:
                raise UserError(f"{origin}: {error}") from error
            futures.append((origin, pool.submit(gold, row)))
        results = [(origin, future.result()) for origin, future in futures]
    if not results:
        raise UserError("there are no rows to check the verifier with")
    verdicts = Counter(result.verdict for _, result in results)
    rewards = [result.reward for _, result in results if result.reward is not None]
    failures = [
        (origin, result) for origin, result in results if result.verdict is not Verdict.CORRECT
    ]
    mean_reward = fmean(rewards) if rewards else None
    return Summary(len(results), verdicts, mean_reward, failures[:SHOWN])


def try_out(node: Component, rows: Sequence[Row], timeout: float) -> None:
    """Judge an answer to the first row in a worker: the row's gold answer, or one that is made up.

    An ERROR may be the row's fault, so the middle and the last row are tried, too. If all are ERROR, a UserError names
    the verifier and the first reason.
    """
    reasons = []
    with Pool(node, workers=1, timeout=timeout) as pool:
        for index in sorted({0, len(rows) // 2, len(rows) - 1}):
            row = rows[index]
            gold = _gold(row, GOLD_FIELDS) or MADE_UP
            if pool.groups:
                result = pool.submit_group([gold, MADE_UP], row).result()[0]
            else:
                # a worker judges it, which proves that rows can be sent
                result = pool.submit(gold, row, to_worker=True).result()
            if result.reward is not None:
                return
            reasons.append(result.detail)
    function = node.get("function")
    name = function if isinstance(function, str) else node[COMPONENT]
    raise UserError(f"verifier {name} fails on a trial answer: {reasons[0]}")


def _gold(row: Row, names: Sequence[str]) -> str | None:
    for name in names:
        if row.get(name) is not None:
            return str(row[name])
    return None
