"""A verifier's trial before a run samples anything."""

from collections.abc import Mapping, Sequence
from typing import Any

from rocm_ext.errors import UserError
from rocm_ext.importing import COMPONENT
from rocm_ext.verifiers.base import Result
from rocm_ext.verifiers.selfcheck import GOLD_FIELDS
from rocm_ext.verifiers.workers import Pool

MADE_UP = "42"


def try_out(node: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], timeout: float) -> None:
    """Judge an answer to the first row, in a process of its own: the row's right answer, or one that is made up.

    If that is an ERROR, it may be the row's fault; answers to a row in the middle and to the last one decide.

    Args:
        node: the verifier, as for :func:`rocm_ext.verifiers.build`.
        rows: the prompts' rows.
        timeout: seconds for one call of the verifier.

    Raises:
        UserError: the verifier fails on all of them; the message names the verifier and has its first reason.
    """
    reasons = []
    with Pool(node, workers=1, timeout=timeout) as pool:
        for index in sorted({0, len(rows) // 2, len(rows) - 1}):
            result = _judged(pool, rows[index])
            if result.reward is not None:
                return
            reasons.append(result.detail)
    raise UserError(f"verifier {_named(node)} fails on a trial answer: {reasons[0]}")


def _judged(pool: Pool, row: Mapping[str, Any]) -> Result:
    gold = next((row[name] for name in GOLD_FIELDS if row.get(name) is not None), MADE_UP)
    if pool.groups:
        return pool.submit_group([str(gold), MADE_UP], row).result()[0]
    return pool.submit(str(gold), row).result()


def _named(node: Mapping[str, Any]) -> str:
    function = node.get("function")
    return function if isinstance(function, str) else str(node[COMPONENT])
