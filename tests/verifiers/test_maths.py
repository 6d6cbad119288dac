"""Mathematical answers: which text is the answer, and what counts as equal."""

# ruff: noqa: E501 - tables of answers, among them in other scripts

import concurrent.futures
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_ext.sandbox import helper
from rocm_ext.verifiers import MathAnswer, Pool, Verdict, maths
from rocm_ext.verifiers.mathtext import final_answer, number, plain, readable
from rocm_ext.verifiers.workers.pool import at_once

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_train.jsonl"
NODE = {"_component_": "rocm_ext.verifiers.MathAnswer"}


@pytest.fixture(scope="module")
def math_pool() -> Iterator[Pool]:
    with Pool(NODE | {"timeout": 30}, workers=2, timeout=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def impatient_pool() -> Iterator[Pool]:
    with Pool(NODE | {"timeout": 0.25}, workers=1, timeout=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def tolerant_pool() -> Iterator[Pool]:
    with Pool(NODE | {"timeout": 30, "tolerance": 1e-3}, workers=1, timeout=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def gsm8k() -> list[dict]:
    if not GSM8K.exists():
        pytest.skip(f"needs {GSM8K}")
    return [json.loads(line) for line in GSM8K.read_text().splitlines()]


BOXES = "\\(\\boxed{1}\\) and \\(\\boxed{-2}\\)."  # a gold answer may have several


@pytest.mark.parametrize(("completion", "answer", "verdict"), [
    ("The answer is 72.", "#### 72", "CORRECT"), ("\\boxed{72}", "72", "CORRECT"),
    ("72", "so 70 + 2 = <<70+2=72>>72\n#### 72", "CORRECT"), ("$1,234.50", "1234.5", "CORRECT"),
    ("#### 1,234", "1234", "CORRECT"), ("#### -5", "-5", "CORRECT"), ("**Answer:** 42", "42", "CORRECT"),
    ("\\boxed{72\\text{ dollars}}", "72", "CORRECT"),
    ("first 1\n#### 3\nno, wait\n#### 72", "72", "CORRECT"),
    ("The answer is 3. No: the answer is 72.", "72", "CORRECT"),
    ("The answer is 71", "72", "WRONG"), ("72 73", "72", "WRONG"),
    (" ".join(f"\\boxed{{{i}}}" for i in range(60, 80)), "72", "WRONG"),
    ("\\boxed{72} \\boxed{73}", "72", "WRONG"), ("#### 72\n#### 73", "72", "WRONG"),
    ("\\boxed{72} or is it #### 73", "72", "WRONG"), ("\\boxed{72\\text{ or }73}", "72", "WRONG"),
    ("\\boxed{[0, 100]}", "72", "WRONG"), ("\\boxed{72 \\pm 1}", "72", "WRONG"), ("\\boxed{x}", "72", "WRONG"),
    ("I do not know", "72", "UNPARSED"), ("", "72", "UNPARSED"), ("\\boxed{}", "72", "UNPARSED"),
    ("<think>So \\boxed{72}.</think>\nI do not know.", "72", "UNPARSED"), ("<think>72", "72", "UNPARSED"),
    ("It is 71.</think>72", "72", "CORRECT"), ("\\boxed{72", "\\boxed{7}", "WRONG"),
    ("\\boxed{never closed, but \\boxed{72}", "72", "CORRECT"), ("\\boxed{\\frac{\\boxed{144}}{2}}", "144", "WRONG"),
    ("\\boxed{\\frac{1}{2}}", "0.5", "CORRECT"),
    ("so $x = \\sqrt{8}$.", "2\\sqrt{2}", "CORRECT"), ("\\boxed{1+x}", "x+1", "CORRECT"),
    # exponential time would be hours
    ("\\boxed{72" + "(" + "a" * 72 + "1)}", "72", "WRONG"), ("We have 5 " + "*" * 1500 + " x 72 apples", "72", "WRONG"),
    ("Fill in 5 " + "_" * 1500 + " or so 72", "72", "WRONG"), ("5" + " " * 1500 + "x 72", "72", "WRONG"),
    ("\\boxed{-2, 1}", BOXES, "CORRECT"), ("\\boxed{1}", BOXES, "WRONG"),
    ("\\boxed{3.33}", "\\approx 3.33", "CORRECT"), ("\\boxed{x+2}", "x+1", "WRONG"), ("\\boxed{\\{2, 1\\}}", "\\{1, 2\\}", "CORRECT"),
])  # fmt: skip
def test_math_answer(math_pool: Pool, completion: str, answer: str, verdict: str):
    MathAnswer().check_row({"answer": answer})
    result = math_pool.submit(completion, {"answer": answer}).result()
    assert str(result.verdict) == verdict, result


@pytest.mark.wide(always=9)
@pytest.mark.parametrize(
    "answer",
    ["9**9**9", "9^{9^{9^{9}}}", "9" * 10**7, "(" * 5000 + "1" + ")" * 5000, "{" * 10000, "(10^{99999})!",
     "\\frac{" * 60 + "1" + "}{2}" * 60, "\\int_0^1 \\sin(\\sin(\\sin(x)))^{x^x} dx", "\\sum_{n=1}^{10^{9}} \\sin(n)",
     "$" * 20001, "\\boxed{" * 3000 + "1" + "}" * 3000, "answer " * 3000, "\x00", "\ud800", "9!!!!!!!!",
     "\\binom{10^9}{5*10^8}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}^{10^9}", "(x+1)^{100000}",
     "\\log_{10^{-9}}(10^{99999999})", "1e999", "1/0", "|" * 300],
)  # fmt: skip
def test_huge_answers_are_bounded(impatient_pool: Pool, answer: str):
    result = impatient_pool.submit(f"\\boxed{{{answer}}}", {"answer": "72"}).result()
    assert result.verdict in (Verdict.WRONG, Verdict.TIMEOUT, Verdict.UNPARSED), result


def test_math_works_from_any_thread_without_a_pool():
    verifier = MathAnswer()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = list(
            threads.map(
                lambda text: verifier(text, {"answer": "0.5"}),
                ["\\boxed{\\frac12}", "\\boxed{1/3}"],
            )
        )
    assert [str(result.verdict) for result in found] == ["CORRECT", "WRONG"]


@pytest.mark.wide
def test_every_gsm8k_answer_is_right(gsm8k):
    verifier = MathAnswer()
    for row in gsm8k:
        verifier.check_row(row)
    assert [verifier(row["answer"], row).reward for row in gsm8k] == [1] * 7473


# fmt: off
RIGHT = [  # (completion, gold)
    ("There is no doubt that the answer is 5.", "5"), ("The number is not negative, so the answer is 5.", "5"),
    ("Not counting the dog, there are 5 pets.", "5"), ("\\boxed{5}. Or, in words, five.", "5"),
    ("The largest $n$ is 34.", "34"), ("\\boxed{−5}", "-5"), ("3:2", "3:2"), ("5 or 6", "5, 6"),
    ("$5$ or $6$", "\\{5, 6\\}"), ("50%", "0.5"), ("50", "50\\%"), ("1 1/2", "1.5"), ("\\boxed{90^\\circ}", "90"),
    ("€5.50", "5.5"), ("\\boxed{\\$5.50}", "5.50"), ("1.2 × 10⁵", "120000"), ("1.2*10^5", "1.2e5"), ("2,74", "2.74"),
    ("７２", "72"), ("no solution", "no solution"), ("(1,2)", "(1, 2)"), ("x = 5", "5"), ("5 = x", "x = 5"),
    ("y=6, x=5", "x=5,y=6"), ("72 dollars", "72"), ("\\boxed{72 \\text{ m}}", "72"), ("5 dozen", "60"),
    ("Therefore she has **72** apples.", "72"), ("$5 + $6 = $11.", "11"), ("So the total is $72$.", "72"),
    ("Final answer: 72", "72"), ("The answer is:\n\n$$72$$", "72"), ("Answer: $72.00", "72"),
    ("The final answer is 72. I hope it is correct.", "72"), ("√2", "\\sqrt{2}"), ("1½", "1.5"),
    ("The answer is yes.", "yes"), ("(C)", "\\text{(C)}"), ("\\frac{10}{3} \\approx 3.33", "10/3"), ("72 km/h", "72"),
    ("It takes 72 minutes to finish.", "72"), ("-5", "- 5"), ("\\boxed{\\infty}", "∞"), ("5\\pi", "5π"),
    ("72 (seventy-two)", "72"), ("The answer is \\frac{1}{2}.", "0.5"), ("The answer is 1/2.", "0.5"),
    ("\\boxed{x=3}", "3"), ("<think>\\boxed{24}</think>\n<answer>72</answer>", "72"),
    ("<answer>\\boxed{72}</answer>", "72"), ("48 + 24 = **72**", "72"), ("The answer is 100!", "100!"),
    ("---\n\\boxed{72}", "72"), ("\\boxed{72}, 24 of them in May.", "72"), ("She uses a 440 / 40 = 11 packs", "11"),
    ("\\boxed{72 \\%}", "72"), ("5π cm", "5\\pi"), ("\\boxed{\\frac{\\ln 3}{\\ln 2}}", "\\log_2 3"),
    ("\\boxed{\\frac 3 4}", "0.75"), ("所以她有72个苹果。", "72"), ("\\boxed 27", "27"), ('The answer is "72".', "72"),
    ("She has “72” apples.", "72"), ("* 72", "72"), ("\\boxed{- 5}", "-5"), ("\\boxed{x = 2 + 3 = 5}", "5"),
    ("The answer is not 10, it's 72.", "72"), ("(A)", "A"), ("\\boxed{\\text{(A)}}", "A"),
    ("The answer is (B) Paris.", "B"), ("\\boxed{B: 25}", "B"), ("\\boxed{\\textbf{(C)}\\ 25}", "C"),
    ("\\boxed{A, C}", "AC"), ("\\boxed{(A), (C)}", "AC"), ("\\boxed{A} and \\boxed{C}", "AC"),
    ("\\boxed{x>3 \\text{ or } x<2}", "x<2 \\text{ or } x>3"), ("\\boxed{f(x)=x+c}", "f(x)=x+c \\text{ for any } c"),
    ("\\boxed{x=5 \\text{ for any constant } c}", "5"), ("\\boxed{\\text{about } 3.33}", "3.33"),
    ("\\boxed{" + "(" * 20 + "72" + ")" * 20 + "}", "72"),
]
WRONG = [  # (completion, gold): nothing here may be CORRECT
    ("5... or is it 6?", "5"), ("The final answer is 5... or is it 6?", "5"), ("The answer is 5? Or 6?", "5"),
    ("The answer is certainly not equal to 5.", "5"), ("#### certainly not equal to 5", "5"),
    ("I doubt the answer is 5.", "5"), ("It is unlikely to be 5.", "5"), ("I am not sure it is 5.", "5"),
    ("\\boxed{−5}", "5"), ("He has 1 million dollars left.", "1"), ("12:30", "12"), ("The ratio is 3:2.", "2"),
    ("It is 5 or 6.", "6"), ("\\boxed{5 \\text{ or } 6}", "6"), ("The answer is $x = 5$ or $x = 6$.", "6"),
    ("\\boxed{1.2\\times 10^{-7}}", "3.4 \\times 10^{-7}"), ("\\boxed{x/2004!}", "x/2006!"), ("at least 5", "5"),
    ("more than 5", "5"), ("up to 5", "5"), (">5", "5"), ("The answer isn't 5", "5"), ("5-6", "6"),
    ("It takes 5-6 days.", "6"), ("between 5 and 6", "6"), ("\\boxed{5\\text{ to }6}", "6"), ("5 dozen eggs", "5"),
    ("5 thousand", "5"), ("Half of 72", "72"), ("5 factorial", "5"), ("minus 5", "5"), ("5 halves", "5"),
    ("3 out of 4", "4"), ("50%", "500"), ("0.5%", "50"), ("1 1/2", "2"), ("1.2e5", "5"), ("It is 1.2e5.", "5"),
    ("It is 1.2 x 10^5.", "5"), ("2²", "22"), ("1.234,56", "56"), ("2,74", "74"), ("x = 2,74", "2.74"), ("\\boxed{5 6}", "11"), ("5, 6", "6"),
    ("no solution", "0"), ("(3,2)", "(4,1)"), ("(2,1)", "\\{1,2\\}"), ("x = 5", "6"), ("So x=5, y=6.", "6"),
    ("x=6, y=5", "x=5, y=6"), ("x + 1 = 5", "5"),
    ("\\begin{pmatrix}1 & 2\\\\3 & 4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"),
    ("\\begin{pmatrix}5\\end{pmatrix}", "5"), ("\\boxed{3s}", "3"), ("\\boxed{204_5}", "\\boxed{204_6}"),
    ("\\boxed{1,\\ldots,9}", "1, 9"), ("\\boxed{5'6}", "56"), ("\\boxed{|x|=5}", "50"), ("so it is \\frac{1}{2}", "2"),
    ("1/2", "2"), ("1/3", "0.33"), ("third", "3"), ("neither 5 nor 6", "6"), ("\\log 5", "5"), ("It is sin 5", "5"),
    ("-(5)", "5"), ("-$5", "5"), ("($5)", "-5"), ("The square root of 5", "5"), ("5 R 2", "2"),
    ("$-\\boxed{72}$", "72"), ("\\boxed{72}\\text{ million}", "72"), ("$\\boxed{72}+1$", "72"),
    ("$\\frac{\\boxed{72}}{2}$", "72"), ("\\boxed{72}, 71", "72"), ("The answer is never 72.", "72"),
    ("The answer is the reciprocal of 72.", "72"), ("72 bn", "72"), ("\\boxed{72!}", "72"),
    ("<answer>72</answer><answer>71</answer>", "72"), ("2**3**2", "8"), ("\\text{A or B}", "B"), ("Yes or no", "no"),
    ("5 < x < 6", "6"), ("a 5-6 split", "6"), ("72 > 5", "5"), ("72 dollars or 73 dollars", "73"), ("72; 73", "73"),
    ("one of 72 or 73", "73"), ("23 (formerly 17)", "23"), ("The answer is perhaps 23.", "23"),
    ("The answer is:\n- 72", "-72"), ("5'", "5"), ("\\boxed{6=5}", "5"), ("\\boxed{7\\approx 5 \\approx 6}", "7"),
    ("W(x) = 2n", "W(n) = 2n"), ("\\boxed{72} thousand", "72000000"),
    ("He paid a total of 72 dollars for 3 books.", "72"), ("1,234", "1234000"), ("5 apples, 6 pears", "6"),
    ("\\boxed{5} or twice \\boxed{72}", "72"), ("It falls from 72.", "72"), ("\\boxed{5⅕}", "5"),
    ("\\boxed{101₂}", "101"), ("\\boxed{sum(5)}", "5"), ("\\boxed{\\text{about }5}", "5"), ("It is nearly 5.", "5"),
    ("\\boxed{5 if n is odd}", "5"), ("The answer is (A) or (B).", "A"), ("The answer is not (A).", "A"),
    ("\\boxed{A \\text{ or } B}", "A"), ("\\boxed{A, B, C}", "AC"), ("\\boxed{A, A}", "A"),
    ("\\boxed{\\textbf{(D)}\\ 25}", "C"), ("\\boxed{2A}", "A"), ("\\boxed{A!}", "A"),
    ("\\boxed{x<2 \\text{ or } x\\ge 3}", "(-\\infty, 2) \\cup (3, \\infty)"),
    ("\\boxed{f(x)=c}", "f(x)=x+c \\text{ for any } c"), ("\\boxed{5 \\text{ for all but one } n}", "5"),
]
# fmt: on


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(("table", "verdicts"), [
    (RIGHT[::4], {"CORRECT"}), (WRONG[::8], {"WRONG", "UNPARSED"}),
    (RIGHT, {"CORRECT"}), (WRONG, {"WRONG", "UNPARSED"}),
])  # fmt: skip
def test_what_counts_as_equal(math_pool: Pool, table: list[tuple[str, str]], verdicts: set[str]):
    for _, gold in table:
        MathAnswer().check_row({"answer": gold})
    results = [math_pool.submit(completion, {"answer": gold}) for completion, gold in table]
    found = [(pair, str(each.result().verdict)) for pair, each in zip(table, results, strict=True)]
    assert not [(pair, verdict) for pair, verdict in found if verdict not in verdicts]


# fmt: off
GOLDS = [
    "5", r"$\frac{3}{4}$", r"$x+1$", r"$(1,2)$", r"$\{1,2\}$", r"$[0,1)$", r"$x=3$", r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"$y=2x+1$", r"$x>3$",
    r"$\sqrt{2}$", r"$\text{east}$", r"$f(x)=x^2$", r"$1,2,3$",
]
NONE_OF_THEM = [
    r"\frac{0}{0}", "x", r"\infty", r"\infty-\infty", r"\emptyset", r"\{\}", r"\mathbb{R}", r"(-\infty,\infty)", "a=b", "x=x", "0=0", "1=1", "true", r"\pm 5", "nan",
    r"\int", r"\lim_{x\to 0} x", r"\sum_{n} n", "f(x)", r"x \in \mathbb{R}", "5=6", "x=y", r"\neg x", r"\cup", r"\sqrt{-1}\cdot 0", "0^{-1}", r"\log 0", r"x\ne x",
    r"\left|x\right|", "?", r"\text{any}",
]
NOT_FIVE = [  # hedges, lists, and what latex2sympy reads in part
    "{5,6}", "5,6", "[5,6]", "5=6", "x=5, x=6", r"5\text{ or }6", "5;6", "5 6", r"5\quad 6", "6|5", r"5 \vee 6", r"5\lor 6", r"\{5\}\cup\{6\}", r"5\ne 6",
    r"x\in\{5,6\}", r"\begin{cases}5\\6\end{cases}", r"\begin{cases}5&x\\6&y\end{cases}", r"6\to 5", r"6\Rightarrow 5", r"6\implies x=5", r"5\mid 6",
    r"5\text{ (or 6)}", r"5\hspace{1cm}6", r"5\\6", r"6\\5", r"5\newline 6", r"5\,\text{or}\,6", r"\overset{6}{5}", r"\stackrel{6}{5}", "5_{6}", r"\cancel{6}5",
    r"\frac{5}{1}6", r"5\&6", r"5\%6", "6 < 5", r"5\phantom{6}", r"6 \approx 5", r"4.9 \approx 5", r"\pm 5", "x=5=6", r"5\pmod 7", "-5", "5!", "5.0000000000000001",
    r"4.\overline{9}6", r"5\,6", "5{,}6", r"5\text{ not }6", r"5\color{red}{6}", r"\underline{5}6", "0x5", "5\u200b6", "\u06165", "5\u0301", r"\boxed{6},5", "6}{5",
    r"\text{6 or 5}", r"\mbox{either 4 or 5}", "[4,6]", "4<x<6", "x>4", r"\ge5", "5+C", r"5\text{th}", r"5\text{ if right}", r"5\text{ is not the answer}",
    r"\text{not }5", r"\neg5", r"\lnot 5", "!5", r"\sim5", "5^*", r"5^{\dagger}", r"5\prime", r"\dot5", r"\vec{5}", r"\hat{5}", r"\tilde 5",
]
# fmt: on


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(("answers", "golds", "step"), [
    pytest.param(NONE_OF_THEM, GOLDS, 13, id="many, some of each"),
    pytest.param(NONE_OF_THEM, GOLDS, 1, id="many", marks=pytest.mark.wide),
    pytest.param(NOT_FIVE, ["5"], 1, id="hedges"),
])  # fmt: skip
def test_no_answer_fits_many_golds_and_no_hedge_is_right(
    math_pool: Pool, answers: list[str], golds: list[str], step: int
):
    """Every 13th case has each answer and each gold, because there are 14 golds."""
    cases = [(rf"\boxed{{{answer}}}", gold) for answer in answers for gold in golds][::step]
    assert {text for text, _ in cases} == {rf"\boxed{{{answer}}}" for answer in answers}
    assert {gold for _, gold in cases} == {*golds}
    results = [math_pool.submit(text, {"answer": gold}) for text, gold in cases]
    assert not [
        case
        for case, each in zip(cases, results, strict=True)
        if str(each.result().verdict) == "CORRECT"
    ]


@pytest.mark.wide(always=3)
@pytest.mark.parametrize(
    "gold", ["$2^{2005}$", "$2005!$", "$3^{1000}-1$", r"$\infty$", r"$-\infty$", "1e308", "1e999"]
)
def test_a_tolerance_is_exact_for_huge_golds(tolerant_pool: Pool, gold: str):
    for answer in ("5", "-7", "x", "2^{2006}", r"\sqrt{2}"):
        assert (
            str(tolerant_pool.submit(rf"\boxed{{{answer}}}", {"answer": gold}).result().verdict)
            == "WRONG"
        )
    assert (
        str(
            tolerant_pool.submit(rf"\boxed{{{gold.strip('$')}}}", {"answer": gold}).result().verdict
        )
        == "CORRECT"
    )


def test_a_tolerance_holds_inside_points():
    with Pool(NODE | {"timeout": 30, "tolerance": 1e-2}, workers=1, timeout=60) as pool:
        for text, gold, verdict in (
            (r"(0.6,2.6667]", r"$(\frac{3}{5},\frac{8}{3}]$", "CORRECT"),
            (r"(0.6,2.7667]", r"$(\frac{3}{5},\frac{8}{3}]$", "WRONG"), ("(0.001, 1)", "$(0.002, 1)$", "WRONG"),
            ("3.14", r"$\pi$", "CORRECT"),
        ):  # fmt: skip
            assert (
                str(pool.submit(rf"\boxed{{{text}}}", {"answer": gold}).result().verdict) == verdict
            ), text
    assert MathAnswer(tolerance=0.01)("3.14", {"answer": "3.1416"}).reward == 1
    assert MathAnswer()("3.14", {"answer": "3.1416"}).reward == 0
    for row in ({}, {"answer": None}, {"answer": ""}, {"answer": "\\boxed{}"}, {"answer": ["72"]}):
        with pytest.raises(ValueError, match="answer"):
            MathAnswer().check_row(row)
    assert final_answer("x" * 10**6) == ""


SEEDS = [
    "$", "$ ", "\\(", "\\[", "{", "\\boxed{", "\\text{", "\\a ", "answer ", "answer is 1 ", "final answer is 1. ", "#### 1\n", "(", "(1,", "1", "1,", "1 ", "1=",
    "x", "x = ", "1 + ", "1 or ", "$x$ or ", "\n", "1? ", "√(", "−", " ", "*", "_", "a ", "and ", "'", '"', "<<", "\\begin{cases}", "1 a ", "- ", "-", "a'", "5!", "5 apples ",
]  # fmt: skip


@pytest.mark.wide(always=10)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_text_holds_up_a_worker(impatient_pool: Pool, seed: str):
    """Any text is judged, or ends as TIMEOUT: never as ERROR, which a run counts as a fault of the verifier."""
    for text in (
        seed * (20_000 // len(seed)),
        f"It costs 5 {seed * (3000 // len(seed))}x 6 dollars",
        rf"\boxed{{5({seed * (400 // len(seed))}1)}}",
    ):
        result = impatient_pool.submit(text, {"answer": "72"}).result()
        assert result.verdict in (Verdict.WRONG, Verdict.TIMEOUT, Verdict.UNPARSED)


def test_a_search_is_linear_and_deep_brackets_are_not_read():
    started = time.process_time()
    for seed in (
        "7", "٣", "²", "1.", "7" * 19_990 + "." * 10_000 + "x", "5 " + "," * 9_000 + "x", "for any c ", "(A) ", "A. ",
        "about ",
    ):  # fmt: skip
        final_answer(rf"\boxed{{{seed * (20_000 // len(seed))}}}")
        final_answer("The answer is " + seed * (20_000 // len(seed)))
    assert time.process_time() - started < 5  # quadratic time is a minute
    assert [readable("(" * depth + "1" + ")" * depth) is None for depth in (20, 200)] == [
        False,
        True,
    ]


class Own(MathAnswer):
    """A verifier of a user."""


def test_a_plain_number_needs_no_other_process(math_pool: Pool, monkeypatch):
    def none(*_):
        raise AssertionError("elsewhere")

    monkeypatch.setattr(maths, "_child", none)
    monkeypatch.setattr(helper, "RUNNING", True)
    monkeypatch.setattr(Pool, "_enqueue", none)
    for text in ("72", "#### 72", "so 48+24 = 72\n#### 72.", "The answer is $\\boxed{72.0}$.", "\\boxed{72}", " 72\n",
                 "48+24=71\n72"):  # fmt: skip
        for judge in (MathAnswer(), lambda text, row: math_pool.submit(text, row).result()):
            assert str(judge(text, {"answer": "so\n#### 72"}).verdict) == "CORRECT"
            assert str(judge(text, {"answer": "7,201"}).verdict) == "WRONG"
    for text in (
        "-\\boxed{72}", "not \\boxed{72}", "\\boxed{5} or \\boxed{72}", "#### 72 or so", "2\\cdot\\boxed{72}", "1 72",
        "48+24=72", "1/\n72",
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="elsewhere"):
            MathAnswer()(text, {"answer": "72"})
    for text, row in (("72 apples", {"answer": "72"}), ("72", {"other": "72"})):
        with pytest.raises(AssertionError, match="elsewhere"):
            math_pool.submit(text, row)
    assert at_once(NODE)("5", {"answer": "5"}) == MathAnswer().at_once("5", {"answer": "5"})
    assert at_once({"_component_": "tests.verifiers.test_maths.Own"})("5", {"answer": "5"}) is None


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="0159 .,-+*/=\n#", max_size=40))
def test_a_number_without_a_search_is_that_of_the_search(text: str):
    if (found := plain(text)) is not None:
        assert number(found) == number(final_answer(text))


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="0123456789 .,-+*/^=()[]{}$\\%!:;xae\nor−²½٣", max_size=60))
def test_any_text_is_judged(text: str):
    for gold in (False, True):
        assert (found := final_answer(text, gold)) == found.strip()
