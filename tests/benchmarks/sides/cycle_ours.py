"""Our RAFT recipe, with a clock around generation, training steps and whole cycles: ``… cycle_ours --config NAME …``.

It begins unasked: the recipe may start the process anew, and an order that was heard would be lost.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from rocm_ext.recipes import raft_rocm

from rocm_ext.generation.local import LocalSession
from rocm_ext.train.trainer import Trainer
from tests.benchmarks.sides.talk import hear, pipe

SECONDS = {"generation": 0.0, "training": 0.0, "cycles": 0.0}


def timed(what: str, function: Callable) -> Callable:
    """``function``, its seconds added up under ``what``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            SECONDS[what] += time.perf_counter() - began

    return call


def timed_iterator(what: str, function: Callable) -> Callable:
    """A generator function, with the seconds that its consumer waits added up."""

    def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
        step = timed(what, lambda items: next(items, None))
        items = function(*args, **kwargs)
        while (item := step(items)) is not None:
            yield item

    return call


if __name__ == "__main__":
    LocalSession.generate = timed_iterator("generation", LocalSession.generate)  # type: ignore[method-assign]
    Trainer.train_step = timed("training", Trainer.train_step)  # type: ignore[method-assign]
    raft_rocm.RAFT.cycle = timed("cycles", raft_rocm.RAFT.cycle)  # type: ignore[method-assign]
    try:
        raft_rocm.main()
    except SystemExit as left:
        if left.code:
            raise
    hear()
    pipe().send(SECONDS)
