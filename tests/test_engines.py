"""Engines of a run: sessions that stay open between phases."""

from contextlib import contextmanager

import pytest
import torch

from rocm_ext.generation import LocalEngine
from rocm_ext.ranks import Ranks
from rocm_ext.rollouts.engine import Engines
from tests.test_generation import GIB, TEXTS, WARM, Words, ask, assert_same, model, of, train

RANKS = Ranks(torch.device("cpu"))


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


def test_a_session_stays_open_for_a_run():
    decoder = model("qwen2", "lora")
    engine = Opened(decoder=decoder, tokenizer=Words(), free_memory=lambda: GIB)
    engines = Engines(engine, engine, RANKS)
    with engines.keep_open():
        for step, phase in enumerate(["eval", "sample", "sample", "eval"]):
            train(decoder, step)
            requests = ask(TEXTS, 4, cycle=step)
            with engines.session(phase, None) as session:
                found = of(session, requests, WARM)
                assert session.stats()["tokens"] == sum(len(c.tokens) for c in found.values())
            with LocalEngine(decoder=decoder, tokenizer=Words(), free_memory=lambda: GIB).session() as new:
                assert_same(found, of(new, requests, WARM))
            assert (engine.count, engine.now) == (1, 1)
    assert engine.now == 0
    with engines.session("sample", None) as session:
        of(session, ask(TEXTS), WARM)
    assert (engine.count, engine.now) == (2, 0)


@pytest.mark.parametrize("kind", [Opened, Server])
def test_sessions_of_servers_end_with_their_phase(kind):
    decoder = model("qwen2", "lora")
    engine = kind(decoder=decoder, tokenizer=Words(), free_memory=lambda: GIB)
    local = Opened(decoder=decoder, tokenizer=Words(), free_memory=lambda: GIB)
    engines = Engines(engine, local, RANKS)
    with engines.keep_open():
        for phase in ("sample", "eval", "sample", "eval"):
            with engines.session(phase, None) as session:
                of(session, ask(TEXTS[:2]), WARM)
        assert (local.count, local.now) == (1, 1)
        assert (engine.count, engine.now) == ((2, 0) if kind is Server else (1, 1))
    assert local.now == engine.now == 0
