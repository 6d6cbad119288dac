"""Engines of a run: sessions that stay open between phases."""

import gc
import logging
import weakref
from contextlib import contextmanager

import pytest
import torch

from rocm_ext.distributed.ranks import Ranks
from rocm_ext.model.attention import Slots
from rocm_ext.rl.engines import Engines
from rocm_ext.sampling import LocalEngine
from rocm_ext.sampling.slots import SlotMemory, slots_beside
from tests.kit.samples import Words, answers_of, ask, train
from tests.sampling.test_generation import GIB, TEXTS, WARM, assert_same, model

RANKS = Ranks(torch.device("cpu"))
PLENTY = RANKS, lambda: GIB, lambda: 0


def watch_slots(monkeypatch, tensors: list) -> None:
    """Collect weak references to every tensor of slots."""
    allocate = Slots.lazy_initialization

    def seen(self, *args):
        allocate(self, *args)
        tensors.extend(map(weakref.ref, (self.keys, self.values)))

    monkeypatch.setattr(Slots, "lazy_initialization", seen)


class Opened(LocalEngine):
    """Counts its open sessions."""

    count = now = 0

    @contextmanager
    def session(self, adapter=None):
        self.count += 1
        self.now += 1
        with super().session(adapter) as session:
            yield session
        self.now -= 1


class Server(Opened):
    """An engine whose sessions cannot follow training."""

    refreshes = False


@pytest.mark.parametrize("kind", [Opened, Server])
def test_sessions_of_servers_end_with_their_phase(kind):
    decoder = model("qwen2", "lora")
    engine = kind(decoder=decoder, tokenizer=Words(), free_memory=lambda: GIB)
    local = Opened(decoder=decoder, tokenizer=Words(), free_memory=lambda: GIB)
    engines = Engines(engine, local, *PLENTY)
    with engines.keep_open():
        for phase in ("sample", "eval", "sample", "eval"):
            with engines.session(phase, None) as session:
                answers_of(session, ask(TEXTS[:2]), WARM)
        assert (local.count, local.now) == (1, 1)
        assert (engine.count, engine.now) == ((2, 0) if kind is Server else (1, 1))
    assert local.now == engine.now == 0
    with engines.session("sample", None) as session:
        answers_of(session, ask(TEXTS[:2]), WARM)
    assert (engine.count, engine.now) == ((3, 0) if kind is Server else (2, 0))


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(("training", "stays", "told"), [
    (1_000_000, "cache", ""), (3_000_000, "layout", "the cache is freed"), (5_800_000, "nothing", "copies them"),
])  # fmt: skip
def test_what_stays_open_leaves_training_its_memory(training, stays, told, monkeypatch, caplog):
    """The device has 6,000,000 bytes. The layout takes 360,000 of them, and the cache of 16 slots 4,194,304."""
    caplog.set_level(logging.INFO, "rocm_ext")
    decoder, caches, opened = model("qwen2", "lora"), [], []
    watch_slots(monkeypatch, caches)

    def taken() -> int:
        gc.collect()
        return sum(tensor().nbytes for tensor in caches if tensor() is not None)

    def free() -> int:
        return 6_000_000 - taken() - 360_000 * engine.now

    engine = Opened(decoder=decoder, tokenizer=Words(), free_memory=free, slots=16)
    engines = Engines(engine, engine, RANKS, free, lambda: training)
    with engines.keep_open():
        for step in range(3):
            train(decoder, step)
            with engines.session("sample", None) as session:
                found = answers_of(session, ask(TEXTS, 4, cycle=step), WARM)
                assert session.stats()["tokens"] == sum(len(c.tokens) for c in found.values())
            opened.append((engine.now, taken()))
            with LocalEngine(
                decoder=decoder, tokenizer=Words(), free_memory=lambda: GIB
            ).session() as new:
                assert_same(found, answers_of(new, ask(TEXTS, 4, cycle=step), WARM))
    assert opened == 3 * [{"cache": (1, 4_194_304), "layout": (1, 0), "nothing": (0, 0)}[stays]]
    assert engine.count == (3 if stays == "nothing" else 1)
    assert told in caplog.text
    assert (
        caplog.text.count("fit into memory together")
        == {"cache": 0, "layout": 1, "nothing": 2}[stays]
    )


def test_slots_leave_training_its_memory_where_that_costs_few():
    memory = SlotMemory(cache=1000, step=100, prefill=500)
    assert slots_beside(memory, 128, 200_000, 0) == 128
    assert slots_beside(memory, 128, 200_000, 70_000) == 128
    assert slots_beside(memory, 128, 200_000, 80_000) == 120
    assert slots_beside(memory, 128, 200_000, 90_000) == 128  # 110 would be fewer than nine tenths
    assert slots_beside(memory, 128, 110_000, 0) == 100
    assert slots_beside(memory, 128, 110_000, 105_000) == 100
