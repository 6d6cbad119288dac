"""Models on the Hugging Face hub: names, the cache on this machine, and how to download."""

import re
from collections.abc import Sequence
from pathlib import Path

from rocm_ext.base.errors import UserError

# Owners of models, by the start of the folder's usual name
_OWNERS = {
    "Llama": "meta-llama",
    "Meta-Llama": "meta-llama",
    "Ministral": "mistralai",
    "Mistral": "mistralai",
    "Qwen": "Qwen",
    "SmolLM": "HuggingFaceTB",
}
_NAME = re.compile(r"([\w-][\w.-]*)/([\w-][\w.-]*)")
REPO_ID = "original_repo_id.json"  # `tune download` writes the name on the hub into this file of the folder
_FOLDERS = ("models", "outputs", "demo")  # this library's configs name them; they may not exist yet


def how_to_download(folder: Path) -> str:
    """Return the command that downloads a model into ``folder``, as the end of a message."""
    name = hub_name(folder)
    if name:
        return f"download the model: hf download {name} --revision {folder.name}"
    owners = [owner for start, owner in _OWNERS.items() if folder.name.startswith(start)]
    owner = owners[0] if owners else "OWNER"
    return (
        f"download the model: tune download {owner}/{folder.name or 'NAME'} --output-dir {folder}"
    )


def is_hub_name(text: str) -> bool:
    """Return whether ``text`` names a model on the hub, such as ``Qwen/Qwen3-8B``, rather than a folder.

    A path in a folder that exists, or in ``models/``, is a folder.
    """
    match = _NAME.fullmatch(text)
    if match is None or text.endswith(".gguf"):
        return False
    return match[1] not in _FOLDERS and not Path(match[1]).exists()


def hub_name(folder: Path) -> str | None:
    """Return the name of the model in a snapshot of the hub's cache, or None for any other folder."""
    cached = re.search(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\][^/\\]+$", str(folder))
    return f"{cached[1]}/{cached[2]}" if cached else None


def in_cache(name: str) -> Path | None:
    """Return the folder of the model ``name`` in the hub's cache, perhaps with only some of its files.

    Returns None if the cache lacks the model's ``config.json``.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(path).parent if isinstance(path, str) else None


def files_of(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    """Return the files of ``folder`` whose names match one of ``patterns``, by name. Hidden files never do.

    Raises:
        UserError: a file is a link out of the folder. In the hub's cache all files are links into it.
    """
    from huggingface_hub.utils import filter_repo_objects

    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    chosen = filter_repo_objects(names, allow_patterns=[*patterns], ignore_patterns=".*")
    files = {name: folder / name for name in chosen}
    inside = [folder.resolve()]
    if hub_name(inside[0]) is not None:
        inside.append(inside[0].parents[1] / "blobs")
    for path in files.values():
        if path.resolve().parent not in inside:
            raise UserError(
                f"{path} is a link to {path.resolve()}, outside of its folder; replace it by a copy"
            )
    return files
