"""Puzzles of reasoning-gym as prompts, and their judges in the sandbox."""

import importlib.util
from pathlib import Path

import pytest

from rocm_ext.base.errors import UserError
from rocm_ext.data import reasoning_gym_prompts
from rocm_ext.verifiers import ReasoningGym, Verdict

pytest.importorskip("resource", reason="forks and POSIX signals")
HAS = importlib.util.find_spec("reasoning_gym") is not None
needs_gym = pytest.mark.skipif(not HAS, reason="needs reasoning-gym")
HOSTILE = [
    "__import__('os')._exit(0)", "().__class__.__base__.__subclasses__()", "[x for x in (1,)]", "(lambda: 1)()",
    "open('/etc/passwd').read()", "exec(chr(49))", "max(1, 2)", "Symbol('x').__class__",
    "lambdify((), Symbol('print(1)'))()", "f'{1}'",
]  # fmt: skip


def said(text):
    return f"Let me think. <answer>{text}</answer>"


@pytest.fixture
def judge():
    judge = ReasoningGym(sandbox="rlimits")
    judge.check()
    return judge


@needs_gym
# the first two evaluate answers with eval and with sympy, acre depends on size, knight_swap on the order of sets
@pytest.mark.parametrize(
    "task", ["n_queens", "countdown", "chain_sum", "acre", "word_ladder", "string_insertion"]
)
def test_right_and_wrong_answers(judge, task):
    prompts = reasoning_gym_prompts(task=task, size=3, seed=7)
    assert [p.id for p in prompts] == [
        p.id for p in reasoning_gym_prompts(task=task, size=3, seed=7)
    ]
    rows = [prompt.row for prompt in prompts]
    for row in rows:
        judge.check_row(row)
    right = judge.judge_batch([said(row["answer"]) for row in rows], rows)
    assert [str(result.verdict) for result in right] == ["CORRECT"] * len(rows), right
    wrong = judge.judge_batch([said("banana"), "banana", said("")], rows)
    assert [result.verdict for result in wrong] == [Verdict.WRONG, Verdict.UNPARSED, Verdict.WRONG]
    assert all(result.reward < 0.1 for result in wrong)


@needs_gym
def test_it_gives_what_the_package_gives(judge):
    import reasoning_gym

    prompts = reasoning_gym_prompts(
        task="countdown", size=4, seed=3, options={"min_numbers": 3, "max_numbers": 4}
    )
    dataset = reasoning_gym.create_dataset(
        "countdown", size=4, seed=3, min_numbers=3, max_numbers=4
    )
    assert [p.row["prompt"] for p in prompts] == [entry["question"] for entry in dataset]
    answers = ["1 + 1", "banana", str(dataset[2]["metadata"]["target"]), dataset[3]["answer"]]
    theirs = [dataset.score_answer(text, dataset[index]) for index, text in enumerate(answers)]
    ours = judge.judge_batch([said(text) for text in answers], [prompt.row for prompt in prompts])
    assert [result.reward for result in ours] == pytest.approx(theirs)
    assert len(set(theirs)) > 1


@needs_gym
@pytest.mark.parametrize("task", ["polynomial_multiplication", "puzzle24", "binary_matrix"])
def test_no_answer_is_evaluated_as_code(judge, task, tmp_path):
    prompt = reasoning_gym_prompts(task=task, size=1)[0]
    mark = tmp_path / "mark"
    hostile = [
        *HOSTILE,
        f"open({str(mark)!r}, 'w').write('x')",
        f"__import__('os').mkdir({str(mark)!r})",
    ]
    results = judge.judge_batch([said(text) for text in hostile], [prompt.row] * len(hostile))
    assert {result.verdict for result in results} == {Verdict.WRONG}, results
    assert not mark.exists()


def test_what_may_be_evaluated():
    path = Path(__file__).parents[2] / "rocm_ext/verifiers/_reasoning_gym.py"
    spec = importlib.util.spec_from_file_location("_judge", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for text in [
        "[['A', 'B'], [1, -2]]",
        "(1 + 2) * 3 / 4",
        "Integer (3 )*Symbol ('x')**Integer (2 )",
        "sin(pi)",
    ]:
        assert script.checked(text) == text
    for text in HOSTILE:
        with pytest.raises(ValueError):
            script.checked(text)


@needs_gym
def test_an_answer_that_takes_too_long_costs_itself_alone():
    judge = ReasoningGym(timeout=3, sandbox="rlimits")
    prompts = reasoning_gym_prompts(task="puzzle24", size=2)
    answers = [said("factorial(factorial(factorial(9)))"), said(prompts[1].row["answer"])]
    slow, right = judge.judge_batch(answers, [prompt.row for prompt in prompts])
    assert slow.verdict in (Verdict.TIMEOUT, Verdict.WRONG)
    assert right.verdict is Verdict.CORRECT


@needs_gym
def test_rows_of_another_version_are_errors(judge):
    row = reasoning_gym_prompts(task="chain_sum", size=1)[0].row
    result = judge(said("1"), {**row, "prompt": "1 + 1 = ?"})
    assert result.verdict is Verdict.ERROR
    assert "another question" in result.detail


@needs_gym
@pytest.mark.parametrize(("arguments", "message"), [
    ({"task": "count_down", "size": 1}, "has no task 'count_down'; did you mean countdown"),
    ({"task": "countdown", "size": 1, "options": {"min_number": 3}}, "min_number"),
    ({"task": "countdown", "size": 0}, "size is 0"), ({"task": "countdown", "size": 1, "skip": -1}, "skip is -1"),
])  # fmt: skip
def test_mistakes(arguments, message):
    with pytest.raises(UserError, match=message) as raised:
        reasoning_gym_prompts(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(HAS, reason="needs an environment without reasoning-gym")
def test_without_the_package():
    with pytest.raises(UserError, match="pip install"):
        reasoning_gym_prompts(task="countdown", size=1)
    with pytest.raises(ValueError, match="reasoning_gym"):
        ReasoningGym().check_row({"prompt": "2 + 2"})
