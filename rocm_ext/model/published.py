"""Shapes of published models, which this library ships so that a plan needs no download.

``shapes/OWNER/NAME/config.json`` has the keys of the model's ``config.json`` that decide what is built. There are no
weights beside it, and the recipes do not look here.
"""

from pathlib import Path

from rocm_ext.base.hub import is_hub_name

_SHAPES = Path(__file__).parent / "shapes"


def published_models() -> dict[str, Path]:
    """Return the models whose shapes this library ships: names on the hub, and folders with a ``config.json``."""
    return {f"{folder.parent.name}/{folder.name}": folder for folder in sorted(_SHAPES.glob("*/*"))}


def published(checkpoint_dir: str) -> tuple[str, Path] | None:
    """Find the published model that a config means.

    Args:
        checkpoint_dir: the config's: a name on the hub, or a folder of the model's own name, such as
            ``models/Qwen3-8B``.

    Returns:
        The model's name on the hub and the folder with its shape; None if this library does not ship it.
    """
    whole = is_hub_name(checkpoint_dir)
    wanted = checkpoint_dir if whole else Path(checkpoint_dir).name
    return next(((name, at) for name, at in published_models().items() if (name if whole else at.name) == wanted), None)
