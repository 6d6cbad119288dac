"""What a loop in Python shows by itself: a curve of the loss in a notebook, a line now and then elsewhere."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from rocm_ext.base.log import log
from rocm_ext.base.types import Json

_LINES = 10.0  # seconds between two lines
_DRAWINGS = 2.0  # seconds between two drawings of the curve


class Shown:
    """Shows the steps of a loop.

    Attributes:
        lines: whether to log lines; a loop with a progress bar logs none.
    """

    def __init__(self) -> None:
        self.lines = True
        self._last = -_LINES
        self._display: Any = None
        self._notebook = _in_notebook()

    def step(self, metrics: Sequence[Json]) -> None:
        """Show the last of ``metrics``, if the last that was shown is some seconds old."""
        now = time.monotonic()
        if now - self._last < (_DRAWINGS if self._notebook else _LINES):
            return
        self._last = now
        line = metrics[-1]
        if self._notebook:
            self.draw(metrics)
        elif self.lines:
            speed = line["tokens_per_second"]
            log.info("step %d  loss %.4f  %s tok/s", line["step"], line["loss"], f"{speed:,.0f}")

    def draw(self, metrics: Sequence[Json]) -> None:
        """Draw the curve of all steps in a notebook, in place of the last one."""
        if not self._notebook or not metrics:
            return
        from IPython.display import display

        figure = curve(metrics)
        if self._display is None:
            self._display = display(figure, display_id=True)
        else:
            self._display.update(figure)


def curve(metrics: Sequence[Json]) -> Any:
    """Return the loss by step as a figure of plotly."""
    from plotly import graph_objects

    line = graph_objects.Scatter(
        x=[step["step"] for step in metrics],
        y=[step["loss"] for step in metrics],
        mode="lines",
    )
    figure = graph_objects.Figure(line)
    figure.update_layout(
        height=260,
        margin={"l": 50, "r": 20, "t": 20, "b": 40},
        xaxis_title="step",
        yaxis_title="loss",
    )
    return figure


def _in_notebook() -> bool:
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return get_ipython() is not None
