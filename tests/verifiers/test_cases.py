"""What counts as the right output of a program, by the rules of LiveCodeBench's grader where they are right."""

import pytest

from rocm_ext.verifiers.cases import same_output

RIGHT = [  # printed, expected
    ("5", "5\n"), ("5\r\n6\r\n", "5\n6"), ("1\t2\t3", "1 2 3"), ("1  2", "1 2"), ("\n5\n", "5"),
    (" \n\n  \n5 6", "5 6"), ("  5", "5"), ("5.0", "5"), ("5", "5.00"), ("1e1 -0.0 .5 +3", "10 0 0.5 3"),
    ("100000000000000000000001.0", "100000000000000000000001"), ("YES \n5.0\nNO\t", "YES\n5\nNO"),
    ("\n *\n***", " *\n***"), ("", "\n"),
]  # fmt: skip
WRONG = [
    ("5.0000001", "5"), ("100000000000000000000000.0", "100000000000000000000001"),
    ("100000000000000000000.5", "100000000000000000000"), ("0.1000000000000000055511151231257827", "0.1"),
    ("1 2", "1\n2"), ("1\n\n2", "1\n2"), ("12", "1 2"), ("1 2 3", "1 2"), ("", "5"), ("5", ""), ("0011", "11"),
    ("11", "0011"), ("5_0", "50"), ("٥", "5"), ("nan", "NaN"), ("inf", "Infinity"), ("yes", "YES"),
    ("a\tb", "a b"),  # only numbers may be apart as they like
    ("a  b", "a b"),
    ("*\n***", " *\n***"),  # a figure
    ("x 5.0", "x 5"), ("1e99999", "1e99998"),
]  # fmt: skip


@pytest.mark.parametrize(("printed", "expected"), RIGHT)
def test_numbers_have_values_and_blank_beginnings_do_not_count(printed: str, expected: str):
    assert same_output(printed, expected)
    assert same_output(printed, expected, 0)


@pytest.mark.parametrize(("printed", "expected"), WRONG)
def test_other_outputs_are_wrong(printed: str, expected: str):
    assert not same_output(printed, expected)


@pytest.mark.parametrize(("printed", "expected", "tolerance", "right"), [
    ("x 5.0", "x 5", 0, True), ("x 5.0001", "x 5", 1e-3, True), ("x 5.01", "x 5", 1e-3, False),
    ("0.1000000000000000055511151231257827", "0.1", 0, False),
    ("0.1000000000000000055511151231257827", "0.1", 1e-9, True), ("0011", "11", 1e-3, False),
    ("1000000", "1000001", 1e-3, False),  # whole numbers are exact
    ("1000000.0", "1000001", 1e-3, True), ("\n1.0001", "1", 1e-3, True), ("1 2", "1\n2", 1e-3, False),
    ("nan", "1", 1e9, False), ("1e999", "2e999", 0.1, False), ("1_0", "10", 0.1, False), ("1.50 a", "1.5 a", 0, True),
])  # fmt: skip
def test_a_tolerance_compares_all_words(printed: str, expected: str, tolerance: float, right: bool):
    assert same_output(printed, expected, tolerance) is right
