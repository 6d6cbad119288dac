"""Between GPUs: copies from one to another, and all-reduce over all of them."""

import multiprocessing
import os
import threading
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed

from rocm_ext.bench.clock import Times
from rocm_ext.bench.clock import measure as timed
from rocm_ext.bench.clock import wait as finish
from rocm_ext.bench.context import Bench

_SIZE = {"cuda": 256 * 2**20, "cpu": 2**20}  # bytes; a layer of a 32B in bf16 has a gigabyte
_START = "spawn"  # a fork cannot use a GPU that its parent has opened
_STARTING = 120  # seconds to import torch


def measure(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second that a GPU receives: of a copy, or in an all-reduce by a ring.

    An all-reduce of s bytes over n ranks counts 2 s (n - 1) / n, as the bus bandwidth of nccl-tests does.
    """
    kind = bench.device.type
    bench.require(2 * _SIZE[kind])
    if values["what"] == "all-reduce":
        ranks = values["ranks"]
        times = _all_reduce(kind, ranks, bench.spec.seconds)
        return {**times.rate(2 * _SIZE[kind] * (ranks - 1) / ranks), "unit": "B/s"}
    first, second = (torch.device(kind, index) if kind == "cuda" else bench.device for index in range(2))
    here = torch.zeros(_SIZE[kind], dtype=torch.uint8, device=first)
    there = torch.empty(_SIZE[kind], dtype=torch.uint8, device=second)
    times = timed(lambda: there.copy_(here), second, seconds=bench.spec.seconds)
    direct = kind == "cuda" and torch.cuda.can_device_access_peer(first, second)  # otherwise through the host
    return {**times.rate(_SIZE[kind]), "unit": "B/s", "direct": direct}


def _all_reduce(kind: str, ranks: int, seconds: float) -> Times:
    """Time an all-reduce in processes of its own."""
    context: Any = multiprocessing.get_context(_START)
    receive, send = context.Pipe(duplex=False)
    with TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        processes = [
            context.Process(target=_rank, args=(rank, ranks, meeting, kind, seconds, send), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        send.close()  # so that the end of all ranks ends the wait
        try:
            found = receive.recv()
        except EOFError:
            raise RuntimeError(f"no rank of the all-reduce reported; exit codes {_codes(processes)}") from None
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    return found


def _codes(processes: list[Any]) -> list[int | None]:
    for process in processes:
        process.join(10)
    return [process.exitcode for process in processes]


def _rank(rank: int, ranks: int, meeting: str, kind: str, seconds: float, send: Connection) -> None:
    """All-reduce with the other ranks; the first rank sends the times."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_STARTING),
    )
    tensor = torch.zeros(_SIZE[kind] // 4, device=device)

    def once() -> float:
        began = time.perf_counter()
        distributed.all_reduce(tensor)
        finish(device)
        return time.perf_counter() - began

    *_, each = (once() for _ in range(3))
    count = torch.tensor([min(1000, max(5, int(seconds / each)))], device=device)
    distributed.broadcast(count, 0)  # all ranks must call equally often
    times = [once() for _ in range(int(count))]
    if rank == 0:
        send.send(Times.of(times))
    distributed.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when the one that started it is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
