"""`rocm-ext report`: the page's content, and its appearance in a browser."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocm_ext.cli import main
from rocm_ext.report.curves import smooth, thin, tick_labels, ticks, value_range
from rocm_ext.report.text import visible
from tests.browser import browser as browser
from tests.run_folders import append_jsonl, curve, raft, remove_lines, sft, step_lines, write_jsonl

RIGHT = [[True] * 3 + [False] * 7, [True] * 5 + [False] * 5, [True] * 8 + [False] * 2]
CHARTS = ("Loss", "Learning rate", "Gradient norm", "Speed", "Peak memory")
RAFT_CHARTS = ("Held-out pass@1", "Held-out pass@k", "Verdicts", "Rewards", "Answer length", "Entropy", "Answers kept",
               "Time", "Sampling speed")  # fmt: skip
GPU_CHARTS = ("GPU load", "GPU memory", "GPU power", "GPU temperature", "GPU clock", "Processor load",
              "Host memory in use", "Memory of the process")  # fmt: skip


def report(*folders: Path, output: Path | None = None) -> str:
    """Write the report and return the page's text."""
    assert main(["report", *map(str, folders), *(["-o", str(output)] if output else [])]) == 0
    return (output or folders[0] / "report.html").read_text()


def figures(html: str) -> list[str]:
    """Return the titles of the charts."""
    return re.findall(r"<figcaption><b>([^<]*)</b>", html)


def words(html: str) -> str:
    """Return the text between tags."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html.partition("</style>")[2])))


def hardware(folder: Path, gpus: int = 1, lines: int = 120, pause_at: int | None = None) -> Path:
    """Write ``hardware.jsonl`` with GPUs of different loads."""
    now, readings = 1.75e9, []
    for i in range(lines):
        now += 9 * 3600 if i == pause_at else 5
        cards: list[dict[str, Any]] = [
            {
                "id": f"0000:c{gpu}:00.0", "name": "AMD Instinct MI300X", "busy": 90 - 10 * gpu + i % 5,
                "vram_used": (40 + gpu) << 30, "gtt_used": 1 << 28, "power": 600 + i % 7, "temperature": 60 + i % 3,
                "clock": 2000,
            }
            for gpu in range(gpus)
        ]  # fmt: skip
        if i % 10 == 3 and cards:
            del cards[0]["power"]
        host = {"cpu": 12.5, "memory_used": 100 << 30, "memory_total": 200 << 30, "process_memory": 9 << 30}
        readings.append({"time": now, "gpus": cards, "host": host})
    write_jsonl(folder / "hardware.jsonl", readings)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return hardware(sft(tmp_path / "run", curve(120), validation={40: 1.4, 80: 1.2, 120: 1.1}))


@pytest.fixture
def raft_run(tmp_path: Path) -> Path:
    return raft(tmp_path / "raft", RIGHT, drawn=4)


# ---- content


def test_a_run_of_sft(run, capsys):
    html = report(run)
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert figures(html) == ["Loss", "Validation loss", *CHARTS[1:], *GPU_CHARTS]
    text = words(html)
    for fact in (
        "Qwen2.5-7B-Instruct · lora_qwen2_5_7b_base",
        "Radeon 8060S",
        "bfloat16",
        "Steps 120, epoch 1",
        "40.0 GiB",
        "1.1 at step 120",
        "State finished",
        "optimizer.lr 0.0002",
    ):
        assert fact in text, fact
    assert str(run / "adapter") in text


def test_charts_are_told_in_words(tmp_path):
    html = report(sft(tmp_path / "run", [2.5, 2.0, 1.5]))
    assert 'aria-label="Loss, nats per token: loss goes from 2.5 at step 1 to 1.5 at step 3"' in html


def test_a_run_of_raft(raft_run):
    html = report(raft_run)
    assert figures(html) == [*RAFT_CHARTS, *CHARTS]
    text = words(html)
    assert "30.0 % (10.8 – 60.3) → 80.0 % (49.0 – 94.3)" in text  # Wilson's intervals of 3 and 8 of 10
    assert html.count("<h3>") == 10  # samples, two of each verdict
    for verdict in ("CORRECT", "WRONG", "UNPARSED", "TIMEOUT", "ERROR"):
        assert html.count(f">{verdict}</span>") == 2


def test_it_is_the_same_each_time(raft_run, tmp_path):
    first = report(raft_run, output=tmp_path / "a.html")
    lines = (raft_run / "samples.jsonl").read_text().splitlines(keepends=True)
    (raft_run / "samples.jsonl").write_text("".join(reversed(lines)))
    assert report(raft_run, output=tmp_path / "b.html") == first


def test_several_runs(run, raft_run, tmp_path, monkeypatch):
    other = sft(tmp_path / "other", curve(90) * 1.1, seed=5, finished=False)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), str(raft_run), str(other), str(run)]) == 0
    html = (tmp_path / "report.html").read_text()
    assert not (run / "report.html").exists()
    text = words(html)
    assert "3 runs" in text  # one was named twice
    assert "seed 0 0 5" in text
    differing = text.split("Settings that differ")[1].split(" Settings ")[0]
    assert "seed" in differing
    assert "output_dir" not in differing  # nor what is below it
    assert "State not finished, last line of 20" in text
    loss = html.split("<figcaption><b>Loss</b>")[1].split("</figure>")[0]
    assert [loss.count(f'class="line c{i} d0"') for i in range(4)] == [1, 1, 1, 0]


def test_runs_of_the_same_name(tmp_path):
    a, b = sft(tmp_path / "a" / "out", curve(5)), sft(tmp_path / "b" / "out", curve(5))
    text = words(report(a, b, output=tmp_path / "r.html"))
    assert "a/out" in text
    assert "b/out" in text


def prompts(folder: Path) -> dict[str, Any]:
    """The setting ``prompts`` of a run, whose file is written into a folder."""
    rows = [{"id": f"prompt{i}", "prompt": f"What is {i} and {i}?", "answer": "7"} for i in range(6)]
    data = write_jsonl(folder / "prompts.jsonl", rows)
    return {"_component_": "rocm_ext.data.prompt_dataset", "source": str(data)}


def test_prompts_come_from_the_runs_own_file(tmp_path):
    node = prompts(tmp_path)
    assert "What is 1 and 1?" in report(raft(tmp_path / "run", RIGHT, prompts=node))
    Path(node["source"]).unlink()
    shutil.rmtree(tmp_path / "run")
    assert "What is" not in report(raft(tmp_path / "run", RIGHT, prompts=node))


def test_hardware_of_several_gpus_and_a_pause(tmp_path):
    html = report(hardware(sft(tmp_path / "run", curve(30)), gpus=3, pause_at=60))
    load = html.split("<b>GPU load</b>")[1].split("</figure>")[0]
    assert re.findall(r"</i>(GPU \d)</li>", load) == ["GPU 0", "GPU 1", "GPU 2"]
    assert ">resumed<" in load
    assert re.search(r'd="M[^"M]*M[^"M]*" class="line c1', load)  # two strokes, and none across
    assert "9 min 55 s, resumed 1 time" in words(html)  # the pause in between does not count


# ---- incomplete runs


def test_no_step_yet(tmp_path):
    folder = sft(tmp_path / "run", [], lines=[], finished=False)
    text = words(report(folder))
    assert "The run has recorded no step yet" in text
    assert "Qwen2.5-7B-Instruct" in text


def test_a_single_step(tmp_path):
    html = report(sft(tmp_path / "run", curve(1), finished=False))
    assert figures(html) == list(CHARTS)
    assert html.count("<circle") == len(CHARTS)


def test_losses_that_are_not_finite(tmp_path):
    losses = curve(60)
    losses[[20, 40]] = np.nan, np.inf
    loss = report(sft(tmp_path / "run", losses)).split("<b>Loss</b>")[1].split("</figure>")[0]
    assert loss.count("not finite at") == 2
    assert "NaN" not in re.findall(r'd="([^"]*)"', loss)
    html = report(sft(tmp_path / "all", [np.nan] * 30))
    assert html.count("not finite at") == 30


def test_a_spike_does_not_flatten_the_rest(tmp_path):
    losses = curve(300)
    losses[150] = 1e6
    html = report(sft(tmp_path / "run", losses))
    loss = html.split("<b>Loss</b>")[1].split("</figure>")[0]
    labels = [float(label) for label in re.findall(r'text-anchor="end">([\d.]+)<', loss)]
    assert 2 < max(labels) < 20
    assert "1M at 151" in loss  # the report mentions it


@pytest.mark.parametrize("state", ["sampling", "training", "trained", "evaluating"])
def test_in_the_middle_of_a_cycle(raft_run, state):
    last = raft_run / "cycle_2"
    shutil.rmtree(raft_run / "adapter")
    rows = json.loads((raft_run / "summary.json").read_text())["cycles"]
    (raft_run / "summary.json").write_text(json.dumps({"cycles": rows[:2]}))
    gone = {
        "sampling": ["eval.json", "summary.json", "metrics.jsonl", "kept.jsonl", "adapter"],
        "training": ["eval.json", "summary.json", "adapter"],
        "trained": ["eval.json"],
        "evaluating": ["eval.json"],
    }[state]
    for name in gone:
        path = last / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if state != "evaluating":
        for name in ("samples", "verdicts"):
            remove_lines(raft_run / f"{name}.jsonl", 2, "eval")
    text = words(report(raft_run))
    assert f"1, {state} in cycle 2" in text
    assert "not finished" in text
    assert "50.0 % (23.7 – 76.3)" in text  # of cycle 1, the newest one


def test_only_the_evaluation_before_training(tmp_path):
    html = report(raft(tmp_path / "run", RIGHT[:1], finished=False))
    assert figures(html) == ["Held-out pass@1", "Time"]
    assert "held-out answers of cycle 0" in words(html)


def test_torn_and_broken_lines(run):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"step": 121, "lo')
    text = words(report(run))
    assert "metrics.jsonl: skipped 1 line that is not a JSON object" in text
    assert "Steps 120" in text


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "stranger", "junk"])
def test_no_run(tmp_path, capsys, kind):
    folder = tmp_path / "no run"
    if kind == "file":
        folder.write_text("text")
    elif kind != "missing":
        folder.mkdir()
    if kind == "stranger":
        (folder / "config.yaml").write_text("site_name: docs\n")
    if kind == "junk":
        (folder / "metrics.jsonl").write_bytes(bytes(range(256)))
        (folder / "config.yaml").write_bytes(b"\x00\xff")
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", str(folder)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert str(folder) in err
    if kind in ("empty", "stranger", "junk"):
        assert "expected the output_dir of lora_finetune_rocm, raft_rocm, grpo_rocm or dpo_rocm" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_output_that_cannot_be_written(run, tmp_path, capsys):
    for output in (tmp_path, tmp_path / "missing" / "r.html"):
        assert main(["report", str(run), "-o", str(output)]) == 1
        assert capsys.readouterr().err.startswith("error: ")


def test_files_that_may_not_be_read(run, monkeypatch):
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "config.yaml":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "config.yaml cannot be read: Permission denied" in words(report(run))


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=4,
)
KEYS = ["step", "loss", "val_loss", "lr", "tokens", "seconds", "peak_memory", "time", "gpus", "host", "cycle", "phase"]
KEYS += ["cycles", "filter", "prompts", "correct", "pass_at_k", "reward", "verdict", "sample", "prompt_id", "logprobs"]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_values_in_its_files(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("wild")
    run = hardware(raft(folder / "run", RIGHT[:2], answers=4, drawn=1), lines=4)
    files = sorted(path for path in run.rglob("*.json*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3)):
        value = json.loads(path.read_text().splitlines()[0]) if path.suffix == ".jsonl" else {}
        value |= data.draw(st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=4))
        with path.open("a" if path.suffix == ".jsonl" else "w") as file:
            file.write(json.dumps(value) + "\n")
    assert "</html>" in report(run)


def test_it_needs_no_torch(run, tmp_path):
    samples = raft(tmp_path / "raft", RIGHT, prompts=prompts(tmp_path))
    page = tmp_path / "page.html"
    code = "import sys; from rocm_ext.cli import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    arguments = ["report", str(run), str(samples), "-o", str(page)]
    assert subprocess.run([sys.executable, "-c", code, *arguments]).returncode == 0
    assert "What is 1 and 1?" in page.read_text()


# ---- curves


def test_a_long_run_makes_a_small_file(tmp_path):
    losses = 1 + np.random.default_rng(0).normal(size=30000) * 0.1
    losses[[12345, 23456]] = 0.2, 1.9
    html = report(sft(tmp_path / "run", losses))
    assert len(html) < 600_000
    loss = html.split("<b>Loss</b>")[1].split("</figure>")[0]
    path = re.search(r'd="([^"]*)" class="line faint', loss)
    assert path
    heights = [float(y) for y in re.findall(r" ([\d.]+)", path[1])]
    assert len(heights) < 1100
    assert max(heights) - np.sort(heights)[-10] > 5  # the lowest value appears, and no other near it


@given(st.lists(st.floats(-1e6, 1e6) | st.just(np.nan), min_size=1, max_size=400), st.integers(10, 100))
def test_thinning_keeps_extremes(values, most):
    y = np.array(values)
    kept = thin(y, most)
    assert len(kept) <= max(most * 1.05 + 3, 3) or len(y) <= most
    assert (np.diff(kept) > 0).all()
    if np.isfinite(y).any():
        assert np.nanmin(y[kept]) == np.nanmin(y)
        assert np.nanmax(y[kept]) == np.nanmax(y)


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 10))
def test_ticks_are_round_few_and_told_apart(low, size, most):
    high = low + size
    if high - low < 1e-6 * max(abs(low), abs(high)):
        return
    found = ticks(low, high, most)
    assert len(found) <= most + 1
    assert all(low - 1e-6 * size <= tick <= high + 1e-6 * size for tick in found)
    labels = tick_labels(found)
    assert len(set(labels)) == len(labels)
    if len(found) > 1:
        step = found[1] - found[0]
        assert round(float(f"{step:.3e}".split("e")[0]), 2) in (1, 2, 5, 10)


def test_labels():
    assert tick_labels([0, 5000, 10000]) == ["0", "5k", "10k"]
    assert tick_labels([0.1, 0.15]) == ["0.10", "0.15"]
    assert tick_labels([0, 1e-4, 2e-4]) == ["0", "1e-4", "2e-4"]
    assert ticks(1, 7, whole=True) == [2, 4, 6]
    assert ticks(1, 1.4, whole=True) == [1]
    assert value_range([np.array([5.0, 5.0])], zero=True)[0] == 0


def test_smoothing_ignores_what_is_not_finite():
    assert smooth(np.array([1.0, np.nan, 3.0, 5.0]), 3).tolist() == [1, 2, 4, 4]
    assert np.isnan(smooth(np.array([np.nan, np.nan]), 1)).all()


# ---- hostile text

NASTY = (
    "<script>window.pwned=1</script><img src=x onerror='window.pwned=2'>]]>--></title></style></pre></svg>"
    "\"'`&lt;&#60;{{7*7}}{% raw %}\u202eright to left\u2066\x00\x1b[31m\x7f\u2028\ud800 \ufeff" + "W" * 5000
)


def hostile(folder: Path) -> Path:
    """Write a run in which every text is an attack."""
    texts = dict.fromkeys(("CORRECT", "WRONG", "UNPARSED", "TIMEOUT", "ERROR", "detail"), NASTY)
    run = raft(folder / "<script>window.pwned=3<\\script> \u202e\"'&", RIGHT, texts=texts)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {"model": {"_component_": NASTY, NASTY: NASTY}, "hardware": NASTY, "dtype": NASTY}
    (run / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    scope = {"step": 2, "phase": "sample", "prompt_id": NASTY}
    lines = [{**scope, "sample": i, "verdict": NASTY[:60], "reward": 0.5, "detail": NASTY} for i in range(3)]
    samples = [{**line, "text": NASTY, "tokens": [1], "logprobs": [-1.0]} for line in lines]
    for name, more in (("verdicts", lines), ("samples", samples)):
        append_jsonl(run / f"{name}.jsonl", more)
    summary = json.loads((run / "cycle_1" / "summary.json").read_text())
    (run / "cycle_1" / "summary.json").write_text(json.dumps({**summary, "machine": NASTY, "dtype": NASTY}))
    gpus = [{"id": NASTY, "name": NASTY, "busy": 5}, {"id": "b", "busy": 6}]
    write_jsonl(run / "hardware.jsonl", [{"time": 5 * i, "gpus": gpus} for i in range(5)])
    return run


def test_hostile_text_is_only_text(tmp_path):
    html = report(hostile(tmp_path), output=tmp_path / "r.html")
    assert html.isascii()
    assert "<script" not in html
    assert "<img" not in html
    assert "&#8238;" not in html  # the character that reverses direction, as a reference
    assert "\\u202eright to left" in html
    assert "&#9216;" in html  # the symbol for NUL
    assert "\\ud800" in html
    assert "characters left out" in html
    assert "{{7*7}}" in html  # not evaluated


def test_visible():
    assert visible("a\r\nb\tc", 99) == "a\nb\tc"
    assert visible("\x00\x1b\x7f\u202e\ud83d", 99) == "\u2400\u241b\\u007f\\u202e\\ud83d"
    assert visible("नि\u200dत्य é 中文 👩\u200d💻", 99) == "नि\u200dत्य é 中文 👩\u200d💻"
    clipped = visible("a" * 50 + "b" * 50, limit=40)
    assert clipped == "a" * 30 + "\n[ 60 characters left out ]\n" + "b" * 10


# ---- in a browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write reports of all kinds of runs."""
    folder = tmp_path_factory.mktemp("pages")
    long = hardware(sft(folder / ("a_long_name_of_a_run_" * 4), curve(2000), validation={500: 1.2, 1000: 1.1}), gpus=8)
    cycles = hardware(raft(folder / "raft", RIGHT * 8, drawn=4), gpus=2, pause_at=50)
    single = sft(folder / "single", [1e-5], finished=False)
    odd = sft(folder / "odd", 1e9 * curve(40), lines=step_lines(1e9 * curve(40), speed=2e7))
    out = {name: folder / f"{name}.html" for name in ("sft", "raft", "single", "several", "hostile")}
    report(long, output=out["sft"])
    report(cycles, output=out["raft"])
    report(single, output=out["single"])
    report(long, cycles, odd, *(sft(folder / f"run{i}", curve(50, i)) for i in range(5)), output=out["several"])
    report(hostile(folder), output=out["hostile"])
    return out


@pytest.fixture
def open_page(browser, pages) -> Iterator[Any]:
    contexts = []

    def open_(name: str, width: int = 360, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(pages[name].as_uri())
        return page

    yield open_
    for context in contexts:
        context.close()


OVERLAPS = """() => [...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  const frame = svg.closest('figure').getBoundingClientRect();
  const outside = boxes.filter(([t, b]) => b.left < frame.left - 1 || b.right > frame.right + 1).map(([t]) => t);
  const pairs = boxes.flatMap(([t, a], i) => boxes.slice(i + 1).filter(([u, b]) =>
    a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom).map(([u]) => t + '|' + u));
  return [...outside, ...pairs];
})"""


@pytest.mark.parametrize("width", [360, pytest.param(1200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["sft", "raft", "single", "several", "hostile"])
def test_in_a_browser(open_page, pages, name, width):
    page = open_page(name, width)
    assert page.said == []
    assert page.asked == [pages[name].as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.evaluate(
        "[...document.querySelectorAll('svg')].map(svg => svg.getBoundingClientRect())"
        ".map(box => [box.left, box.right, box.width, box.height])"
    )
    assert len(boxes) >= 5
    for left, right, wide, high in boxes:
        assert 0 <= left < right <= width
        assert wide >= 250
        assert high >= 140
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate("window.pwned === undefined")
    turning = "/[\\u202a-\\u202e\\u2066-\\u2069\\u0000]/.test(document.documentElement.textContent)"
    assert page.evaluate(turning) is False
    assert page.evaluate(
        "[...document.querySelectorAll('svg')].every(svg => svg.getAttribute('aria-label').length > 10)"
    )


def test_eight_runs_are_told_apart(open_page):
    """They differ by colour, and by dashes where distinguishable colours run out."""
    page = open_page("several", 1200)
    loss = page.evaluate(
        "[...[...document.querySelectorAll('figure')].find(f => f.querySelector('b').textContent === 'Loss')"
        ".querySelectorAll('.line')].map(l => getComputedStyle(l).stroke + getComputedStyle(l).strokeDasharray)"
    )
    assert len(loss) == len(set(loss)) == 8


def luminance(colour: str) -> float:
    parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    """Compute WCAG's contrast ratio of two colours that a browser gives."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def colours(page: Any, selector: str, style: str) -> set[str]:
    script = "([all, style]) => [...document.querySelectorAll(all)].map(each => getComputedStyle(each)[style])"
    return set(page.evaluate(script, [selector, style]))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(open_page, scheme):
    page = open_page("raft", 1200, scheme)
    (paper,) = colours(page, "body", "backgroundColor")
    assert (luminance(paper) < 0.1) == (scheme == "dark")
    (card,) = colours(page, ".card", "backgroundColor")
    for selector, ground in (
        ("h1, h2, td, th, .unit, .note, figcaption, summary", paper),
        ("dt, dd, pre.answer", card),
    ):
        assert all(contrast(ink, ground) >= 4.5 for ink in colours(page, selector, "color")), selector
    assert all(contrast(ink, paper) >= 4.5 for ink in colours(page, "svg text", "fill"))
    assert all(contrast(line, paper) >= 3 for line in colours(page, "svg .line", "stroke"))


def test_print(open_page, tmp_path):
    page = open_page("raft", 1200, "dark")
    content = page.pdf()
    assert content.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", content)) <= 12
    page.emulate_media(media="print", color_scheme="dark")
    assert colours(page, "body", "backgroundColor") == {"rgb(255, 255, 255)"}
    assert colours(page, "figure", "breakInside") == {"avoid"}


def test_a_pointer_is_told_values(open_page):
    page = open_page("sft", 1200)
    told = page.evaluate("document.querySelector('.over title').textContent")
    assert re.fullmatch(r"step \d+\nloss: [\d.]+", told)
