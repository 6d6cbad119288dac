"""Loading: how fast micro-batches reach the device, by number of workers and pinning."""

import time
from statistics import median
from typing import Any

import numpy as np

from rocm_ext.bench.clock import wait
from rocm_ext.bench.context import Bench
from rocm_ext.data.batches import Layout, StepLoader, Steps
from rocm_ext.data.rows import Rows

_STEPS, _PER_STEP, _STARTING = 40, 32, 4  # steps, rows per step, and first steps, which wait for the workers to start


def measure(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second that reach the device."""
    rates = []
    for repeat in range(3):
        rows = random_rows(_STEPS * _PER_STEP, 50, 300, bench.shape.tok_embeddings.num_embeddings, seed=repeat)
        layout = Layout(rank=0, ranks=1, tokens_per_micro_batch=4096, packed=True, pad_id=0)
        loader = StepLoader(rows, Steps(len(rows), _PER_STEP), layout, values["num_workers"], values["pin_memory"])
        tokens, began = 0, 0.0
        for step, update in enumerate(loader.range(0, _STEPS)):
            if step == _STARTING:
                tokens, began = 0, time.perf_counter()
            for batch in update.batches:
                batch.to(bench.device)
                tokens += batch.real_tokens
            wait(bench.device)
        rates.append(tokens / (time.perf_counter() - began))
    return {"value": median(rates), "low": min(rates), "high": max(rates), "unit": "tokens/s"}


def random_rows(count: int, shortest: int, longest: int, vocabulary: int, seed: int = 0) -> Rows:
    """Rows of random tokens, all of them trained on, of lengths from ``shortest`` to ``longest``."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, count)
    tokens = [rng.integers(0, vocabulary, length, dtype=np.int32) for length in lengths]
    return Rows(tokens, tokens, [(int(length),) for length in lengths], {})
