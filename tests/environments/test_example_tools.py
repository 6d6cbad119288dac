"""The tools in examples/tools."""

import importlib.util
import time
from pathlib import Path

import pytest

from rocm_ext.base.errors import UserError
from tests.kit.run_folders import write_jsonl

FOLDER = Path(__file__).parents[2] / "examples/tools"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


calculator, search = load("calculator").calculator, load("search")


# ---- calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("0.1 + 0.2", "0.3"), ("2/3", "2/3, about 0.666666666666667"), ("-1/8", "-0.125"), ("-7 % 3", "2"),
        ("7.5 // 2", "3"), ("2**-2", "0.25"), ("sqrt(16/9) - 4/3", "0"), ("sqrt(2)", "about 1.4142135623731"),
        ("(1/3)**2 * 9", "1"), ("0x10 + 1_000.5", "1016.5"), ("1.5e3", "1500"), ("max(1, 0.5) + abs(-2)", "3"),
        ("round(2.3456, 2)", "2.35"), ("(-1)**(10**900)", "1"), ("0.1234567890123456789", "0.1234567890123456789"),
    ],
)  # fmt: skip
def test_the_calculator_computes(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("9**9**9", "too large"), ("9**-9**9", "too large"), ("0e999999999", "too large"), ("1e3000*2**0.5", "too"),
        ("1e-99999999999999999999", "too large"), ("*".join(["9**3000"] * 90), "too large"), ("1/0", "by zero"),
        ("round(1, 10**9)", "from -30 to 30"), ("2^3", r"write \*\* for powers"), ("(-8)**(1/3)", "not real"),
        ("sqrt(-1)", "not real"), ("0**-1", "by zero"), ("(" * 400, "not an"), ("1" * 2000, "2000 characters"),
        ("__import__('os').getpid()", "not known"), ("'a' * 9", "not known"), ("True", "not known"), ("1,000", "known"),
        ("(1).__class__", "not known"), ("abs(1, 2)", "not an expression"), ("max(*[1])", "not known"), ("", "not an"),
    ],
)  # fmt: skip
def test_the_calculator_refuses_in_no_time(expression, problem):
    began = time.process_time()
    with pytest.raises(ValueError, match=problem):
        calculator(expression)
    assert time.process_time() - began < 1


# ---- search


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "rivers.md").write_text(
        "# Rivers\n\nThe Danube flows to the Black Sea.\n\nThe Rhine flows north."
    )
    (tmp_path / "sub/birds.txt").write_text("A heron stands in the river and waits for fish.")
    write_jsonl(
        tmp_path / "more.jsonl",
        [{"text": "The Alps rise."}, {"text": "Zebras have stripes, stripes, stripes."}],
    )
    (tmp_path / "ignored.bin").write_bytes(b"heron heron heron")
    return tmp_path


def test_search_finds_the_passages_that_fit_best(texts):
    find = search.Search(str(texts), passages=2, words=5).search
    assert find("Where do herons? HERON fish").splitlines() == [
        "sub/birds.txt: A heron stands in the river and waits for fish."
    ]
    assert (
        find("flows danube").split("\n\n")[0]
        == "rivers.md: # Rivers The Danube flows to the Black Sea."
    )
    assert len(find("the").split("\n\n")) == 2
    assert find("stripes").startswith("more.jsonl: Zebras")
    assert find("sub") == find("birds"), "names of files count"
    assert find("xylophone") == find("") == find("?!") == "nothing found; try other words"
    assert search.Search(str(texts))._index is search.Search(f"{texts}/.")._index, "made once"


@pytest.mark.parametrize("line", ["{", "[1]", '{"title": 1}', '{"text": 1}', "[" * 100_000])
def test_search_names_a_bad_line(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2"):
        search.Search(str(tmp_path))
    with pytest.raises(UserError, match="found no text"):
        search.Search(str(tmp_path / "missing"))
