"""The selection of answers and prompts, and the measures, equal their definitions."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_ext.rl.prompts import choose_unsolved
from rocm_ext.rl.records import Sample, measure, pass_at_k, pass_at_ks
from rocm_ext.rl.selection import filter_samples
from rocm_ext.runs.scores import wilson
from rocm_ext.verifiers import Result, Verdict

RULES = {
    "keep": "rewarded",
    "threshold": 0.5,
    "per_prompt": None,
    "best_fraction": 1.0,
    "deduplicate": False,
    "drop_truncated": False,
}

rewards = st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=2)
answers = st.lists(st.tuples(st.integers(0, 4), rewards, tokens, st.booleans()), max_size=40)


def phase(drawn):
    """Convert tuples (prompt, reward, tokens, cut off) to samples and results by key."""
    samples, results, counts = {}, {}, {}
    for prompt, reward, tokens, cut in drawn:
        index = counts[prompt] = counts.get(prompt, -1) + 1
        key = (f"p{prompt}", index)
        samples[key] = Sample(*key, 0, "length" if cut else "stop", "", tokens, [0.0] * len(tokens))
        verdict = (
            Verdict.ERROR if reward is None else Verdict.CORRECT if reward == 1 else Verdict.WRONG
        )
        results[key] = Result(verdict, reward)
    return samples, results


def keep(drawn, seed=0, **rules):
    return filter_samples(*phase(drawn), **{**RULES, **rules}, seed=seed)


@given(answers, st.integers(0, 5))
def test_every_answer_is_kept_or_counted_once(drawn, seed):
    kept, counts = keep(
        drawn, seed, per_prompt=2, best_fraction=0.7, deduplicate=True, drop_truncated=True
    )
    assert counts.pop("kept") == len(kept)
    assert len(kept) + sum(counts.values()) == len(drawn)


@given(answers, st.integers(0, 5), st.randoms(use_true_random=False))
def test_the_order_of_records_does_not_matter(drawn, seed, rng):
    samples, results = phase(drawn)
    keys = list(samples)
    rng.shuffle(keys)
    rules = {**RULES, "per_prompt": 1, "best_fraction": 0.5, "deduplicate": True}
    shuffled = filter_samples({k: samples[k] for k in keys}, results, **rules, seed=seed)
    assert shuffled == filter_samples(samples, results, **rules, seed=seed)


@given(answers)
def test_right_answers_or_those_with_enough_reward_are_kept(drawn):
    samples, results = phase(drawn)
    kept, _ = filter_samples(samples, results, **RULES, seed=0)
    assert {s.key for s in kept} == {
        k for k, r in results.items() if r.reward is not None and r.reward >= 0.5
    }
    kept, counts = filter_samples(samples, results, **{**RULES, "keep": "correct"}, seed=0)
    assert {s.key for s in kept} == {k for k, r in results.items() if r.verdict is Verdict.CORRECT}
    assert counts.get("not_correct", 0) == sum(r.reward in (0.5, 0.75) for r in results.values())


def test_empty_equal_and_cut_answers_are_left_out_if_asked():
    kept, counts = keep([(0, 1.0, [], False), (0, 1.0, [1], False)])
    assert [sample.tokens for sample in kept] == [[1]]
    assert counts == {"empty": 1, "kept": 1}
    equal = [(0, 1.0, [1, 2], False), (0, 1.0, [1, 2], False), (1, 1.0, [1, 2], False)]
    assert keep(equal, deduplicate=True)[1] == {
        "duplicate": 1,
        "kept": 2,
    }  # equal answers to two prompts both count
    cut = [(0, 1.0, [1], True), (0, 1.0, [2], False)]
    assert [s.sample for s in keep(cut, drop_truncated=True)[0]] == [1]
    assert [s.sample for s in keep(cut)[0]] == [0, 1]


@given(answers)
def test_the_best_of_each_prompt_are_kept(drawn):
    kept, _ = keep(drawn, threshold=0.25, per_prompt=2)
    _, results = phase(drawn)
    for prompt in {key[0] for key in results}:
        found = sorted((results[s.key].reward for s in kept if s.prompt_id == prompt), reverse=True)
        fit = [
            r.reward
            for k, r in results.items()
            if k[0] == prompt and r.reward is not None and r.reward >= 0.25
        ]
        assert found == sorted(fit, reverse=True)[:2]


def test_a_fraction_is_of_each_prompt_and_leaves_one():
    drawn = [(0, 1.0, [i], False) for i in range(10)] + [(1, 0.5, [0], False)]
    kept, counts = keep(drawn, best_fraction=0.25)
    assert sorted(s.prompt_id for s in kept) == ["p0", "p0", "p0", "p1"]
    assert counts == {"not_among_best": 7, "kept": 4}
    assert len({keep(drawn, seed, per_prompt=1)[0][0].sample for seed in range(40)}) > 4


PROMPTS = [f"p{i}" for i in range(20)]


def choose(rates, count=None, skip=True, retry=2, seed=0):
    last = {
        prompt: (cycle, rate)
        for cycle, asked in enumerate(rates, start=1)
        for prompt, rate in asked.items()
    }
    return choose_unsolved(
        PROMPTS,
        last,
        len(rates) + 1,
        count=count,
        skip_solved=skip,
        retry_unsolved_after=retry,
        seed=seed,
    )


def test_solved_prompts_are_skipped_and_unsolved_come_back():
    rates = [{"p0": 1.0, "p1": 0.0, "p2": 0.5}]
    assert {"p0", "p1", "p2"}.intersection(choose(rates)) == {"p2"}
    rates.append({"p2": 0.5})
    assert "p1" in choose(rates)
    assert "p1" in choose(rates[:1], retry=1)
    assert "p1" not in choose([*rates, {}, {}], retry=None)
    assert "p0" in choose(rates, skip=False)
    assert "p0" in choose([{"p0": 1.0}, {"p0": 0.5}])  # the last measurement counts
    assert "p0" not in choose([{"p0": 0.5}, {"p0": 1.0}])


@given(st.integers(1, 20), st.integers(0, 99))
def test_prompts_that_were_never_asked_come_first(count, seed):
    rates = [dict.fromkeys(PROMPTS[:10], 0.5)]
    asked = choose(rates, count, seed=seed)
    assert len(asked) == len(set(asked)) == count
    assert set(asked[:10]) <= set(PROMPTS[10:])


@pytest.mark.parametrize(
    ("n", "correct", "k"), [(5, 0, 2), (5, 2, 1), (6, 2, 3), (6, 4, 3), (4, 4, 4), (8, 1, 8)]
)
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n, correct, k):
    draws = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_prompts_is_a_mean():
    assert pass_at_ks([(4, 1), (4, 4), (2, 0)]) == pytest.approx({1: 1.25 / 3, 2: 1.5 / 3, 4: 1.0})
    assert pass_at_ks([]) == {}


@given(answers)
def test_measurements_of_answers_equal_their_definitions(drawn):
    samples, results = phase(drawn)
    found = measure(samples, results)
    lengths = {key: len(sample.tokens) for key, sample in samples.items()}
    rated = {
        key: result.verdict is Verdict.CORRECT
        for key, result in results.items()
        if result.reward is not None
    }
    for name, chosen in {
        "mean_tokens": lengths,
        "mean_tokens_right": [key for key, right in rated.items() if right],
        "mean_tokens_wrong": [key for key, right in rated.items() if not right],
    }.items():
        each = [lengths[key] for key in chosen]
        assert found[name] == (pytest.approx(sum(each) / len(each)) if each else None)
    groups = [
        [key for key in samples if key[0] == prompt] for prompt in {prompt for prompt, _ in samples}
    ]
    if not groups:
        return
    distinct = [len({str(samples[key].tokens) for key in group}) / len(group) for group in groups]
    assert found["distinct"] == pytest.approx(sum(distinct) / len(distinct))
    groups = [
        rights for group in groups if (rights := [rated[key] for key in group if key in rated])
    ]
    if not groups:
        assert (found["all_right"], found["all_wrong"]) == (None, None)
        return
    assert found["all_right"] == pytest.approx(sum(map(all, groups)) / len(groups))
    assert found["all_wrong"] == pytest.approx(
        sum(not any(rights) for rights in groups) / len(groups)
    )
    assert {name for name in found if name.startswith("pass_at")} == {
        f"pass_at_{k}" for k in (1, 2, 4, 8, 16, 32) if k <= max(map(len, groups))
    }
    for k in (1, 2):
        draws = [list(itertools.combinations(rights, k)) for rights in groups if len(rights) >= k]
        shares = [sum(map(any, of)) / len(of) for of in draws]
        assert found.get(f"pass_at_{k}") == (
            pytest.approx(sum(shares) / len(shares)) if shares else None
        )


@pytest.mark.parametrize(("k", "n", "low", "high"), [
    (100, 300, 0.2824, 0.3885), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662),
])  # fmt: skip
def test_wilson(k, n, low, high):
    # 81/263 is Newcombe's (1998) first example; the others follow from the formula
    assert wilson(k, n) == pytest.approx((low, high), abs=1e-4)
