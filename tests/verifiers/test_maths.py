"""Mathematical answers: which text is the answer, and what counts as equal."""

# ruff: noqa: E501 - tables of answers, among them in other scripts

import concurrent.futures
import json
import random
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
    ("The answer is **42**.", "42", "CORRECT"), ("She pays 72 dollars in all.", "72", "CORRECT"),
    ("\\boxed{72\\text{ dollars}}", "72", "CORRECT"), ("So it is 70 + 2 = 72", "72", "CORRECT"),
    ("first 1\n#### 3\nno, wait\n#### 72", "72", "CORRECT"),
    ("The answer is 3. No: the answer is 72.", "72", "CORRECT"), ("I got 72.\nHope this helps!", "72", "CORRECT"),
    ("The answer is 71", "72", "WRONG"), ("72 73", "72", "WRONG"), (" ".join(map(str, range(1, 101))), "72", "WRONG"),
    (" ".join(f"\\boxed{{{i}}}" for i in range(60, 80)), "72", "WRONG"),
    (" ".join(f"\\boxed{{{i}}}" for i in range(60, 73)), "72", "WRONG"), ("\\boxed{72} \\boxed{73}", "72", "WRONG"),
    ("\\fbox{6},x=\\boxed{72}", "72", "WRONG"), ("#### 72\n#### 73", "72", "WRONG"), ("#### 72 73", "72", "WRONG"),
    ("\\boxed{72} or is it #### 73", "72", "WRONG"), ("\\boxed{72\\text{ or }73}", "72", "WRONG"),
    ("\\boxed{72 \\text{ or 73}}", "72", "WRONG"), ("\\boxed{72, 73}", "72", "WRONG"),
    ("\\boxed{[0, 100]}", "72", "WRONG"), ("\\boxed{72 \\pm 1}", "72", "WRONG"), ("\\boxed{x}", "72", "WRONG"), ("\\boxed{72_8}", "72", "WRONG"),
    ("I do not know", "72", "UNPARSED"), ("", "72", "UNPARSED"), ("\\boxed{}", "72", "UNPARSED"),
    ("<think>So \\boxed{72}.</think>\nI do not know.", "72", "UNPARSED"), ("<think>72", "72", "UNPARSED"),
    ("It is 71.</think>72", "72", "CORRECT"), ("\\boxed{72", "\\boxed{7}", "WRONG"),
    ("\\boxed{never closed, but \\boxed{72}", "72", "CORRECT"), ("\\boxed{\\frac{\\boxed{144}}{2}}", "144", "WRONG"),
    ("\\boxed{\\frac{1}{2}}", "0.5", "CORRECT"), ("$\\frac{3}{4}$", "\\frac{3}{4}", "CORRECT"),
    ("so $x = \\sqrt{8}$.", "2\\sqrt{2}", "CORRECT"), ("\\boxed{1+x}", "x+1", "CORRECT"),
    # exponential time would be hours
    ("\\boxed{72" + "(" + "a" * 72 + "1)}", "72", "WRONG"), ("We have 5 " + "*" * 1500 + " x 72 apples", "72", "WRONG"),
    ("Fill in 5 " + "_" * 1500 + " or so 72", "72", "WRONG"), ("5" + " " * 1500 + "x 72", "72", "WRONG"),
    ("\\boxed{-2, 1}", BOXES, "CORRECT"), ("\\boxed{-2}", BOXES, "WRONG"), ("\\boxed{1}", BOXES, "WRONG"),
    ("\\boxed{3.33}", "\\approx 3.33", "CORRECT"), ("\\boxed{x+2}", "x+1", "WRONG"), ("\\boxed{\\{2, 1\\}}", "\\{1, 2\\}", "CORRECT"),
])  # fmt: skip
def test_math_answer(math_pool: Pool, completion: str, answer: str, verdict: str):
    MathAnswer().check_row({"answer": answer})
    result = math_pool.submit(completion, {"answer": answer}).result()
    assert str(result.verdict) == verdict, result


@pytest.mark.wide(always=9)
@pytest.mark.parametrize(
    "answer",
    ["9**9**9", "9^{9^{9^{9}}}", "9" * 10**7, "(" * 5000 + "1" + ")" * 5000, "{" * 10000, "10**10**10", "(10^{99999})!",
     "\\frac{" * 60 + "1" + "}{2}" * 60, "\\int_0^1 \\sin(\\sin(\\sin(x)))^{x^x} dx", "1" + "+1" * 200,
     "\\sum_{n=1}^{10^{9}} \\sin(n)", "\\[" * 10000, "$" * 20001, "\\boxed{" * 3000 + "1" + "}" * 3000, "answer is" + " " * 20000, "answer " * 3000, "\x00", "\ud800", "\\boxed{" * 1000,
     "9!!!!!!!!", "(9!)!" * 9, "\\binom{10^9}{5*10^8}", "{10^9 \\choose 10^8}", "\\frac{1}{" * 10_000 + "1" + "}" * 10_000, "2^{" * 50 + "2" + "}" * 50,
     "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}^{10^9}", "\\prod_{n=1}^{10^9} n", "(x+1)^{100000}", "\\sqrt{" * 90 + "2" + "}" * 90, "\\log_{10^{-9}}(10^{99999999})",
     "1e999", "1/0", "\\Gamma(10^9)", "|" * 300, "+".join(f"\\sin({i}x)" for i in range(30))],
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
    ("There is no doubt that the answer is 5.", "5"), ("It cannot be 4. It is 5.", "5"), ("The number is not negative, so the answer is 5.", "5"),
    ("I don't need the rest: the answer is 5.", "5"), ("Not counting the dog, there are 5 pets.", "5"), ("She may buy 5", "5"),
    ("How many are left? She has 5 apples.", "5"), ("The answer is 5. Do you want to see more?", "5"), ("\\boxed{5}. Or, in words, five.", "5"), ("Without a doubt, it is \\boxed{5}.", "5"),
    ("The largest $n$ is 34.", "34"), ("So\n\\[\n x = 5\n\\]", "5"), ("\\boxed{−5}", "-5"),
    ("The answer is −5.", "-5"), ("1 million", "1000000"), ("\\boxed{1.5\\text{ million}}", "1500000"), ("3:2", "3:2"),
    ("\\boxed{3:2}", "\\frac{3}{2}"), ("5 or 6", "5, 6"), ("\\boxed{6\\text{ or }5}", "5, 6"),
    ("$5$ or $6$", "\\{5, 6\\}"), ("x = 5 or x = 6", "5, 6"), ("\\boxed{5!}", "120"), ("50%", "50"), ("50%", "0.5"),
    ("\\boxed{50\\%}", "\\frac{1}{2}"), ("50", "50\\%"), ("0.5", "50%"), ("1 1/2", "1.5"),
    ("\\boxed{1\\frac{1}{2}}", "\\frac32"), ("The answer is 2 1/2 hours.", "2.5"), ("90°", "90"),
    ("\\boxed{90^\\circ}", "90"), ("\\boxed{90}", "90^\\circ"), ("€5.50", "5.5"), ("$5.50", "5.5"),
    ("\\boxed{\\$5.50}", "5.50"), ("5.50 dollars", "5.5"), ("1.2e5", "120000"), ("1.2 \\times 10^5", "120000"),
    ("1.2 × 10⁵", "120000"), ("\\boxed{1.2 \\cdot 10^{-3}}", "0.0012"), ("1.2*10^5", "1.2e5"),
    ("1 234 567", "1234567"), ("2,74", "2.74"), ("1,234", "1234"), ("1{,}234", "1234"),
    ("٧٢", "72"), ("７２", "72"), ("७२", "72"), ("no solution", "no solution"),
    ("\\boxed{\\text{No solution}}", "\\text{no solution}"), ("(1,2)", "(1, 2)"), ("\\boxed{(1,2)}", "$(1,2)$"),
    ("[1,2]", "[1,2]"), ("\\{2,1\\}", "\\{1,2\\}"), ("x = 5", "5"), ("5", "x=5"), ("5 = x", "x = 5"),
    ("x=5, y=6", "x=5,y=6"), ("y=6, x=5", "x=5,y=6"), ("y = 2x+1", "2x - y + 1 = 0"), ("x \\ge 5", "5 \\le x"),
    ("\\begin{pmatrix}1 & 2\\\\3 & 4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"), ("72 dollars", "72"),
    ("\\boxed{72\\text{ cm}^2}", "72"), ("\\boxed{72 \\text{ m}}", "72"), ("\\boxed{72 cm}", "72"), ("5 dozen", "60"),
    ("5 dozen eggs", "60"), ("5 hundred", "500"), ("**72**", "72"), ("Therefore she has **72** apples.", "72"),
    ("She earns $12 an hour, so she gets $72.", "72"), ("$5 + $6 = $11.", "11"),
    ("It costs $5 and $6, so $11 in total.", "11"), ("So the total is $72$.", "72"), ("Total: 70 + 2 = 72", "72"),
    ("= 72", "72"), ("The answer is 72!", "72!"), ("Final answer: 72", "72"), ("Final Answer:\n72", "72"),
    ("The answer is:\n\n$$72$$", "72"), ("The answer is\n72", "72"), ("Answer: $72.00", "72"),
    ("\\boxed{\\$72.00}", "72"), ("The answer is $\\boxed{72}$.", "72"), ("#### $72", "72"),
    ("The final answer is 72. I hope it is correct.", "72"), ("\\boxed{\\sqrt{2}/2}", "\\frac{1}{\\sqrt{2}}"),
    ("√2", "\\sqrt{2}"), ("½", "0.5"), ("1½", "1.5"), ("\\boxed{0.333333}", "\\frac13"), ("\\boxed{2t}", "2t"),
    ("72x", "72x"), ("The answer is yes.", "yes"), ("\\boxed{A}", "A"), ("(C)", "\\text{(C)}"),
    ("The answer is $x^2+1$.", "1+x^2"), ("\\frac{10}{3} \\approx 3.33", "10/3"), ("x \\approx 5", "5"),
    ("$x=1$ and $y=2$", "x=1,y=2"), ("\\boxed{1} and \\boxed{2}", "1,2"), ("72 km/h", "72"),
    ("The speed is 72 km/h.", "72"), ("It takes 72 minutes to finish.", "72"),
    ("12,000 people", "12000"), ("-5", "- 5"),
    ("The answer is negative.", "negative"), ("x \\in (1,2)", "(1,2)"), ("\\frac{-1}{2}", "-0.5"),
    ("\\boxed{\\infty}", "∞"), ("\\pi", "π"), ("5\\pi", "5π"), ("She has 72 left.", "72"), ("72 (seventy-two)", "72"),
    ("Thus 72.", "72"), ("The answer is about 72.", "72"), ("≈ 72", "72"), ("The answer is \\frac{1}{2}.", "0.5"),
    ("so it is \\frac{1}{2}", "0.5"), ("The answer is 1/2.", "0.5"), ("so 3/4 of it", "3/4"), ("\\boxed{x=3}", "3"),
    ("\\boxed{f(x) = 2x}", "2x"), ("\\boxed{AB = 4}", "4"), ("The area is 72 square meters.", "72"),
    ("<think>\\boxed{24}</think>\n<answer>72</answer>", "72"), ("<answer>She has 72.</answer>", "72"),
    ("<answer>\\boxed{72}</answer>", "72"), ("<answer>\\frac{1}{2}</answer>", "0.5"), ("48 + 24 = **72**", "72"),
    ("`72`", "72"), ("seventy-two (72)", "72"), ("\\boxed{72 (seventy-two)}", "72"),
    ("The answer is 100!", "100!"),
    ("- \\boxed{72}", "72"), ("---\n\\boxed{72}", "72"),
    ("\\boxed{204_5}", "204_5"), ("\\boxed{72}, 24 of them in May.", "72"), ("48+24=$\\boxed{72}$", "72"),
    ("not 71 but \\boxed{72}", "72"),
    ("She gets 10 because 40 x .25 = 10", "10"), ("She uses a 440 / 40 = 11 packs", "11"),
    ("\\boxed{72\\,\\text{cm}}", "72"), ("\\boxed{72 \\%}", "72"),
    ("\\boxed{5\\pi\\text{ cm}}", "5\\pi"), ("5π cm", "5\\pi"), ("\\boxed{x\\text{ dollars}}", "x"), ("\\boxed{3\\sqrt{2}\\text{ cm}^2}", "3\\sqrt2"),
    ("\\boxed{\\log_2 3}", "\\log_2 3"), ("\\boxed{\\frac{\\ln 3}{\\ln 2}}", "\\log_2 3"), ("\\boxed{0.5}", "\\frac 1 2"), ("\\boxed{\\frac 3 4}", "0.75"),
    ("答案是72。", "72"), ("所以她有72个苹果。", "72"), ("Ответ: 72.", "72"), ("У неё осталось 72 яблока.", "72"), ("उत्तर ७२ है", "72"),
    ("\\boxed 27", "27"), ("So it is $\\boxed 27$.", "27"), ('The answer is "72".', "72"), ("It is '72'.", "72"), ("She has “72” apples.", "72"), ("- 72", "72"), ("- 5", "5"),
    ("Total:\n- 72", "72"), ("* 72", "72"), ("• **72**", "72"), ("\\boxed{- 5}", "-5"), ("17 and 23, so 40", "40"), ("\\boxed{x = 2 + 3 = 5}", "5"),
    ("W(x) = x^2 - 1", "W(n) = n^2 - 1"), ("\\boxed{f(x) = 2}", "\\boxed{f(t) = 2"), ("It costs \\$1,350 in all.", "1350"), ("The answer is not 10, it's 72.", "72"),
    ("The answer is (A).", "A"), ("(A)", "A"), ("A", "(A)"), ("\\boxed{\\text{(A)}}", "A"), ("\\boxed{A}", "\\text{(A)}"), ("**Answer: (C)**", "C"),
    ("The answer is option B.", "B"), ("The answer is (B) Paris.", "B"), ("\\boxed{\\text{B. Paris}}", "B"), ("\\boxed{B: 25}", "B"), ("\\boxed{B: 25}", "25"),
    ("\\boxed{\\textbf{(C)}\\ 25}", "C"), ("\\boxed{\\textbf{(C)}\\ 25}", "25"), ("\\boxed{C}", "\\textbf{(C)}\\ 25"), ("\\boxed{25}", "\\textbf{(C)}\\ 25"),
    ("\\boxed{A, C}", "AC"), ("\\boxed{C and A}", "AC"), ("\\boxed{(A), (C)}", "AC"), ("\\boxed{AC}", "A, C"), ("\\boxed{A} and \\boxed{C}", "AC"),
    ("\\boxed{x<2 \\text{ or } x>3}", "(-\\infty, 2) \\cup (3, \\infty)"), ("\\boxed{(-\\infty,2) \\text{ or } (3,\\infty)}", "(-\\infty, 2) \\cup (3, \\infty)"),
    ("\\boxed{(-\\infty, 2) \\cup (3, \\infty)}", "x<2 \\text{ or } x>3"), ("\\boxed{x>3 \\text{ or } x<2}", "x<2 \\text{ or } x>3"), ("\\boxed{x<2, x>3}", "x<2 \\text{ or } x>3"),
    ("\\boxed{f(x)=x+c}", "f(x)=x+c \\text{ for any } c"), ("\\boxed{f(x)=x+c \\text{ for all real } c}", "f(x)=x+c"), ("\\boxed{x=5 \\text{ for any constant } c}", "5"),
    ("\\boxed{101₂}", "101_2"), ("\\boxed{\\approx 3.33}", "3.33"), ("\\boxed{3.33}", "\\approx 3.33"), ("\\boxed{\\text{about } 3.33}", "3.33"),
    ("So it is 72...", "72"), ("\\boxed{" + "(" * 20 + "72" + ")" * 20 + "}", "72"),
]
WRONG = [  # (completion, gold): nothing here may be CORRECT
    ("5... or is it 6?", "5"), ("The answer is 5... or is it 6?", "5"), ("The final answer is 5... or is it 6?", "5"), ("\\boxed{5}... or is it 6?", "5"), ("Is it 5?", "5"),
    ("The answer is 5? Or 6?", "5"), ("any number but 5", "5"), ("Any number but \\boxed{5}", "5"), ("<answer>any number but 5</answer>", "5"), ("everything besides 5", "5"),
    ("The answer is certainly not equal to 5.", "5"), ("It is certainly not equal to \\boxed{5}", "5"), ("#### certainly not equal to 5", "5"), ("It does not equal 5.", "5"),
    ("I doubt 5", "5"), ("I doubt the answer is 5.", "5"), ("I doubt that it is \\boxed{5}.", "5"), ("#### I doubt 5", "5"), ("I don't think the answer is 5.", "5"),
    ("I do not believe it is 5.", "5"), ("It is unlikely to be 5.", "5"), ("The answer could be 5.", "5"), ("I am not sure it is 5.", "5"), ("It is false that the answer is 5.", "5"),
    ("The answer is −5.", "5"), ("\\boxed{−5}", "5"), ("It is −5", "5"), ("1 million", "1"),
    ("\\boxed{1 \\text{ million}}", "1"), ("The answer is 1 million.", "1"), ("He has 1 million dollars left.", "1"),
    ("12:30", "30"), ("12:30", "12"), ("It was 12:30.", "30"), ("3:2", "2"), ("The ratio is 3:2.", "2"),
    ("\\boxed{3:2}", "2"), ("3:2", "2:3"), ("5 or 6", "6"), ("5 or 6", "5"), ("It is 5 or 6.", "6"),
    ("It is either 5 or maybe 6.", "6"), ("\\boxed{5 \\text{ or } 6}", "6"), ("$5$ or $6$", "6"), ("$5$ or 6", "6"),
    ("The answer is $x = 5$ or $x = 6$.", "6"), ("\\boxed{5} or \\boxed{6}", "6"), ("5 apples or 6 apples", "6"),
    ("\\boxed{\\frac{1}{2004!}}", "\\frac{1}{2006!}"), ("\\boxed{10^{-20}}", "10^{-21}"),
    ("\\boxed{1.2\\times 10^{-7}}", "3.4 \\times 10^{-7}"), ("\\boxed{\\frac{1}{2^{99}}}", "\\frac{1}{2^{98}}"),
    ("\\boxed{x/2004!}", "x/2006!"), ("\\boxed{2006!}", "2006! + 1"), ("\\boxed{100!}", "100!+1"), ("at least 5", "5"),
    ("The answer is at least 5.", "5"), ("\\boxed{\\text{at least }5}", "5"), ("\\boxed{\\ge 5}", "5"),
    ("\\boxed{x \\ge 5}", "5"), ("more than 5", "5"), ("There are more than 5 apples.", "5"), ("up to 5", "5"),
    ("5 or more", "5"), ("She needs 5 or more.", "5"), (">5", "5"), ("≥ 5", "5"), ("less than 5", "5"), ("not 5", "5"),
    ("It is not 5.", "5"), ("The answer isn't 5", "5"), ("It isn't 5.", "5"), ("5-6", "6"), ("5-6", "5"), ("5–6", "6"),
    ("It takes 5-6 days.", "6"), ("It takes 5–6 days.", "6"), ("5 to 6", "6"), ("5 to 6 days", "6"),
    ("It takes 5 to 6 days.", "6"), ("between 5 and 6", "6"), ("It is between 5 and 6.", "6"),
    ("\\boxed{5\\text{ to }6}", "6"), ("1 hundred", "1"), ("5 dozen", "5"), ("5 dozen eggs", "5"),
    ("He has 5 dozen eggs.", "5"), ("\\boxed{5\\text{ dozen}}", "5"), ("5k", "5"), ("$5M", "5"), ("5 thousand", "5"),
    ("half of 72", "72"), ("Half of 72", "72"), ("twice 36", "36"), ("5 squared", "5"), ("5 factorial", "5"),
    ("5 times 6", "6"), ("5 plus 6", "6"), ("10 minus 5", "5"), ("negative 5", "5"), ("minus 5", "5"),
    ("5 and a half", "5"), ("5 halves", "5"), ("2 thirds", "2"), ("3 over 4", "4"), ("3 out of 4", "4"),
    ("2 hours and 30 minutes", "30"), ("2 hours 30 minutes", "30"), ("5 feet 6 inches", "6"),
    ("3 dollars and 50 cents", "50"), ("50%", "500"), ("50%", "5"), ("0.5%", "50"), ("1 1/2", "1/2"), ("1 1/2", "1"),
    ("1 1/2", "2"), ("It is 1 1/2.", "0.5"), ("It is 1 1/2.", "2"), ("\\boxed{1 1/2}", "11/2"),
    ("\\boxed{1\\frac12}", "\\frac12"), ("1.2e5", "5"), ("1.2e5", "1.2"), ("It is 1.2e5.", "5"),
    ("1.2 \\times 10^5", "5"), ("It is 1.2 \\times 10^5", "1.2"), ("It is 1.2 x 10^5.", "5"), ("1.2 × 10⁵", "10"),
    ("\\boxed{10^5}", "10"), ("10^5", "105"), ("10⁵", "105"), ("2²", "22"), ("2²", "2"), ("1.234,56", "56"),
    ("1.234,56", "1.234"), ("1.234", "1234"), ("2,74", "74"), ("2,74", "274"), ("72 73", "73"), ("72 73", "72"),
    ("\\boxed{72 73}", "145"), ("\\boxed{5 6}", "11"), ("\\boxed{5 \\quad 6}", "11"), ("5, 6", "6"),
    ("It is 5, 6.", "6"), ("1,2,3", "3"), ("no solution", "0"), ("\\boxed{\\text{no solution}}", "\\emptyset1"),
    ("no solution", "some solution"), ("(1,2)", "[1,2]"), ("(1,2)", "(2,1)"), ("(3,2)", "(4,1)"), ("(7,5)", "(6,5)"),
    ("(2,1)", "\\{1,2\\}"), ("\\{2,1\\}", "(1,2)"), ("[1,2]", "\\{1,2\\}"), ("x = 5", "6"), ("y = 5", "x = 5"),
    ("x=5, y=6", "6"), ("x=5, y=6", "5"), ("$x=5$, $y=6$", "6"), ("So x=5, y=6.", "6"), ("So x = 5 and y = 6.", "6"),
    ("x=6, y=5", "x=5, y=6"), ("2x = 10", "10"), ("x^2 = 25", "25"), ("x + 1 = 5", "5"),
    ("\\boxed{x^2 = -1}", "x^2 = -4"), ("y = 2x", "y = 3x"), ("x \\ge 5", "x > 5"), ("x \\le 5", "x \\ge 5"),
    ("\\begin{pmatrix}1 & 2\\\\3 & 4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}"),
    ("\\begin{pmatrix}5\\end{pmatrix}", "5"), ("\\boxed{2}", "2t"), ("\\boxed{2t}", "2"), ("\\boxed{3s}", "3"),
    ("5x", "5"), ("The answer is 5 x.", "5"), ("3i", "3"), ("72n", "72"), ("\\boxed{204_5}", "\\boxed{204_6}"),
    ("5_6", "11"), ("\\boxed{1,\\ldots,9}", "1, 9"), ("\\boxed{1+2+\\cdots+9}", "12"), ("5'6\"", "56"),
    ("\\boxed{5'6}", "56"), ("\\pm 5", "5"), ("5 ± 1", "5"), ("5 ± 1", "1"), ("\\boxed{5 \\approx 6}", "6"),
    ("\\boxed{|x|=5}", "50"), ("\\frac{1}{2}", "2"), ("so it is \\frac{1}{2}", "2"), ("so it is \\frac{1}{2}", "1"),
    ("The answer is \\frac{1}{2}.", "2"), ("1/2", "2"), ("so 1/2", "2"), ("72.5", "72"), ("72.", "73"),
    ("0.1", "0.10001"), ("1/3", "0.33"), ("x_1 = 5 and x_2 = 6", "6"), ("third", "3"), ("The 3rd", "3"),
    ("Option 3 or option 4", "4"), ("neither 5 nor 6", "6"), ("\\sqrt{5}", "5"), ("√5", "5"), ("It is √5.", "5"),
    ("log 5", "5"), ("\\log 5", "5"), ("sin 5", "5"), ("It is sin 5", "5"), ("5!", "5"), ("It is 5!.", "5"),
    ("-(5)", "5"), ("(5)", "-5"), ("- 5", "-5"), ("It is - 5", "5"), ("$-5$", "5"), ("-$5", "5"), ("It is -$5.", "5"),
    ("($5)", "-5"), ("\\boxed{1-\\frac{1}{\\mathrm{e}}}", "1+\\frac{1}{\\mathrm{e}}"),
    ("$1 + \\frac{1}{\\mathrm{e}}$", "$1 - \\frac{1}{\\mathrm{e}}$"), ("The square root of 5", "5"),
    ("2 to the power of 5", "5"), ("2 to the 5", "5"), ("remainder 5", "6"), ("5 remainder 2", "2"), ("5 R 2", "2"),
    ("-\\boxed{72}", "72"), ("$-\\boxed{72}$", "72"), ("\\boxed{72} thousand", "72"), ("$\\boxed{72}$ million", "72"),
    ("\\boxed{72}\\text{ million}", "72"), ("\\boxed{72}^2", "72"), ("\\boxed{72}5", "72"), ("5\\boxed{72}", "72"),
    ("$2\\cdot\\boxed{72}$", "72"), ("$\\boxed{72}+1$", "72"), ("$\\sqrt{\\boxed{72}}$", "72"),
    ("$\\frac{\\boxed{72}}{2}$", "72"), ("The answer is not \\boxed{72}.", "72"), ("\\boxed{72} or 71", "72"),
    ("\\boxed{72}, 71", "72"), ("\\boxed{72} is wrong", "72"), ("$x \\ne \\boxed{72}$", "72"), ("\\boxed{72_8}", "72"),
    ("The answer cannot be 72.", "72"), ("The answer is never 72.", "72"), ("It is the square of 72.", "72"),
    ("The answer is the reciprocal of 72.", "72"), ("The answer is 50% of 72.", "72"), ("72 millions", "72"),
    ("72 bn", "72"), ("72 dozens", "72"), ("72 (or less)", "72"), ("\\boxed{72 (million)}", "72"), ("$72!$", "72"),
    ("\\boxed{72!}", "72"), ("The answer is 5!", "5"), ("<answer>72</answer><answer>71</answer>", "72"),
    ("<answer>71 or 72</answer>", "72"), ("\\boxed{72}<answer>71</answer>", "72"), ("2**3**2", "8"),
    ("48+24 = 72 in base 8", "72"), ("48+24 = 72 to 73", "72"), ("48+24 = 72, 70 after 2 were lost", "72"),
    ("A or B", "B"), ("\\text{A or B}", "B"), ("\\boxed{A, B}", "B"), ("Yes or no", "no"), ("x=5 or y=6", "6"),
    ("5 or so", "5"), ("5 < x < 6", "6"), ("It is 5 < 6", "6"), ("5 \\ne 6", "6"), ("5 != 6", "6"), ("5 ≠ 6", "6"),
    ("a 5-6 split", "6"), ("the 5 x 6 grid", "6"), ("72 > 5", "5"), ("$72 or $73", "73"), ("$72-$73", "73"),
    ("72 dollars or 73 dollars", "73"), ("72 (or 73)", "73"), ("72 (or 73)", "72"), ("72/73", "73"), ("72 & 73", "73"),
    ("72; 73", "73"), ("72 vs 73", "73"), ("one of 72 or 73", "73"),
    ("17, maybe 23", "23"), ("17, maybe 23", "17"), ("23 (formerly 17)", "23"), ("23 (formerly 17)", "17"), ("\\boxed{23\\text{ (formerly 17)}}", "23"),
    ("17, maybe \\boxed{23}", "23"), ("#### 17, maybe 23", "23"), ("The answer is perhaps 23.", "23"), ("- 72", "-72"), ("The answer is:\n- 72", "-72"),
    ("\\boxed{5 \\approx 6}", "5"), ("\\boxed{5'}", "5"), ("5'", "5"), ("\\boxed{5\\text{ or something else}}", "5"), ("\\boxed{4=5}", "5"), ("4 = 5", "5"),
    ("\\boxed{1=2=3=4=5}", "5"), ("\\boxed{6=5}", "5"), ("\\boxed{a=6=5}", "5"), ("\\boxed{7\\approx 5 \\approx 6}", "7"), ("\\boxed{x \\approx 5 \\approx 6}", "5"),
    ("W(x) = x + n", "W(n) = 2n"), ("W(x) = 2n", "W(n) = 2n"), ("W(x) = xn", "W(n) = n^2"), ("V(x) = 2x", "W(n) = 2n"), ("W(x) = x + 1", "W(n) = n + 2"), ("5-\\boxed{72}", "72"), ("\\boxed{72} thousand", "72000000"),
    ("7 * 4 = 28 berries in 4 days.", "4"), ("He paid a total of 72 dollars for 3 books.", "72"), ("It is 72, or maybe not.", "72"), ("The cost is 72, perhaps.", "72"), ("1,234", "1234000"),
    ("(1,234)", "(1,235)"), ("\\boxed{(1,234)}", "(12, 34)"), ("\\boxed{7", "72"), ("72, 5 of them red", "72"), ("5 apples, 6 pears", "6"), ("She has 72 and he has 5", "72"), ("\\boxed{5} or twice \\boxed{72}", "72"), ("\\boxed{72} to 1,234 apples", "72"), ("about percent 72", "72"),
    ("It falls from 72.", "72"),
    ("\\boxed{\\not= 5}", "5"), ("\\boxed{x \\not= 5}", "5"), ("\\boxed{=/= 5}", "5"), ("\\boxed{5₆}", "5"), ("\\boxed{5⅕}", "5"), ("\\boxed{5ₓ}", "5"), ("\\boxed{101₂}", "101"),
    ("\\boxed{lambda: 5}", "5"), ("\\boxed{lambda x: 5}", "5"), ("\\boxed{sum(5)}", "5"), ("\\boxed{neg(5)}", "5"), ("\\boxed{six(5)}", "5"), ("\\boxed{\\approx 5}", "5"),
    ("\\boxed{x \\approx 5}", "5"), ("\\boxed{\\text{about }5}", "5"), ("\\boxed{\\text{almost }5}", "5"), ("It is nearly 5.", "5"), ("\\boxed{5...}", "5"), ("\\boxed{5.33...}", "5.33"),
    ("\\boxed{5 if n is odd}", "5"), ("\\boxed{5\\text{ only if }x}", "5"), ("\\boxed{5\\text{ unless }x=2}", "5"), ("\\boxed{5 without x}", "5"), ("\\boxed{except 5}", "5"),
    ("The answer is (A) or (B).", "A"), ("The answer is (B).", "A"), ("The answer is not (A).", "A"), ("\\boxed{(A) is incorrect}", "A"), ("The answer is (A) is wrong.", "A"), ("\\boxed{A \\text{ or } B}", "A"), ("\\boxed{(A)(B)}", "A"), ("\\boxed{AB}", "A"),
    ("\\boxed{A}", "AC"), ("\\boxed{A, B}", "AC"), ("\\boxed{A, B, C}", "AC"), ("\\boxed{A or C}", "AC"), ("\\boxed{A, A}", "A"), ("\\boxed{A, B, C, D, E}", "A"),
    ("\\boxed{\\textbf{(C)}\\ 24}", "\\textbf{(C)}\\ 25"), ("\\boxed{\\textbf{(D)}\\ 25}", "C"), ("\\boxed{(A) + 5}", "5"), ("\\boxed{(A)5}", "5"), ("\\boxed{(A) \\cdot 5}", "5"), ("\\boxed{(C)\\ 25 (D)\\ 26}", "C"),
    ("\\boxed{2A}", "A"), ("\\boxed{-A}", "A"), ("\\boxed{A!}", "A"), ("\\boxed{A^c}", "A"), ("\\boxed{A = 5}", "A"),
    ("\\boxed{x<2 \\text{ or } x\\ge 3}", "(-\\infty, 2) \\cup (3, \\infty)"), ("\\boxed{x<2 \\text{ or } y>3}", "(-\\infty, 2) \\cup (3, \\infty)"), ("\\boxed{x<2}", "x<2 \\text{ or } x>3"),
    ("\\boxed{x<2 \\text{ and } x>3}", "(-\\infty, 2) \\cup (3, \\infty)"), ("\\boxed{x>2 \\text{ or } x<3}", "(2, 3)"), ("\\boxed{f(x)=c}", "f(x)=x+c \\text{ for any } c"),
    ("\\boxed{n \\text{ for any } n}", "5"), ("\\boxed{5 \\text{ for all but one } n}", "5"),
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


def test_a_tolerance_holds_inside_points_and_every_gold_needs_an_answer():
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


def test_a_plain_number_needs_neither_a_worker_nor_another_process(math_pool: Pool, monkeypatch):
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


FORMS = [
    "\\boxed{%s}", "The answer is %s.", "The answer is: %s", "Answer: %s", "**Answer:** %s", "**%s**", "The answer is **%s**.", "= %s", "%s",
    "$\\boxed{%s}$", "\\[\n\\boxed{%s}\n\\]", "#### %s", "So the total is %s.", "Therefore, she has %s apples left.", "Thus, the final answer is $%s$.",
    "He earns $12 an hour, so he earns $%s in all.", "She pays %s dollars.", "So x = %s", "\\(%s\\)", "It takes her %s minutes.", "### Final Answer\n\n%s",
    "Hence there are **%s** students in the class.", "5 + 3 = %s", "In total, that is 3 * 4 = %s.", "The answer is $%s", "Answer:\n%s", "A: %s",
    "She makes $5 * 4 = $%s", "That leaves him with %s marbles at the end.", "This means that the answer is %s. Let me know if you have questions!",
]  # fmt: skip


@pytest.mark.wide
def test_gsm8k_in_the_forms_that_models_write(math_pool: Pool, gsm8k: list[dict]):
    rng, cases = random.Random(0), []
    for form in FORMS:
        for row in rng.sample(gsm8k, 1):
            gold = row["answer"].rpartition("####")[2].strip().replace(",", "")
            other = str(int(gold) + rng.choice([-1, 1, 10, 100]))
            steps = row["answer"].partition("\n")[0] + "\n"
            for value, verdict in ((gold, "CORRECT"), (other, "WRONG")):
                for text in (value, value + ".00", f"{int(value):,}"):
                    cases.append((steps + form % text, row, verdict))
    results = [math_pool.submit(text, row) for text, row, _ in cases]
    bad = [(case[0], each.result()) for case, each in zip(cases, results, strict=True)
           if str(each.result().verdict) != case[2]]  # fmt: skip
    assert not bad
