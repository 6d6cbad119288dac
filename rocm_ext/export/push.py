"""Upload an export to the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi

from rocm_ext.errors import UserError, one_line
from rocm_ext.export.source import Source
from rocm_ext.hub import is_hub_name
from rocm_ext.log import log


def push(source: Source, repo: str, card: str, folder: Path | None, files: Sequence[Path], private: bool) -> str:
    """Create a repository, unless it is there, and upload an export.

    Args:
        source: the model.
        repo: ``OWNER/NAME``.
        card: the model card.
        folder: a merged model's or an adapter's.
        files: further files.
        private: whether a new repository is private.

    Returns:
        The repository's address.

    Raises:
        UserError: the hub refuses, or cannot be reached.
    """
    if not is_hub_name(repo):
        raise UserError(f"{repo} is no name on the hub; expected OWNER/NAME")
    if folder is not None and folder == source.adapter and not is_hub_name(source.name):
        log.warning(
            "the adapter names its base model by a folder of this machine, %s; others load it once "
            "base_model_name_or_path in its adapter_config.json is a name on the hub",
            source.name,
        )
    api = HfApi()
    try:
        address = str(api.create_repo(repo, private=private, exist_ok=True))
        api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo)
        if folder is not None:
            api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=["README.md"])
        for path in files:
            api.upload_file(path_or_fileobj=path, path_in_repo=path.name, repo_id=repo)
    except Exception as error:  # the client raises those of its HTTP library, too
        raise UserError(
            f"cannot upload to {repo}: {one_line(error)[:300]}; if it asks who you are, log in with `hf auth login`"
        ) from error
    return address
