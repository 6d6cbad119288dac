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
from rocm_ext.report.charts import Chart, library, style, visible
from rocm_ext.runs.folder import RunFolder

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
    tables: Sequence[tuple[RunFolder, list[list[str]]]] = ()


def write(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of runs.

    Args:
        folders: output_dirs; a repeated folder is shown once.
        output: the file; None: ``report.html`` in the folder, or in the current folder if there are several.

    Returns:
        the file.

    Raises:
        UserError: a folder holds no run, or the file cannot be written. Then an earlier file stays as it is.
    """
    runs = [RunFolder(path) for path in {path.resolve(): path for path in folders}.values()]
    target = output or (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    if target.is_dir():
        raise UserError(f"{target} is a folder; name a file, such as {target / 'report.html'}")
    # as character references: replace_text writes the machine's encoding, whatever it is
    replace_text(target, render(content(runs)).encode("ascii", "xmlcharrefreplace").decode("ascii"))
    return target


def render(shown: Mapping[str, object], live: Mapping[str, object] | None = None, with_script: bool = True) -> str:
    """The page as HTML.

    Args:
        shown: result of :func:`content`.
        live: further content of a live page; None: a report.
        with_script: False: the next state of a page that a browser already has.
    """
    network = "connect-src 'self'; " if live else ""
    policy = f"default-src 'none'; {network}script-src {_hash(_SCRIPT)} {_library()[1]}; style-src 'unsafe-inline'; "
    policy += "img-src data: blob:; base-uri 'none'; form-action 'none'"
    return _template().render(
        **shown,
        live=live,
        style=Markup(_STYLE),
        verdicts=rollouts.VERDICTS,
        evaluation_columns=rollouts.EVALUATION_COLUMNS,
        length_columns=["tokens of a", *rows.COLUMNS.values()],
        policy=Markup(policy),
        script=Markup(_SCRIPT),
        library=Markup(_library()[0]) if with_script else "",
    )


def _hash(script: str) -> str:
    """An inline script as a Content-Security-Policy names it."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


@cache
def _library() -> tuple[str, str]:
    """plotly.js compressed, and its hash."""
    return b64encode(gzip.compress(library().encode(), 6, mtime=0)).decode(), _hash(library())


@cache
def _template() -> Template:
    page = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        finalize=lambda value: visible(value, limit=400) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters["long"] = lambda text: escape(visible(text, limit=3000))
    page.filters["clock"] = lambda at: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return page.get_template("page.html.jinja")


@np.errstate(all="ignore")  # damaged files may hold 1e308
def content(runs: Sequence[RunFolder]) -> dict[str, object]:
    """Return the page's content by the template's names."""
    _name_apart(runs)
    several = len(runs) > 1
    shown = [(run, *samples.groups(run)) for run in runs]
    keys = [style(i) for i in range(len(runs))]
    settings = [run.settings() for run in runs]
    differing = {key for run in runs[1:] for key in runs[0].differing_settings(run)}
    return {
        "title": f"{len(runs)} runs" if several else (runs and runs[0].name) or "rocm-ext monitor",
        "runs": [
            (run, f"border-color: {key['color']}; border-style: {_BORDERS[key['dash']]}", cards.facts(run))
            for run, key in zip(runs, keys, strict=True)
        ],
        "several": several,
        "sections": [section for section in _sections(runs) if section.charts],
        "groups": [choice for choice in shown if choice[2]],
        "data": [(run, data) for run in runs if (data := rows.data(run))],
        "differences": [[key, *(of_run.get(key) for of_run in settings)] for key in sorted(differing)],
        "settings": [(run, sorted(of_run.items())) for run, of_run in zip(runs, settings, strict=True) if run.config],
        "problems": [problem for run in runs for problem in dict.fromkeys(run.problems)],
    }


def _sections(runs: Sequence[RunFolder]) -> list[_Section]:
    def bars(*families: str) -> list[Chart]:
        suffixes = [(run, f", {run.name}" if len(runs) > 1 else "") for run in runs if run.family in families]
        return [chart for run, suffix in suffixes for chart in rollouts.bar_charts(run, suffix)]

    def tables(*families: str) -> list[tuple[RunFolder, list[list[str]]]]:
        made = [(run, rollouts.evaluation_table(run)) for run in runs if run.family in families]
        return [(run, table) for run, table in made if table]

    def sampled(*families: str) -> list[Chart]:
        policy = curves.charts(curves.POLICY, runs, *families)
        return [*rollouts.score_charts(runs, *families), *policy, *bars(*families)]

    training = [*rollouts.score_charts(runs, SFT, DPO), *curves.charts(curves.TRAINING, runs)]
    return [
        _Section("Cycles", sampled(RAFT), [run for run in runs if run.family == RAFT], tables(RAFT)),
        _Section("Rewards", sampled(*BY_STEP), [run for run in runs if run.family in BY_STEP], tables(*BY_STEP)),
        _Section("Preferences", curves.charts(curves.PREFERENCES, runs, DPO), [r for r in runs if r.family == DPO]),
        _Section("Training", training, [run for run in runs if len(run.updates)], tables(SFT, DPO)),
        _Section("Hardware", hardware.charts([(r.name, r.hardware) for r in runs]), [r for r in runs if r.hardware]),
    ]


def _name_apart(runs: Sequence[RunFolder]) -> None:
    """Rename runs whose folders have the same name: add parent folders until they differ."""
    for depth in range(2, 20):
        names = [run.name for run in runs]
        for run in runs:
            if names.count(run.name) > 1:
                run.name = str(Path(*run.path.resolve().parts[-depth:]))
