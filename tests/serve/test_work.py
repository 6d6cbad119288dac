"""The order of calls: turns of models and samples, repeated calls, calls that never come."""

import threading
import time

import pytest

from rocm_ext.base.errors import UserError
from rocm_ext.serve import work
from rocm_ext.serve.work import Failed, Full, Later, Work


@pytest.fixture
def done():
    """Names of calls in the order in which they were done."""
    return []


@pytest.fixture
def queue(done):
    def together(asked):
        done.append(sorted(asked))
        return [{"sampled": name} for name in asked]

    return Work(together)


def add(queue, done, model, number, size=0, seconds=0.0):
    name = f"{model}.{number}"

    def do():
        time.sleep(seconds)
        done.append(name)
        return {"name": name}

    queue.add(model, number, name, size, do)


def run(queue, seconds=0.1):
    """Do what can be done, and stop."""
    stop = threading.Event()
    threading.Timer(seconds, stop.set).start()
    queue.run(stop.is_set)


def test_calls_wait_for_those_before_them(queue, done):
    for number in (2, 1, 4, 0):
        add(queue, done, "m", number)
    add(queue, done, "m", 1)
    run(queue)
    assert done == ["m.0", "m.1", "m.2"]
    assert queue.find("m.1").result() == {"name": "m.1"}
    with pytest.raises(Failed, match="stopped"):
        queue.find("m.4").result()


def test_models_and_samples_take_turns(queue, done):
    """A stream of samples does not keep a model waiting, nor one model another."""
    for number in range(4):
        add(queue, done, "a", number, seconds=0.02)
    add(queue, done, "b", 0, seconds=0.02)
    for kind in range(3):
        queue.add_sample(kind, f"s{kind}", 0, f"s{kind}")
    run(queue, 1.0)
    assert done == ["a.0", "b.0", ["s0"], "a.1", ["s1"], "a.2", ["s2"], "a.3"]


def test_samples_of_a_kind_are_done_together(queue, done):
    for name in ("x", "y"):
        queue.add_sample("kind", name, 0, name)
    queue.add_sample("other", "z", 0, "z")
    run(queue)
    assert sorted(done) == [["x", "y"], ["z"]]


def test_the_end_comes_last_and_closes_the_door(queue, done):
    def end():
        done.append("end")
        queue.drop("m")
        return {}

    queue.end("m", "end m", end)
    for number in (0, 1, 3):
        add(queue, done, "m", number)
    run(queue)
    assert done == ["m.0", "m.1", "end"]
    with pytest.raises(Failed, match="ended"):
        queue.find("m.3").result()
    with pytest.raises(UserError, match="ended"):
        add(queue, done, "m", 4)


def test_a_full_queue_takes_the_call_that_is_waited_for(queue, done, monkeypatch):
    monkeypatch.setattr(work, "MOST_BYTES", 100)
    add(queue, done, "m", 1, size=60)
    with pytest.raises(Full):
        add(queue, done, "m", 2, size=60)
    add(queue, done, "m", 0, size=60)
    run(queue)
    assert done == ["m.0", "m.1"]
    add(queue, done, "m", 2, size=60)


def test_old_answers_go_and_calls_are_freed(queue, done, monkeypatch):
    monkeypatch.setattr(work, "_KEPT", 5)
    add(queue, done, "stuck", 7)  # its earlier calls never come
    for number in range(12):
        add(queue, done, "m", number)
    run(queue)
    assert queue.find("m.0") is None
    assert queue.find("m.11").result() == {"name": "m.11"}
    with pytest.raises(UserError, match="no longer kept"):
        add(queue, done, "m", 0)


def test_a_call_that_cannot_be_done_yet_is_tried_again(queue, done):
    tries = []

    def later():
        tries.append(0)
        if len(tries) < 2:
            raise Later
        return {"tries": len(tries)}

    queue.add("m", 0, "m.0", 0, later)
    run(queue, 1.0)
    assert queue.find("m.0").result() == {"tries": 2}


def test_a_fault_ends_one_call(queue, done, caplog):
    queue.add("m", 0, "bad", 0, lambda: 1 / 0)
    queue.add("m", 1, "wrong", 0, lambda: (_ for _ in ()).throw(UserError("mine")))
    add(queue, done, "m", 2)
    run(queue)
    with pytest.raises(Failed) as fault:
        queue.find("bad").result()
    assert fault.value.category == "server"
    with pytest.raises(Failed) as mistake:
        queue.find("wrong").result()
    assert mistake.value.category == "user"
    assert done == ["m.2"]
