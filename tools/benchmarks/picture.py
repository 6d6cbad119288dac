"""Curves as an SVG file, with light and dark colours, for Markdown pages."""

from collections.abc import Iterable
from pathlib import Path

from rocm_ext.report.charts import Line

_INK = "#1c2024"
_COLOURS = {"#0068a8": "#5cb3f0", "#c24e00": "#f0914a", "#00855f": "#2fc596", "#a8447e": "#e391c2"}
_DARK = _COLOURS | {_INK: "#e8eaed", "#e3e6e9": "#30363c"}  # light colour -> dark one


def write_picture(path: Path, title: str, lines: Iterable[Line], x_title: str) -> None:
    """Draw lines as a chart in the SVG file ``path``, with a legend below."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    light = {
        "text.color": _INK,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
    }
    light |= {"ytick.color": _INK, "grid.color": "#e3e6e9", "svg.fonttype": "none", "font.size": 9}
    with matplotlib.rc_context(light):
        figure, axis = pyplot.subplots(figsize=(4.6, 3.2))
        for line in lines:
            look = (
                {"alpha": 0.25, "linewidth": 0.8}
                if line.faint
                else {"label": line.label, "linewidth": 1.6}
            )
            style = ("-", "--", ":")[line.colour // len(_COLOURS) % 3]
            axis.plot(
                line.x, line.y, style, color=list(_COLOURS)[line.colour % len(_COLOURS)], **look
            )
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel(x_title)
        axis.grid(axis="y")
        axis.spines[["top", "right", "left"]].set_visible(False)
        figure.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=4, frameon=False)
        figure.tight_layout(rect=(0, 0.25 / figure.get_figheight(), 1, 1))
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    rules = "".join(
        f'[style*="{kind}: {light}"] {{ {kind}: {dark} !important }} '
        for light, dark in _DARK.items()
        for kind in ("stroke", "fill")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules}}}</style>"
    head, _, body = path.read_text().partition("<defs>")
    path.write_text(f"{head}{style}<defs>{body}")
