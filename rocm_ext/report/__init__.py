"""A page that shows runs: one HTML file, self-contained and without script, or live, see :mod:`rocm_ext.report.live`.

:mod:`rocm_ext.runs.folder` reads the runs. The template escapes every text, and :mod:`rocm_ext.report.text` replaces
invisible characters. As a second line of defence, a Content-Security-Policy forbids the network and scripts; that of a
live page allows its own script and its own server.
"""

import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_text
from rocm_ext.base.registry import DPO, GRPO
from rocm_ext.report import cards, dpo, groups, grpo, hardware, raft, samples, updates
from rocm_ext.report.charts import line_style
from rocm_ext.report.text import visible
from rocm_ext.runs.folder import RunFolder

HERE = Path(__file__).parent
STYLE = (HERE / "style.css").read_text()


def write(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of runs.

    Args:
        folders: their output_dirs; a folder that is named twice is shown once.
        output: the file; None: ``report.html`` in the folder, or in the current folder if there are several.

    Returns:
        the file.

    Raises:
        UserError: a folder holds no run, or the file cannot be written. Then an earlier file stays as it is.
    """
    runs = [RunFolder(path) for path in {path.resolve(): path for path in folders}.values()]
    name_apart(runs)
    target = output or (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    if target.is_dir():
        raise UserError(f"{target} is a folder; name a file, such as {target / 'report.html'}")
    # as character references: replace_text writes the machine's encoding, whatever it is
    replace_text(target, render(runs).encode("ascii", "xmlcharrefreplace").decode("ascii"))
    return target


def name_apart(runs: Sequence[RunFolder]) -> None:
    """Rename runs whose folders have the same name: add as many parent folders as tell them apart."""
    for depth in range(2, 20):
        names = [run.name for run in runs]
        same = {name for name in names if names.count(name) > 1}
        for run in runs:
            if run.name in same:
                run.name = str(Path(*run.path.resolve().parts[-depth:]))


def render(runs: Sequence[RunFolder]) -> str:
    """The page as HTML."""
    return template("page").render(**content(runs), live=None)


@cache
def template(name: str) -> Template:
    """The template ``page``, which takes what :func:`content` returns and ``live``, or ``machine``."""
    page = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters["whole"] = lambda text: escape(visible(str(text), limit=4000))
    page.filters["short"] = lambda text: escape(visible(str(text), limit=1500))
    page.filters["clock"] = lambda at: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    page.globals["style"] = Markup(STYLE)
    return page.get_template(f"{name}.html.jinja")


@np.errstate(all="ignore")  # damaged files may hold 1e308
def content(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """What the page shows of runs, by the template's names."""
    several = len(runs) > 1
    sections = [
        ("Cycles", raft.charts(runs), [run for run in runs if run.cycles]),
        ("Rewards", grpo.charts(runs), [run for run in runs if run.family == GRPO]),
        ("Preferences", dpo.charts(runs), [run for run in runs if run.family == DPO]),
        ("Training", updates.charts(runs), [run for run in runs if len(run.steps)]),
        ("Hardware", hardware.charts(runs), [run for run in runs if run.hardware]),
    ]
    shown = [(run, *samples.choose(run)) for run in runs]
    return {
        "title": f"{len(runs)} runs" if several else "".join(run.name for run in runs),
        "runs": [(run, line_style(i), cards.facts(run)) for i, run in enumerate(runs)],
        "several": several,
        "sections": [section for section in sections if section[1]],
        "tables": _tables(runs),
        "samples": [(run, of, each) for run, of, each in shown if each],
        "groups": [(run, *found) for run in runs if run.family == GRPO and (found := groups.choose(run))[1]],
        "verdict_styles": {verdict: f"v{i}" for i, verdict in enumerate(raft.VERDICTS)},
        "differences": _differences(runs) if several else [],
        "settings": [(run, sorted(run.settings().items())) for run in runs if run.config],
        "problems": [problem for run in runs for problem in dict.fromkeys(run.problems)],
    }


def _tables(runs: Sequence[RunFolder]) -> dict[str, tuple[Sequence[str], str, list[tuple[RunFolder, list[list[str]]]]]]:
    """Columns and caption of a section's tables, and their rows."""
    cycles = [(run, raft.table(run)) for run in runs if run.cycles]
    evaluations = [(run, grpo.table(run)) for run in runs if run.evaluations]
    return {
        "Cycles": (raft.COLUMNS, "By cycle", cycles),
        "Rewards": (grpo.COLUMNS, "Evaluations", evaluations),
    }


def _visible(value: Any) -> Any:
    return visible(value, limit=400) if isinstance(value, str) and not isinstance(value, Markup) else value


def _differences(runs: Sequence[RunFolder]) -> list[tuple[str, list[Any]]]:
    """Settings in which some run differs from the first, with each run's value."""
    keys = {key for run in runs[1:] for key in runs[0].differing_settings(run)}
    flat = [run.settings() for run in runs]
    return [(key, [settings.get(key) for settings in flat]) for key in sorted(keys)]
