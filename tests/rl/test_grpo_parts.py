"""Advantages, updates, the choice of prompts and the reasons to stop equal their definitions."""

import ast
import importlib.util
import itertools
import math
import multiprocessing
import re
from collections import Counter
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import nn

from rocm_ext.data.batches import Layout
from rocm_ext.data.rows import Rows
from rocm_ext.rl.evaluation import advice, flat_reason, mismatch_warning, rate_warning, stop_reason
from rocm_ext.rl.prompts import choose_by_curriculum as choose
from rocm_ext.rl.rollout import Answers
from rocm_ext.rl.selection import (
    EPSILON,
    advantages,
    by_prompt,
    length_share,
    select,
    shaped_rewards,
)
from rocm_ext.rl.trainer import PolicyTrainer
from rocm_ext.train.loop import StepStats
from rocm_ext.verifiers import Result, Verdict

CENTERS, SCALES = ("mean", "leave_one_out"), ("std", "batch", "none")

values = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(-1, 1, allow_subnormal=False))
one_group = st.lists(values, min_size=1, max_size=6)
of_step = st.dictionaries(st.sampled_from("abcdef"), one_group, max_size=5).map(
    lambda drawn: {
        (prompt, i): value for prompt, group in drawn.items() for i, value in enumerate(group)
    }
)
kinds = st.tuples(st.sampled_from(CENTERS), st.sampled_from(SCALES))


def answer(tokens, cut=False):
    return SimpleNamespace(tokens=[0] * tokens, finish_reason="length" if cut else "stop")


def judged(given_rewards):
    """The verdicts of answers with these rewards; None: ERROR."""
    return {
        key: Result(Verdict.ERROR if reward is None else Verdict.WRONG, reward)
        for key, reward in given_rewards.items()
    }


def rewarded(samples, given_rewards, truncated, penalty=1.0, margin=0):
    cfg = {"truncation_penalty": penalty, "truncation_margin": margin, "max_new_tokens": 100}
    return shaped_rewards(
        samples, judged(given_rewards), OmegaConf.create({**cfg, "truncated": truncated})
    )


def flat(found):
    """The prompts without an advantage."""
    return {prompt for prompt, group in by_prompt(found).items() if not any(group.values())}


def test_an_answer_without_a_reward_has_none():
    samples = {("a", i): answer(5) for i in range(3)}
    given_rewards = {("a", 0): 0.25, ("a", 1): None, ("a", 2): 0.0}
    for truncated in ("mask", "keep", "penalize"):
        assert rewarded(samples, given_rewards, truncated=truncated) == {
            ("a", 0): 0.25,
            ("a", 2): 0.0,
        }


@pytest.mark.parametrize(("tokens", "cut", "margin", "share"), [
    # without a margin, cut answers alone
    (100, True, 0, 1), (100, False, 0, 0),
    (80, False, 20, 0), (90, False, 20, 0.5), (100, True, 20, 1),
    (60, True, 20, 1),  # a server's context limit
    (30, False, 200, 0.65),  # a margin longer than the answer
])  # fmt: skip
def test_long_answers_are_penalized_as_in_dapo(tokens, cut, margin, share):
    samples = {("a", 0): answer(tokens, cut)}
    found = rewarded(samples, {("a", 0): 0.5}, truncated="penalize", penalty=0.4, margin=margin)
    assert found == {("a", 0): pytest.approx(0.5 - 0.4 * share)}
    assert rewarded(samples, {("a", 0): 0.5}, truncated="keep", penalty=0.4, margin=margin) == {
        ("a", 0): 0.5
    }


@given(of_step, kinds, st.randoms(use_true_random=False))
def test_advantages_add_up_to_zero_in_any_order(drawn, kind, rng):
    found = advantages(drawn, *kind)
    assert found.keys() == drawn.keys()
    for group in by_prompt(drawn).values():
        worth = {key: found[key] for key in group}
        assert abs(math.fsum(worth.values())) <= 1e-9 * max(
            1.0, max(map(abs, worth.values())) / EPSILON
        )
        if max(group.values()) - min(group.values()) <= 1e-8:
            assert set(worth.values()) == {0.0}
        else:  # the best answer gains, the worst loses
            assert found[max(group, key=group.get)] > 0 > found[min(group, key=group.get)]
    keys = list(drawn)
    rng.shuffle(keys)
    shuffled = {key: drawn[key] for key in keys}
    assert advantages(shuffled, *kind) == found
    share = length_share(drawn, {key: key[1] for key in drawn})
    assert length_share(shuffled, {key: key[1] for key in keys}) == pytest.approx(share)


def test_rewards_that_differ_by_rounding_alone_are_equal():
    drawn = {("a", 0): 0.1 + 0.2, ("a", 1): 0.3, ("b", 0): 0.3, ("b", 1): 0.3001, ("c", 0): 1.0}
    assert flat(advantages(drawn, "mean", "none")) == {"a", "c"}
    assert flat(advantages(drawn, "none", "none")) == set()


@given(of_step, st.sampled_from(["batch", "none"]), st.sampled_from(["batch", "none"]))
def test_without_groups_rewards_are_compared_with_the_step(drawn, center, scale):
    assume(center == "batch" or scale == "none")
    found = advantages(drawn, center, scale)
    all_rewards = np.array(list(drawn.values()))
    expected = all_rewards - (all_rewards.mean() if center == "batch" and len(drawn) else 0.0)
    if scale == "batch":
        expected = expected / ((all_rewards.std(ddof=1) if len(drawn) > 1 else 0.0) + EPSILON)
    assert list(found.values()) == pytest.approx(
        expected.tolist(), abs=1e-3 if scale == "batch" else 2e-8
    )


STEP = {"center": "mean", "scale": "none", "negative_weight": 1.0, "prompts_per_step": 2, "max_new_tokens": 9,
        "truncated": "mask", "truncation_penalty": 1.0, "truncation_margin": 0, "refill": False}  # fmt: skip


def selected(given_rewards, asked, cut=(), **changes):
    """Select from answers with these rewards, to prompts that were asked in this order."""
    answers = {key: answer(4, key in cut) for key in given_rewards}
    return select(
        [Answers(answers, judged(given_rewards), {})], asked, OmegaConf.create({**STEP, **changes})
    )


@pytest.mark.parametrize(
    ("weight", "worth"),
    [(1.0, [0.75, -0.25, -0.25, -0.25]), (0.4, [0.75, -0.1, -0.1, -0.1]), (0.0, [0.75])],
)
def test_negative_advantages_have_their_weight(weight, worth):
    """One of four answers to a is right; b is flat."""
    drawn = {("a", i): float(i == 0) for i in range(4)} | {("b", i): 1.0 for i in range(4)}
    chosen = selected(drawn, ["a", "b"], negative_weight=weight)
    assert list(chosen.advantages.values()) == pytest.approx(worth)
    assert [key[0] for key in chosen.advantages] == ["a"] * len(worth)
    assert (chosen.flat, chosen.groups) == ({"b"}, 1)


def test_prompts_are_trained_in_the_order_asked():
    """A refill asks more than the step needs."""
    chosen = selected(
        {(prompt, i): float(i) for prompt in "abc" for i in range(2)}, ["c", "a", "b"], refill=True
    )
    assert {prompt for prompt, _ in chosen.advantages} == {"c", "a"}
    assert chosen.answers == 4  # of c and a


@pytest.mark.parametrize(
    ("weight", "refill", "answers"), [(1.0, False, 7), (0.0, False, 7), (1.0, True, 4)]
)
def test_what_the_divisor_counts(weight, refill, answers):
    """As in Dr. GRPO, which sums over all sampled answers: 4 of a, one of them cut, 3 of b, which is flat.

    A refill replaces b.
    """
    drawn = (
        {("a", i): float(i == 0) for i in range(4)}
        | {("b", i): 1.0 for i in range(3)}
        | {("b", 3): None}
    )
    chosen = selected(drawn, ["a", "b"], cut=[("a", 3)], negative_weight=weight, refill=refill)
    assert (len(chosen.advantages), chosen.answers) == (3 if weight else 1, answers)


@pytest.mark.parametrize(("center", "baseline"), [("leave_one_out", True), ("none", False)])
def test_kl_in_the_reward_equals_rloo(center, baseline):
    """The reward minus beta times the answer's log-ratio, compared with the mean of the others.

    Those of b have equal rewards. The last of a is cut: it is compared, and not trained on.
    """
    rng = np.random.default_rng(0)
    drawn = {("a", 0): 1.0, ("a", 1): 0.0, ("a", 2): 0.5, ("b", 0): 1.0, ("b", 1): 1.0}
    results = judged(drawn | {("b", 2): None})
    samples = {key: answer(3 + i, cut=key == ("a", 2)) for i, key in enumerate(results)}
    reference = {key: rng.normal(size=len(sample.tokens)) for key, sample in samples.items()}
    for sample in samples.values():
        sample.logprobs = rng.normal(size=len(sample.tokens)).tolist()
    cfg = OmegaConf.create({**STEP, "center": center})
    chosen = select([Answers(samples, results, {})], ["a", "b"], cfg, reference, 0.3)
    total = {
        key: drawn[key] - 0.3 * (sum(samples[key].logprobs) - reference[key].sum()) for key in drawn
    }
    wanted = {
        key: value
        - (
            fmean(v for other, v in total.items() if other[0] == key[0] and other != key)
            if baseline
            else 0
        )
        for key, value in total.items()
    }
    del wanted["a", 2]
    assert chosen.advantages == pytest.approx(wanted)
    assert chosen.flat == set()


@pytest.fixture(scope="module")
def trl_advantages():
    """TRL's own statements, run without its trainer."""
    torch = pytest.importorskip("torch")
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("needs trl")
    folder = Path(spec.origin).parent / "trainer"
    utils, trainer = (
        ast.parse((folder / name).read_text()) for name in ("utils.py", "grpo_trainer.py")
    )
    nanstd = next(
        node for node in utils.body if isinstance(node, ast.FunctionDef) and node.name == "nanstd"
    )
    branch = next(
        node
        for node in ast.walk(trainer)
        if isinstance(node, ast.If)
        and "aggregation == 'sum_then_normalize'" in ast.unparse(node.test)
    )
    code = compile(ast.Module([nanstd, *branch.body], []), "trl", "exec")

    def run(table, scale):
        rewards = torch.tensor(table, dtype=torch.float64).reshape(-1, 1)
        settings = {"scale_rewards": scale, "reward_weights": torch.ones(1, dtype=torch.float64)}
        names = {
            "torch": torch, "self": SimpleNamespace(**settings), "device": "cpu", "rewards_per_func": rewards,
            "unscorable_mask": rewards.isnan().all(dim=1), "num_generations": len(table[0]),
        }  # fmt: skip
        exec(code, names)
        return names["advantages"].reshape(len(table), -1).tolist()

    return run


@pytest.mark.parametrize(
    ("ours", "theirs"), [("std", "group"), ("batch", "batch"), ("none", "none")]
)
def test_advantages_equal_those_of_trl(trl_advantages, ours, theirs):
    rng = np.random.default_rng(0)
    for most in (1, 4, 10**6):  # right or wrong, partial rewards, almost continuous ones
        table = rng.integers(0, most + 1, (16, 8)) / most
        table[0, :] = 1.0
        table[rng.random(table.shape) < 0.1] = math.nan  # ERROR; TRL: no reward function applies
        given_rewards = {
            (f"p{i}", j): float(table[i, j])
            for i, j in zip(*np.nonzero(~np.isnan(table)), strict=True)
        }
        found = advantages(given_rewards, "mean", ours)
        expected = trl_advantages(table.tolist(), theirs)
        assert len(found) > 100
        for (prompt, j), value in found.items():
            assert value == pytest.approx(
                expected[int(prompt[1:])][j], rel=1e-6, abs=1e-9
            )  # TRL: a factor in fp32


def test_length_share_is_the_r_squared_of_a_regression():
    rng = np.random.default_rng(1)
    for noise, slope in ((0.0, -0.01), (0.2, -0.01), (0.2, 0.01), (3.0, 0.05)):
        length = rng.integers(1, 100, (6, 8))
        reward = rng.normal(size=(6, 1)) + slope * length + noise * rng.normal(size=(6, 8))
        keys = list(itertools.product("abcdef", range(8)))
        rewarded, lengths = (
            dict(zip(keys, each.ravel().tolist(), strict=True)) for each in (reward, length)
        )
        level = {("level", i): 0.5 for i in range(8)}  # a group of equal rewards, which has no say
        found = length_share(rewarded | level, lengths | {key: 7 * key[1] for key in level})
        intercepts = np.kron(np.eye(6), np.ones((8, 1)))
        design = np.hstack([intercepts, length.reshape(-1, 1)])
        residual = [
            (
                (reward.ravel() - each @ np.linalg.lstsq(each, reward.ravel(), rcond=None)[0]) ** 2
            ).sum()
            for each in (design, intercepts)
        ]
        assert found == pytest.approx(math.copysign(1 - residual[0] / residual[1], slope), abs=1e-9)


IDS = [f"p{i}" for i in range(40)]
curricula = st.sampled_from(["none", "informative", "easy_to_hard"])
rates = st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
history = st.lists(rates, min_size=1, max_size=4).map(lambda found: list(enumerate(found, 1)))
histories = st.dictionaries(st.sampled_from(IDS), history, max_size=40)


def chosen(asked, step=5, steps=10, count=8, curriculum="none", seed=0, prompts=IDS, exclude=()):
    return choose(
        prompts, asked, step, steps, count=count, curriculum=curriculum, seed=seed, exclude=exclude
    )


@given(histories, st.integers(1, 10), st.integers(0, 50), curricula, st.sets(st.sampled_from(IDS)))
def test_a_step_asks_different_prompts_as_many_as_there_are(
    asked, step, count, curriculum, exclude
):
    found = chosen(asked, step, count=count, curriculum=curriculum, exclude=exclude)
    assert len(found) == len(set(found)) == min(count, len(IDS) - len(exclude))
    assert not exclude & set(found)


@given(
    histories, st.integers(1, 10), curricula, st.integers(0, 3), st.randoms(use_true_random=False)
)
def test_a_draw_goes_on_in_a_refill(asked, step, curriculum, seed, rng):
    first = chosen(asked, step, curriculum=curriculum, seed=seed)
    more = chosen(asked, step, curriculum=curriculum, seed=seed, exclude=first)
    assert not set(first) & set(more)
    if curriculum != "easy_to_hard":  # whose share grows with the count
        assert first + more == chosen(asked, step, count=16, curriculum=curriculum, seed=seed)
    prompts, items = list(IDS), list(asked.items())
    rng.shuffle(prompts)
    rng.shuffle(items)
    assert chosen(dict(items), step, curriculum=curriculum, seed=seed, prompts=prompts) == first


def test_every_prompt_is_asked_once_in_each_pass():
    asked, passes = {}, []
    for step in range(1, 16):
        now = chosen(asked, step)
        passes.append(now)
        for prompt in now:
            asked.setdefault(prompt, []).append((step, 0.0))
    orders = [[*itertools.chain(*passes[i : i + 5])] for i in (0, 5, 10)]
    assert all(sorted(order) == sorted(IDS) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert chosen({}, seed=1) != chosen({}, seed=0)


def test_informative_prefers_pass_rates_near_a_half():
    asked = {prompt: [(1, (0.0, 0.5, 1.0, None)[i % 4])] for i, prompt in enumerate(IDS)}
    drawn = Counter(
        (0.0, 0.5, 1.0, None)[IDS.index(prompt) % 4]
        for seed in range(2000)
        for prompt in chosen(asked, count=1, curriculum="informative", seed=seed)
    )
    weights = {
        0.0: 0.09,
        0.5: 0.25,
        1.0: 0.09,
        None: 0.43 / 3,
    }  # p (1 - p); unknown: the mean of the others
    for rate, weight in weights.items():
        assert drawn[rate] / 2000 == pytest.approx(weight / sum(weights.values()), abs=0.04)


def test_easy_to_hard_begins_with_the_easiest():
    asked = {prompt: [(1, i / 39)] for i, prompt in enumerate(IDS)}  # p39 is the easiest
    for step, easiest in ((1, 8), (6, 24), (11, 40)):
        drawn = {
            prompt
            for seed in range(60)
            for prompt in chosen(asked, step, 11, 4, "easy_to_hard", seed)
        }
        assert drawn == set(IDS[-easiest:])
    asked = {prompt: [(1, 0.9)] for prompt in IDS[:3]} | {
        prompt: [(1, 0.0)] for prompt in IDS[3:30]
    }
    first = chosen(asked, 1, 100, 13, "easy_to_hard")
    assert set(first) == {*IDS[30:], *IDS[:3]}
    assert set(first[:10]) == set(IDS[30:])  # of these, the least often asked


def step(number, **more):
    line = {
        "step": number,
        "updates": 1,
        "reward": 0.5,
        "reward_std": 0.5,
        "flat": 0.2,
        "truncated": 0.0,
    }
    return line | {"entropy": 0.5, "length_share": 0.1} | more


def evaluated(number, correct):
    return {"step": number, "eval": {"correct": correct, "prompts": 100}, "seconds": 1.0}


def reason(rows, **limits):
    unlimited = {"min_entropy": None, "stop_after_no_gain": None, "max_length_share": None}
    return stop_reason(rows, OmegaConf.create({**unlimited, **limits}), entropy_steps=3)


@pytest.mark.parametrize(("entropies", "stops"), [
    ([0.1, 0.1], False),  # too few
    ([0.9, 0.1, 0.1, 0.1], True),
    ([0.1, 0.1, 0.6], False),  # the mean is above
    ([0.1, 0.1, None, 0.1], True),  # a step without log-probs does not count
])  # fmt: skip
def test_collapsed_entropy_stops(entropies, stops):
    rows = [step(i, entropy=value) for i, value in enumerate(entropies, 1)]
    found = reason([*rows, evaluated(len(rows), 3)], min_entropy=0.2)
    assert (found is not None) == stops
    if found:
        assert re.fullmatch(".* 0.1 nats .*, below min_entropy 0.2: .*", found)


@pytest.mark.parametrize(
    ("scores", "since"),
    [([50], 0), ([50, 50], 1), ([50, 49, 50], 2), ([50, 49, 51], 0), ([50, 52, 51, 52, 40], 3)],
)
def test_no_gain_counts_evaluations_since_the_best(scores, since):
    rows = [
        line for i, score in enumerate(scores) for line in (step(10 * i), evaluated(10 * i, score))
    ]
    assert reason(rows, stop_after_no_gain=since + 1) is None
    if since:
        assert f"in {since} evaluation" in reason(rows, stop_after_no_gain=since)


def test_rewards_that_length_explains_stop():
    rows = [step(i, length_share=0.5 + 0.1 * (i % 2), entropy=0.0) for i in range(1, 11)]
    assert reason([evaluated(0, 50), *rows, evaluated(10, 0)]) is None  # without limits
    assert reason([], min_entropy=1.0, stop_after_no_gain=1, max_length_share=0.1) is None
    assert reason(rows, max_length_share=0.56) is None
    assert reason(rows[1:], max_length_share=0.2) is None  # nine steps
    assert "55%" in (longer := reason(rows, max_length_share=0.5))
    shorter = reason([step(i, length_share=-0.55) for i in range(1, 11)], max_length_share=0.5)
    assert shorter == longer.replace("longer", "shorter")
    assert reason(
        [*rows, step(11, length_share=None)], max_length_share=0.5
    )  # flat steps do not count


NO_UPDATE = {"updates": 0, "flat": 1.0}


@pytest.mark.parametrize(("more", "found", "cure"), [
    ({"reward": 0.0, "reward_std": 0.0}, "all rewards are 0", "easier prompts"),
    ({"reward": 0.0, "reward_std": 0.0, "truncated": 0.9}, "all rewards are 0", "raise max_new_tokens"),
    ({"reward": 0.5, "reward_std": 0.5}, "equal inside each group", "temperature"),
    ({"reward": None, "reward_std": None}, "all verdicts are ERROR", "verdicts.jsonl"),
    ({"flat": 0.5, "truncated": 1.0}, "cut (100%)", "truncated: keep"),
])  # fmt: skip
def test_steps_without_an_update_stop_with_a_reason(more, found, cure):
    rows = [step(1), *[step(i, **{**NO_UPDATE, **more}) for i in (2, 3, 4)], evaluated(4, 1)]
    assert flat_reason(rows, max_flat_steps=4) is None
    said = flat_reason(rows, max_flat_steps=3)
    pattern = rf"no update in the last 3 steps .*{re.escape(found)}.*; .*{re.escape(cure)}.*"
    assert re.fullmatch(pattern, said)
    assert flat_reason([*rows, step(5)], max_flat_steps=1) is None
    rows = [step(i, **NO_UPDATE, reward=float(i % 2), reward_std=0.0) for i in (1, 2)]
    assert "equal inside each group" in flat_reason(rows, max_flat_steps=2)


@pytest.mark.parametrize(("rewards", "rate", "warns"), [
    ([0.3, 0.4] * 10, 3e-5, True),
    ([0.3, 0.4] * 11, 3e-5, False),  # told two steps ago
    ([0.3, 0.4] * 10, 1e-4, False),  # the rate is not the reason
    ([0.3, 0.4] * 5 + [0.4, 0.5] * 5, 3e-5, False),
    ([0.4, 0.5] * 5 + [0.42, 0.52] * 5, 3e-5, True),  # within two standard errors
])  # fmt: skip
def test_a_reward_that_has_not_moved_at_low_rates_is_told_once(rewards, rate, warns):
    lines = [{"step": 0, "eval": {}}]
    for step, reward in enumerate(rewards, 1):
        lines.append({"step": step, "reward": reward, "lr_sum": step * rate})
    assert bool(rate_warning(lines)) == warns
    if warns:
        assert "add up to 0.0006, those of 20 updates" in rate_warning(lines)


RISING = {"reward": (0.2, 0.6)}


@pytest.mark.parametrize(("ends", "found"), [
    ({"flat": (0.2, 0.7), "all_right": (0.1, 0.6)}, ["60% of the groups in the last 10 steps have right answers"]),
    ({"distinct": (0.9, 0.4)}, ["has fallen from 0.9 to 0.4: the policy collapses"]),
    ({**RISING, "reward/sum": (0.3, 0.1), "reward/form": (0.1, 0.9)}, ["reward/sum has fallen from 0.3 to 0.1"]),
    ({**RISING, "right": (0.2, 0.1)}, ["the reward has risen from 0.2 to 0.6, and right has fallen"]),
    ({"reward": (0.6, 0.2), "right": (0.2, 0.1)}, []),  # both fall
    ({**RISING, "right": (0.2, None)}, []),
])  # fmt: skip
def test_advice_on_hacked_rewards_and_collapse_comes_once(ends, found):
    """Each measurement has one value in the first ten steps, and another one in the ten after them and ten more."""
    lines, said = [{"step": 0, "eval": {}}], []
    for number in range(30):
        noise = 0.01 * (number % 2) - 0.005
        values = {name: pair[number >= 10] for name, pair in ends.items()}
        values = {name: None if value is None else value + noise for name, value in values.items()}
        lines.append({"step": number + 1, "reward": 0.5, "lr_sum": 1.0, **values})
        said.append([text for text in advice(lines) if number >= 10])
    assert [len(each) for each in said if each] == [1] * len(found)
    for text, part in zip(said[19], found, strict=True):
        assert part in text
        assert "\n" not in text


def test_the_mismatch_is_told_once():
    rows = [
        {"step": step, "mismatch_kl": value}
        for step, value in enumerate([1e-4, 3e-4, 2e-4, 0.5, 0.6, 1e-4], 1)
    ]
    rows.insert(2, {"step": 2, "eval": {}})
    told = [bool(mismatch_warning(rows[:end])) for end in range(len(rows) + 1)]
    assert told == [False, False, False, False, False, True, False, False]
    assert "mismatch_kl is 0.5 nats per token, and was 0.0002" in mismatch_warning(rows[:5])


class Trainer(PolicyTrainer):
    """Records updates instead of doing them."""

    def __init__(self, **changes):
        cfg = {"seed": 0, "updates_per_step": 1, "groups_per_update": None, "num_workers": 0, "pin_memory": False,
               "log_peak_memory_stats": False}  # fmt: skip
        self.cfg, self.step, self.seen, self.skipped = OmegaConf.create(cfg | changes), 0, [], 0
        self.lines, self.answers, self.done, self.update_lines = [], [], 0, []
        self.processes = set(multiprocessing.active_children())
        self.learner = SimpleNamespace(model=nn.Module(), layout=Layout(0, 1, 64, True, pad_id=0))

    def train_step(self, update):
        assert set(multiprocessing.active_children()) <= self.processes
        self.seen.append(set(update.rows))
        self.answers.append(update.sequences)
        return StepStats(
            0.0,
            0.0,
            1e-4,
            1,
            0.0,
            False,
            {"token_gradient": 0.25, "ratio_max": float(len(self.seen))},
        )

    def skip_updates(self, count):
        self.skipped += count

    def train(self, groups, each=2, share=1.0):
        names = [f"prompt {i // each}" for i in range(groups * each)]
        tokens = [np.arange(3)] * len(names)
        rows = Rows(tokens, tokens, [(3,)] * len(names), {}, trained_share=share)
        return self.train_on(rows, names)


@pytest.mark.parametrize("groups", [1, 3, 4, 5, 7, 8, 11, 16])
def test_an_update_keeps_its_groups_as_others_go_flat(groups):
    # train_step holds that no process is forked for rows in memory: threads of a process with a GPU may hold locks
    trainer = Trainer(prompts_per_step=16, groups_per_update=4, updates_per_step=2, num_workers=4)
    trainer.train(groups)
    assert len(trainer.seen) == 2 * max(1, groups // 4)
    assert all(
        len(rows) % 2 == 0 and len(rows) // 2 in range(min(4, groups), 8) for rows in trainer.seen
    )
    assert max(map(len, trainer.seen)) - min(map(len, trainer.seen)) <= 2, "spread evenly"
    for rows in (trainer.seen[: len(trainer.seen) // 2], trainer.seen[len(trainer.seen) // 2 :]):
        assert sorted(row for update in rows for row in update) == list(range(groups * 2)), "a pass"
    assert len(trainer.seen) + trainer.skipped == 8, "the schedule advances by the full number"
    trainer = Trainer(prompts_per_step=16)  # without a number of groups, an update has all
    trainer.train(groups)
    assert trainer.seen == [set(range(2 * groups))]


@pytest.mark.parametrize(("share", "answers"), [(0.4, 20), (1.0, 8)])
def test_a_mean_over_answers_counts_untrained_ones(share, answers):
    """Two updates of 8 sequences each: of 40 answers, and of all that there are."""
    trainer = Trainer(prompts_per_step=16, groups_per_update=4)
    assert trainer.train(8, share=share)["informative_answers"] == 8
    assert trainer.answers == [answers, answers]
