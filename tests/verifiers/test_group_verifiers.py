"""Verifiers that see all answers to a prompt at once."""

import sys
import time
from collections import Counter
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_ext.base.errors import UserError
from rocm_ext.data.prompts import Prompt
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.rl.records import Records
from rocm_ext.rl.rollout import Job, Rollout, Workers
from rocm_ext.sampling import Completion, Request, Sampling
from rocm_ext.train.lifecycle import Interrupt, Interrupted
from rocm_ext.verifiers import MajorityAnswer, Pool, Verdict, build

pytest.importorskip("resource", reason="forks and POSIX signals")
HERE = "rocm_ext.verifiers."

MINE = """
import os, time
from rocm_ext.verifiers import Result, Verdict, Verifier

def note(completions):
    with open(os.environ["CALLS"], "a") as file: file.write(" ".join(completions) + "\\n")

class Rare:  # rewards answers that no other equals
    batch_size = 4
    def judge_group(self, completions, row):
        note(completions)
        for c in completions:
            if c == "raise": raise KeyError("oh no")
            if c == "die": os._exit(3)
            if c == "hang": time.sleep(1000)
        counts = [completions.count(c) for c in completions]
        results = [
            Result(Verdict.CORRECT if n == 1 else Verdict.WRONG, 1.0 / n, f"{n} of {len(counts)}") for n in counts
        ]
        results = [None if c == "none" else result for c, result in zip(completions, results)]
        return results[1:] if "fewer" in completions else results

class Inherits(Verifier, Rare):
    def judge_group(self, completions, row): return Rare.judge_group(self, completions, row)

class Nan:
    def judge_group(self, completions, row): return [Result(Verdict.WRONG, float("nan")) for c in completions]

class Alone(Verifier):
    def __call__(self, completion, row):
        note(["alone"])
        return Result(Verdict.CORRECT, 1.0)

class Batch(Verifier):
    batch_size = 2
    def __call__(self, completion, row): return Result(Verdict.CORRECT, 1.0, "alone")
    def judge_batch(self, completions, rows):
        if "raise" in completions: raise KeyError("oh no")
        return [Result(Verdict.CORRECT, 1.0, f"one of {len(rows)}") for _ in completions]

def rank(prompts, completions, **columns):
    assert len(set(prompts)) == 1
    note(completions)
    if "nan" in completions: return [float("nan"), *[float("inf")] * (len(completions) - 1)]
    return [sorted(completions).index(c) / (len(completions) - 1) for c in completions]
"""
RARE = {"_component_": "my_groups.Rare"}


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The user's module ``my_groups`` in the current directory; gives the calls of its verifiers so far."""
    (tmp_path / "my_groups.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    yield lambda: (tmp_path / "calls").read_text().splitlines()
    sys.modules.pop("my_groups", None)


def judged(node, *groups, timeout=30.0):
    with Pool(node, workers=1, timeout=timeout) as pool:
        assert pool.groups
        futures = [pool.submit_group(group, {"prompt": f"q{i}"}) for i, group in enumerate(groups)]
        return [future.result() for future in futures]


@pytest.mark.parametrize("name", ["Rare", "Inherits"])
def test_a_group_is_one_call_and_no_call_mixes_groups(calls, name):
    found = judged(
        {"_component_": f"my_groups.{name}"}, ["a", "b", "a"], ["a"], ["a", "a", "c", "d", "e"]
    )
    assert [[result.reward for result in group] for group in found] == [
        [0.5, 1, 0.5],
        [1],
        [0.5, 0.5, 1, 1, 1],
    ]
    assert calls() == ["a b a", "a", "a a c d e"]
    with Pool(RARE, workers=1, timeout=30) as pool:
        assert [pool.submit(text, {}).result().detail for text in ("a", "a")] == [
            "1 of 1",
            "1 of 1",
        ]
    assert build(RARE)("a", {}).detail == "1 of 1", "an answer alone is a group of one"


@pytest.mark.parametrize(("bad", "says"), [
    ("raise", "oh no"), ("die", "exited with 3"), ("hang", "hung for 1 s"), ("fewer", "must return a list of 3"),
])  # fmt: skip
def test_a_group_whose_call_fails_is_an_error_and_is_judged_once(calls, bad, says):
    found = judged(
        RARE,
        ["a", "b"],
        ["a", bad, "c"],
        ["a", "a"],
        ["a", "none"],
        timeout=1 if bad == "hang" else 30,
    )
    assert [[str(result.verdict) for result in group] for group in found] == [
        ["CORRECT"] * 2, ["ERROR"] * 3, ["WRONG"] * 2, ["CORRECT", "ERROR"],  # one bad result spoils no other
    ]  # fmt: skip
    assert all(says in result.detail for result in found[1])
    assert calls() == ["a b", f"a {bad} c", "a a", "a none"]


def test_a_reward_function_sees_the_whole_group(calls):
    node = {
        "_component_": HERE + "RewardFunction",
        "function": "my_groups.rank",
        "groups": True,
        "batch_size": 2,
    }
    found = judged(node, ["b", "c", "a"], ["x", "y"])
    assert [[result.reward for result in group] for group in found] == [[0.5, 1, 0], [0, 1]]
    assert calls() == ["b c a", "x y"]


def test_a_reward_that_is_no_number_is_an_error_that_says_so(calls):
    rank = {"_component_": HERE + "RewardFunction", "function": "my_groups.rank", "groups": True}
    nan = {"_component_": "my_groups.Nan"}
    weighted = {"_component_": HERE + "Weighted", "weights": [1], "verifiers": [nan]}
    for node, texts, says in (
        (rank, ["nan", "b"], ["gave nan, which is not between 0 and 1", "gave inf, which is not between 0 and 1"]),
        (nan, ["a", "b"], ["must be in [0, 1], found nan"] * 2), (weighted, ["a"], ["found nan"]),
    ):  # fmt: skip
        [group] = judged(node, texts)
        assert {str(result.verdict) for result in group} == {"ERROR"}
        assert [part in result.detail for part, result in zip(says, group, strict=True)] == [
            True
        ] * len(texts)


def voted(*answers, row=None, **settings):
    results = MajorityAnswer(**settings).judge_group(list(answers), row or {})
    return [str(result.verdict) for result in results]


def test_the_most_frequent_final_answer_is_right():
    verdicts = voted("so \\boxed{12}", "the answer is 12.0", "it is 7", "12", "I do not know")
    assert verdicts == ["CORRECT", "CORRECT", "WRONG", "CORRECT", "UNPARSED"]
    assert voted("1", "1", "2", "3", "4", min_share=0.5) == ["WRONG"] * 5
    assert voted("I do not know", "I do not know") == ["UNPARSED", "UNPARSED"]
    texts = [
        r"\boxed{\frac{1}{2}}",
        r"\boxed{0.5}",
        r"\boxed{\frac{2}{4}}",
        r"\boxed{x+1}",
        r"\boxed{1+x}",
    ]
    [group] = judged({"_component_": HERE + "MajorityAnswer"}, texts)
    assert [str(result.verdict) for result in group] == ["CORRECT"] * 3 + ["WRONG"] * 2


def test_a_row_with_an_answer_is_judged_by_it():
    row = {"answer": "7"}
    assert voted("12", "12", "7", row=row) == ["WRONG", "WRONG", "CORRECT"]
    assert voted("12", "12", "7", row=row, field=None) == ["CORRECT", "CORRECT", "WRONG"]
    assert voted("7", row=row) == ["CORRECT"]
    [alone] = MajorityAnswer().judge_group(["7"], {})
    assert alone.verdict is Verdict.ERROR
    assert "'answer'" in alone.detail
    with pytest.raises(ValueError, match="math-verify can parse"):
        MajorityAnswer().check_row({"answer": "1 2 3 ..."})
    MajorityAnswer().check_row({"prompt": "q"})
    with pytest.raises(UserError, match="min_share"):
        MajorityAnswer(min_share=2)


@pytest.mark.wide
def test_a_slow_answer_spoils_no_other_of_its_group():
    slow = [rf"\boxed{{9^{{9^{{9^{n}}}}}}}" for n in (4, 5)]
    equal, other = [r"\boxed{2\sqrt{2}}", r"\boxed{\sqrt{8}}"], r"\boxed{3\sqrt{2}}"
    quick = [*equal, other, "no answer", r"\boxed{5(" + "a" * 60 + "1)}"]
    node = {"_component_": HERE + "MajorityAnswer", "timeout": 1.0}
    started = time.monotonic()
    [group] = judged(node, [*slow, *quick, slow[0]], timeout=60)
    assert time.monotonic() - started < 30 + 10
    judged_quick = ["CORRECT", "CORRECT", "WRONG", "UNPARSED", "WRONG"]
    assert [str(result.verdict) for result in group] == ["TIMEOUT"] * 2 + judged_quick + ["TIMEOUT"]
    [group] = judged(node, [*slow, *quick, r"\boxed{\frac{4}{\sqrt{2}}}"], timeout=60)
    assert [str(result.verdict) for result in group] == ["TIMEOUT"] * 2 + judged_quick + ["CORRECT"]


VOTE = MajorityAnswer(field=None)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["1", "2", "3", "no"]), min_size=2, max_size=7),
    st.randoms(use_true_random=False),
)
def test_votes_are_counted_whatever_the_order(texts, rng):
    counts = Counter(text for text in texts if text != "no").most_common()
    leads = [text for text, count in counts if count == counts[0][1]]
    expected = {
        text: "UNPARSED" if text == "no" else "CORRECT" if leads == [text] else "WRONG"
        for text in set(texts)
    }
    rng.shuffle(texts)
    assert [str(result.verdict) for result in VOTE.judge_group(texts, {})] == [
        expected[text] for text in texts
    ]


class Replies:
    """A session that answers with fixed texts, last request first, until ``stop_after`` answers."""

    def __init__(self, interrupt, texts, stop_after=None):
        self._interrupt, self._texts, self._left = interrupt, texts, stop_after
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def generate(self, requests, sampling):
        for request in reversed(list(requests)):
            self.asked.append((request.prompt_id, request.sample))
            yield Completion(request, [1, 2], [-0.1, -0.1], self._texts[request.sample], "stop")
            if len(self.asked) == self._left:
                self._interrupt.signum = 15

    def stats(self):
        return {"tokens": 2.0, "tokens_per_second": 1.0}


def phase(folder, samples, stop_after=None, node=RARE, set=""):
    """Make a phase of two prompts; ``stop_after`` interrupts it after so many samples. ``set`` is the second's."""
    texts = dict(enumerate(["a", "b", "a", "c"])) | {-1: "a"}
    sampling, interrupt = Sampling(max_new_tokens=4), Interrupt()
    requests = [(Request(p, i, 0, (1,)), sampling) for p in "pq" for i in samples]
    session = Replies(interrupt, texts, stop_after)
    alone = {"_component_": "my_groups.Alone"}
    with Pool(node, workers=1, timeout=30) as pool, Pool(alone, workers=1, timeout=30) as own:
        workers = Workers(Ranks(None), interrupt, 0.5, pools={"": pool, "own": own})
        prompts = [Prompt("p", (), {}, ""), Prompt("q", (), {}, "", set=set)]
        job = Job(
            "test", requests, prompts, *Records(folder, Ranks(None), 0, -1).phase(1, "sample")
        )
        return Rollout(job, workers, lambda: nullcontext(session)).finish().results


def rewards(results):
    return {key: result.reward for key, result in sorted(results.items())}


EXPECTED = {(p, i): reward for p in "pq" for i, reward in enumerate([0.5, 1.0, 0.5, 1.0])}


def test_a_run_judges_a_group_once_it_is_complete(calls, tmp_path):
    assert rewards(phase(tmp_path / "run", range(4))) == EXPECTED
    assert calls() == ["a b a c"] * 2  # by index, although they came in another order
    found = phase(tmp_path / "greedy", (-1, 0, 1))
    assert [found["p", i].detail for i in (-1, 0, 1)] == ["1 of 1", "1 of 2", "1 of 2"]


@pytest.mark.parametrize("stop_after", [1, 5])
def test_a_resumed_run_judges_a_group_once_it_is_complete(calls, tmp_path, stop_after):
    with pytest.raises(Interrupted):
        phase(tmp_path, range(4), stop_after)
    assert rewards(phase(tmp_path, range(4))) == EXPECTED
    assert set(calls()) == {"a b a c"}


@pytest.mark.parametrize(("first", "then"), [(4, 3), (3, 4), (4, 4)])
def test_a_group_of_another_size_is_judged_again(calls, tmp_path, first, then):
    phase(tmp_path, range(first))
    found = phase(tmp_path, range(then))
    assert {result.detail[-1] for result in found.values()} == {str(then)}
    assert len(calls()) == (2 if first == then else 4)
    assert len((tmp_path / "verdicts.jsonl").read_text().splitlines()) == 2 * then


def test_answers_judged_alone_are_not_judged_again(calls, tmp_path):
    """Of a set with its own verifier, in a run whose verifier is of groups."""
    for samples in (3, 4):
        phase(tmp_path, range(samples), set="own")
    assert calls().count("alone") == 4
    assert calls().count("a b a") + calls().count("a b a c") == 2
