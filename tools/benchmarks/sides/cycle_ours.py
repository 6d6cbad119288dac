"""Time generation, training steps and cycles of our RAFT recipe: ``… cycle_ours --config NAME …``.

It starts without an order, because the recipe may restart the process, which would lose the order.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from rocm_ext.recipes import raft_rocm

from rocm_ext.sampling.local import LocalSession
from rocm_ext.train.loop import Training
from tools.benchmarks.sides.talk import hear, pipe

SECONDS = {"generation": 0.0, "training": 0.0, "cycles": 0.0}


def timed(what: str, function: Callable) -> Callable:
    """Wrap ``function`` so that its seconds add up under ``what``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            SECONDS[what] += time.perf_counter() - began

    return call


def timed_iterator(what: str, function: Callable) -> Callable:
    """Wrap a generator function so that the seconds its consumer waits add up under ``what``."""

    def call(*args: Any, **kwargs: Any) -> Iterator[Any]:
        step = timed(what, lambda items: next(items, None))
        items = function(*args, **kwargs)
        while (item := step(items)) is not None:
            yield item

    return call


if __name__ == "__main__":
    LocalSession.generate = timed_iterator("generation", LocalSession.generate)  # type: ignore[method-assign]
    Training.train_step = timed("training", Training.train_step)  # type: ignore[method-assign]
    raft_rocm.RAFT.step = timed("cycles", raft_rocm.RAFT.step)  # type: ignore[method-assign]
    try:
        raft_rocm.main()
    except SystemExit as left:
        if left.code:
            raise
    hear()
    pipe().send(SECONDS)
