"""Download models by their name on the Hugging Face hub.

Texts (config, tokenizer, template, licence) come first, and weights after the checks that need no weights.
"""

from collections.abc import Callable
from contextlib import suppress
from errno import EACCES, EDQUOT, EIO, ENOSPC, EPERM, EROFS
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.utils import GatedRepoError, HFValidationError, RepositoryNotFoundError
from omegaconf import DictConfig

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.heartbeat import beating
from rocm_ext.base.hub import hub_name, in_cache, is_hub_name
from rocm_ext.base.log import log
from rocm_ext.data.encoder import TOKENIZER
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.model.families import CONFIG
from rocm_ext.model.gguf_folder import folder_of
from rocm_ext.model.weights.checkpointer import weight_files
from rocm_ext.model.weights.gguf_files import refuse_merging

_TEXT = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*"]
# the weights in other formats
_ELSEWHERE = ["original/*", "onnx/*", "consolidated*", "*/*.safetensors", "*/*.bin"]
# OWNER/NAME/config.json with the keys that decide the model's shape
_SHAPES = Path(__file__).parent / "shapes"
_OF_THE_DISK = {EACCES, EDQUOT, EIO, ENOSPC, EPERM, EROFS}


def use_downloaded(cfg: DictConfig, ranks: Ranks) -> None:
    """Where the config's model is a name on the hub or a GGUF file, put its folder into ``cfg``.

    One rank downloads the texts of a model on the hub, unless the cache has the complete model.

    Raises:
        UserError: the hub has no such model, wants a login, or cannot be reached.
    """
    name = cfg.model.get("checkpoint_dir")
    if not isinstance(name, str):
        return
    if is_hub_name(name):
        folder = _on_one_rank(lambda: fetch_texts(name), ranks)
        log.info("model %s: %s", name, folder)
        _put(cfg, name, folder)
    elif ranks.on_main(lambda: folder_of(name)) is not None:
        _put(cfg, name, folder_of(name))  # type: ignore[arg-type]
    if cfg.get("save_adapter_weights_only") is False:
        refuse_merging(Path(cfg.model.checkpoint_dir), "set save_adapter_weights_only: True")


def use_weights(folder: Path, ranks: Ranks) -> None:
    """Download missing weights of a folder in the hub's cache, on one rank; other folders stay as they are."""
    if hub_name(folder) is not None:
        _on_one_rank(lambda: fetch_weights(folder), ranks)


def _on_one_rank(fetch: Callable[[], Path], ranks: Ranks) -> Path:
    ranks.on_main(fetch)
    # files are there; on another machine one rank downloads, because the cache has locks
    return fetch()


def use_shape(cfg: DictConfig) -> str | None:
    """For a plan: where the config's model is not a folder here, put a folder with its ``config.json`` into ``cfg``.

    That folder is in the hub's cache, or this library ships it as the shape of a published model.

    Returns:
        A line for the user if this library ships the shape.

    Raises:
        UserError: the model is a name on the hub, and neither the cache nor this library has its ``config.json``.
    """
    name = cfg.model.get("checkpoint_dir")
    if not isinstance(name, str):
        return None
    named = is_hub_name(name)
    if Path(name).exists():
        folder = folder_of(name)
    else:
        folder = in_cache(name) if named else None
        known = None if folder else published(name)
        if known is not None:
            model, shape = known
            _put(cfg, name, shape)
            return f"the model's shape is the published one of {model}, because {name} is not on this machine"
        if folder is None and named:
            raise UserError(
                f"{name} is neither a folder nor in the hub's cache, and this command downloads nothing; its {CONFIG} "
                f"is enough: hf download {name} {CONFIG}"
            )
    if folder is not None:
        _put(cfg, name, folder)
    return None


def _put(cfg: DictConfig, name: str, folder: Path) -> None:
    places = (
        (cfg.model, "checkpoint_dir"),
        (cfg.checkpointer, "checkpoint_dir"),
        (cfg.tokenizer, "path"),
    )
    for block, key in places:
        value = block.get(key)
        if isinstance(value, str) and f"{value}/".startswith(f"{name}/"):
            block[key] = value.replace(name, str(folder), 1)


def fetch_texts(name: str) -> Path:
    """Download everything but a model's weights into the hub's cache, unless the complete model is there.

    Returns:
        The folder in the cache.

    Raises:
        UserError: the hub has no such model, wants a login, or cannot be reached.
    """
    folder = in_cache(name)
    if folder is None or not (folder / TOKENIZER).is_file():
        return _fetch(name, None, _TEXT)
    if not _has_weights(folder):
        with suppress(UserError):  # another program may have cached some of the texts
            return _fetch(name, None, _TEXT)
    return folder


def fetch_weights(folder: Path) -> Path:
    """Download missing weights of a model into its ``folder`` in the hub's cache, with progress; return the folder."""
    name = str(hub_name(folder))
    for suffix in ("safetensors", "bin"):
        if not _has_weights(folder):
            _fetch(name, folder.name, [f"*.{suffix}"])
    return folder


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except UserError:  # none, or not all that the index names
        return False


def _fetch(name: str, commit: str | None, patterns: list[str]) -> Path:
    try:
        with beating():
            path = snapshot_download(
                name, revision=commit, allow_patterns=patterns, ignore_patterns=_ELSEWHERE
            )
            return Path(path)
    except Exception as error:  # the client also raises errors of its HTTP library
        if isinstance(error, GatedRepoError):
            problem = f"{name} is gated: accept its licence at https://huggingface.co/{name} and run `hf auth login`"
        elif isinstance(error, RepositoryNotFoundError | HFValidationError):
            problem = (
                f"checkpoint_dir {name} is neither a folder nor a model on the Hugging Face hub that you may see; "
                "private models need `hf auth login`"
            )
        elif isinstance(error, OSError) and error.errno in _OF_THE_DISK:
            where = f"{error.strerror}: {error.filename or HF_HUB_CACHE}"
            problem = f"cannot download {name}: {where}; HF_HOME sets another folder for the cache"
        else:
            problem = (
                f"cannot download {name}: {one_line(error)[:300]}; where there is a network, tune download {name} "
                "--output-dir DIR, and set model.checkpoint_dir=DIR"
            )
        raise UserError(problem) from error


# ---- shapes of published models, which this library ships so that a plan needs no download


def published_models() -> dict[str, Path]:
    """Return the models whose shapes this library ships: names on the hub, and folders with a ``config.json``."""
    return {f"{folder.parent.name}/{folder.name}": folder for folder in sorted(_SHAPES.glob("*/*"))}


def published(checkpoint_dir: str) -> tuple[str, Path] | None:
    """Return the name and the folder of the published model that a config means. None if this library does not ship it.

    Args:
        checkpoint_dir: a name on the hub, or a folder with the model's name, such as ``models/Qwen3-8B``.
    """
    named = is_hub_name(checkpoint_dir)
    for name, folder in published_models().items():
        if checkpoint_dir == name or (not named and folder.name == Path(checkpoint_dir).name):
            return name, folder
    return None
