"""Upload an export to the Hugging Face hub."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.utils import RepositoryNotFoundError

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import json_object
from rocm_ext.base.hub import files_of, is_hub_name
from rocm_ext.base.log import log
from rocm_ext.export.source import OF_ADAPTER, Source
from rocm_ext.model.adapters.merge import BESIDE_WEIGHTS, MERGED_WEIGHTS
from rocm_ext.model.adapters.peft_files import ADAPTER_CONFIG

_CARD = "README.md"


def push(source: Source, repo: str, card: str, folder: Path | None, files: Sequence[Path], private: bool) -> str:
    """Upload an export in one commit; create the repository, unless it is there.

    A ``README.md`` that the repository has stays as it is.

    Args:
        source: the model.
        repo: ``OWNER/NAME``.
        card: the model card.
        folder: a merged model's or an adapter's; only the files that belong to one are taken along.
        files: further files.
        private: whether the repository must be private.

    Returns:
        The repository's address.

    Raises:
        UserError: the adapter's base model has no name on the hub, the repository is public although ``private`` is
            set, the hub refuses, or cannot be reached.
    """
    if not is_hub_name(repo):
        raise UserError(f"{repo} is no name on the hub; expected OWNER/NAME")
    contents: dict[str, bytes | Path] = {path.name: path for path in files}
    if folder is not None:
        contents |= _of_adapter(source) if folder == source.adapter else _of_merged(folder)
    api = HfApi()
    try:
        try:
            known = api.model_info(repo)
        except RepositoryNotFoundError:
            known = None
        if known is None:
            api.create_repo(repo, private=private)
        elif private and not known.private:
            raise UserError(f"{repo} exists and is public; make it private in its settings on the hub, or name another")
        if known is not None and _CARD in [file.rfilename for file in known.siblings or ()]:
            log.warning("%s has a %s, which stays; --card FILE writes the new one", repo, _CARD)
        else:
            contents[_CARD] = card.encode()
        _commit(api, repo, contents)
    except UserError:
        raise
    except Exception as error:  # the client raises those of its HTTP library, too
        raise UserError(
            f"cannot upload to {repo}: {one_line(error)[:300]}; if it asks who you are, log in with `hf auth login`"
        ) from error
    return f"{api.endpoint}/{repo}"


def _commit(api: HfApi, repo: str, contents: Mapping[str, bytes | Path]) -> None:
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api.create_commit(repo, operations, commit_message="Upload from torchtune-rocm")


def _of_adapter(source: Source) -> dict[str, bytes | Path]:
    """The files of an adapter, whose config names the base model as the hub does."""
    assert source.adapter is not None
    if not is_hub_name(source.name):
        raise UserError(
            f"the adapter's base model is a folder of this machine, {source.name}; say what the hub calls it: "
            "--base-name OWNER/NAME"
        )
    contents: dict[str, bytes | Path] = dict(files_of(source.adapter, OF_ADAPTER))
    settings = json_object((source.adapter / ADAPTER_CONFIG).read_bytes()) or {}
    text = json.dumps({**settings, "base_model_name_or_path": source.name}, indent=2)
    return contents | {ADAPTER_CONFIG: text.encode()}


def _of_merged(folder: Path) -> dict[str, bytes | Path]:
    return dict(files_of(folder, (*BESIDE_WEIGHTS, *MERGED_WEIGHTS)))
