"""Models by their name on the Hugging Face hub: download what is needed, once."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from omegaconf import DictConfig

from rocm_ext.data.encoder import TOKENIZER
from rocm_ext.errors import UserError, one_line
from rocm_ext.hub import in_cache, is_hub_name
from rocm_ext.log import log
from rocm_ext.model.checkpointer import weight_files
from rocm_ext.model.families import CONFIG
from rocm_ext.ranks import Ranks

_TEXT = ["*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "USE_POLICY*"]  # configs, tokenizer, licence
_ELSEWHERE = ["original/*", "onnx/*", "consolidated*", "*/*.safetensors", "*/*.bin"]  # the weights in other formats


def use_downloaded(cfg: DictConfig, ranks: Ranks) -> None:
    """Where the config's model is a name on the hub, download it and put its folder into ``cfg``.

    Files that are in the hub's cache already are used without asking the hub. One rank downloads.

    Args:
        cfg: config of a recipe; its ``model``, ``checkpointer`` and ``tokenizer`` change.
        ranks: all processes of the run.

    Raises:
        UserError: the hub has no such model, or cannot be reached.
    """
    name = cfg.model.get("checkpoint_dir")
    if not (isinstance(name, str) and is_hub_name(name)):
        return
    ranks.on_main(lambda: download(name))
    _put(cfg, name, download(name))  # on another machine, its first rank downloads; the hub's cache has locks


def use_cached(cfg: DictConfig) -> None:
    """Where the config's model is a name on the hub, put its folder in the hub's cache into ``cfg``.

    Raises:
        UserError: the cache has no ``config.json`` of it.
    """
    name = cfg.model.get("checkpoint_dir")
    if not (isinstance(name, str) and is_hub_name(name)):
        return
    if (folder := in_cache(name)) is None:
        raise UserError(
            f"{name} is neither a folder nor in the hub's cache, and this command downloads nothing; its {CONFIG} is "
            f"enough: hf download {name} {CONFIG}"
        )
    _put(cfg, name, folder)


def _put(cfg: DictConfig, name: str, folder: Path) -> None:
    log.info("model %s: %s", name, folder)
    for block, key in ((cfg.model, "checkpoint_dir"), (cfg.checkpointer, "checkpoint_dir"), (cfg.tokenizer, "path")):
        value = block.get(key)
        if isinstance(value, str) and (value == name or value.startswith(f"{name}/")):
            block[key] = f"{folder}{value[len(name) :]}"


def download(name: str) -> Path:
    """Download a model into the hub's cache, with progress, unless it is there.

    Args:
        name: such as ``Qwen/Qwen3-8B``.

    Returns:
        The folder in the cache.

    Raises:
        UserError: the hub has no such model, wants a login, or cannot be reached.
    """
    if (folder := in_cache(name)) and _is_complete(folder):
        return folder
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_TEXT, "*.safetensors"], ignore_patterns=_ELSEWHERE))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*_TEXT, "*.bin"], ignore_patterns=_ELSEWHERE))
    except GatedRepoError as error:
        raise UserError(
            f"{name} is gated: accept its licence at https://huggingface.co/{name} and run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(f"checkpoint_dir {name} is neither a folder nor a model on the Hugging Face hub") from error
    except Exception as error:  # the client raises those of its HTTP library, too
        raise UserError(
            f"cannot download {name}: {one_line(error)[:300]}; where there is a network, tune download {name} "
            "--output-dir DIR, and set model.checkpoint_dir=DIR"
        ) from error
    return folder


def _is_complete(folder: Path) -> bool:
    try:
        return bool(weight_files(folder)) and (folder / TOKENIZER).is_file()
    except UserError:
        return False
