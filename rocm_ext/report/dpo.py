"""Charts of a DPO run's pairs."""

from collections.abc import Sequence

from markupsafe import Markup

from rocm_ext.base.registry import DPO
from rocm_ext.report.updates import columns_chart
from rocm_ext.runs.folder import RunFolder

_SIDES = ("chosen", "rejected")
_CHARTS = (  # title, unit, factor, columns with their labels
    ("Margin", "reward of the chosen answer − reward of the rejected one", 1.0, "margin"),
    ("Accuracy", "% of the pairs with a margin above 0", 100.0, "accuracy"),
    ("Rewards", "factor beta × score", 1.0, "reward"),
    ("Log-probs", "nats, sums over an answer", 1.0, "logprobs"),
    ("KL divergence", "from the reference, nats per token", 1.0, "kl"),
)


def charts(runs: Sequence[RunFolder]) -> list[Markup]:
    """Charts of the DPO runs among ``runs``: by step and, where there are validations, by validation."""
    own = [(colour, run) for colour, run in enumerate(runs) if run.family == DPO]
    several = len(runs) > 1
    drawn = []
    for title, unit, scale, name in _CHARTS:
        if name not in ("reward", "logprobs"):
            both = ((name, "training"), (f"val_{name}", "validation"))
            drawn.append(columns_chart(title, unit, scale, both, own, several))
            continue
        for prefix, what in (("", title), ("val_", f"Validation: {title.lower()}")):
            sides = tuple((f"{prefix}{name}_{side}", side) for side in _SIDES)
            drawn.append(columns_chart(what, unit, scale, sides, own, several))
    return [each for each in drawn if each is not None]
