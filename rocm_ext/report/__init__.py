"""A page that shows runs: one HTML file that needs no network, or live, see :mod:`rocm_ext.report.live`.

:mod:`rocm_ext.runs.folder` reads the runs. The template escapes every text, and :mod:`rocm_ext.report.charts` replaces
invisible characters. As a second line of defence, a Content-Security-Policy allows only the page's scripts, and
the network only to a live page's server.
"""

import gzip
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_text
from rocm_ext.base.registry import BY_STEP, DPO, RAFT, SFT
from rocm_ext.report import cards, curves, hardware, rollouts, rows, samples
from rocm_ext.report.charts import Chart, Table, library, style, visible
from rocm_ext.runs.folder import RunFolder

_Content = Mapping[str, object]  # values by the template's names
_HERE = Path(__file__).parent
_SCRIPT = (_HERE / "page.js").read_text()
_STYLE = (_HERE / "style.css").read_text()
_BORDERS = {"solid": "solid", "dash": "dashed", "dot": "dotted"}  # plotly's name -> CSS's name


@dataclass(frozen=True)
class _Section:
    """A section of the page: charts, their runs, and tables of evaluations by run."""

    name: str
    charts: list[Chart]
    runs: list[RunFolder]
    tables: Sequence[tuple[RunFolder, Table]] = ()


def write(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of runs.

    Args:
        folders: output_dirs; a repeated folder is shown once.
        output: the file. None means ``report.html`` in the folder, or in the current folder if there are several.

    Returns:
        the file.

    Raises:
        UserError: a folder holds no run, or the file cannot be written. Then an earlier file stays as it is.
    """
    different = {path.resolve(): path for path in folders}
    runs = [RunFolder(path) for path in different.values()]
    if output is None:
        folder = runs[0].path if len(runs) == 1 else Path()
        output = folder / "report.html"
    if output.is_dir():
        raise UserError(f"{output} is a folder; name a file, such as {output / 'report.html'}")
    # as character references: replace_text writes the machine's encoding, whatever it is
    page = render(content(runs)).encode("ascii", "xmlcharrefreplace")
    replace_text(output, page.decode("ascii"))
    return output


def render(page: _Content, live: _Content | None = None, with_script: bool = True) -> str:
    """The page as HTML.

    Args:
        page: result of :func:`content`.
        live: further content of a live page. None renders a report.
        with_script: whether the browser needs the scripts. They are left out of the next state of a live page.
    """
    packed, plotly_hash = _library()
    network = "connect-src 'self'; " if live else ""
    policy = (
        f"default-src 'none'; {network}script-src {_hash(_SCRIPT)} {plotly_hash}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return _template().render(
        **page,
        live=live,
        style=Markup(_STYLE),
        verdicts=rollouts.VERDICTS,
        evaluation_columns=rollouts.EVALUATION_COLUMNS,
        length_columns=["tokens of a", *rows.COLUMNS.values()],
        policy=Markup(policy),
        script=Markup(_SCRIPT),
        library=Markup(packed) if with_script else "",
    )


def _hash(script: str) -> str:
    """An inline script as a Content-Security-Policy names it."""
    digest = b64encode(sha256(script.encode()).digest())
    return f"'sha256-{digest.decode()}'"


@cache
def _library() -> tuple[str, str]:
    """plotly.js compressed, and its hash."""
    script = library()
    packed = b64encode(gzip.compress(script.encode(), 6, mtime=0))
    return packed.decode(), _hash(script)


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        finalize=lambda value: visible(value, limit=400) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["long"] = lambda text: escape(visible(text, limit=3000))
    environment.filters["clock"] = _clock
    return environment.get_template("page.html.jinja")


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


@np.errstate(all="ignore")  # damaged files may hold 1e308
def content(runs: Sequence[RunFolder]) -> dict[str, object]:
    """Return the page's content by the template's names."""
    _name_apart(runs)
    title = "rocm-ext monitor"
    if len(runs) > 1:
        title = f"{len(runs)} runs"
    elif runs and runs[0].name:
        title = runs[0].name
    summaries = []
    answers = []
    data = []
    differing: set[str] = set()
    for i, run in enumerate(runs):
        line = style(i)
        border = f"border-color: {line['color']}; border-style: {_BORDERS[line['dash']]}"
        summaries.append((run, border, cards.facts(run)))
        about, groups = samples.groups(run)
        if groups:
            answers.append((run, about, groups))
        run_data = rows.data(run)
        if run_data is not None:
            data.append((run, run_data))
        differing.update(runs[0].differing_settings(run))
    settings = [run.settings() for run in runs]
    differences = []
    for key in sorted(differing):
        values = [configured.get(key) for configured in settings]
        differences.append([key, *values])
    sections = [section for section in _sections(runs) if section.charts]
    problems: list[str] = []
    for run in runs:
        problems += dict.fromkeys(run.problems)
    return {
        "title": title,
        "runs": summaries,
        "sections": sections,
        "groups": answers,
        "data": data,
        "differences": differences,
        "problems": problems,
    }


def _sections(runs: Sequence[RunFolder]) -> list[_Section]:
    trained = [run for run in runs if len(run.updates)]
    training = rollouts.score_charts(runs, SFT, DPO)
    training += curves.charts(curves.TRAINING, runs)
    measured = [run for run in runs if run.hardware]
    counters = hardware.charts([(run.name, run.hardware) for run in runs])
    preferences = curves.charts(curves.PREFERENCES, runs, DPO)
    return [
        _sampled("Cycles", runs, RAFT),
        _sampled("Rewards", runs, *BY_STEP),
        _Section("Preferences", preferences, _runs_of(runs, DPO)),
        _Section("Training", training, trained, _tables(runs, SFT, DPO)),
        _Section("Hardware", counters, measured),
    ]


def _sampled(name: str, runs: Sequence[RunFolder], *families: str) -> _Section:
    """The section of recipes that learn from sampled answers."""
    charts = rollouts.score_charts(runs, *families)
    charts += curves.charts(curves.POLICY, runs, *families)
    drawn = _runs_of(runs, *families)
    for run in drawn:
        charts += rollouts.bar_charts(run, f", {run.name}" if len(runs) > 1 else "")
    return _Section(name, charts, drawn, _tables(runs, *families))


def _runs_of(runs: Sequence[RunFolder], *families: str) -> list[RunFolder]:
    return [run for run in runs if run.family in families]


def _tables(runs: Sequence[RunFolder], *families: str) -> list[tuple[RunFolder, Table]]:
    """The evaluations of runs."""
    tables = []
    for run in _runs_of(runs, *families):
        table = rollouts.evaluation_table(run)
        if table:
            tables.append((run, table))
    return tables


def _name_apart(runs: Sequence[RunFolder]) -> None:
    """Rename runs whose folders have the same name: add parent folders until they differ."""
    for depth in range(2, 20):
        names = [run.name for run in runs]
        for run in runs:
            if names.count(run.name) > 1:
                parts = run.path.resolve().parts
                run.name = str(Path(*parts[-depth:]))
