"""Write the model card of an export, and upload the export to the Hugging Face hub."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import yaml
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.utils import RepositoryNotFoundError

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import json_object
from rocm_ext.base.hub import files_of, is_hub_name
from rocm_ext.base.log import log
from rocm_ext.base.registry import SAMPLED
from rocm_ext.data.loading import LOADERS
from rocm_ext.export.source import OF_ADAPTER, Source
from rocm_ext.model.adapters.merge import BESIDE_WEIGHTS, MERGED_WEIGHTS
from rocm_ext.model.adapters.peft_files import ADAPTER_CONFIG, PeftConfig
from rocm_ext.runs.folder import RunFolder, held_out
from rocm_ext.runs.scores import Score

_TAGS = ["lora", "peft", "torchtune-rocm"]
_LICENCE = ("license", "license_name", "license_link")
_SETTINGS = """
    recipe epochs cycles steps max_steps_per_epoch sequences_per_step prompts_per_step samples_per_prompt optimizer.lr
    loraplus_lr_ratio lr_schedule objective._component_ verifier._component_ model.target_modules dtype seed
""".split()  # noqa: SIM905
_MOST = 8  # keys of a pattern in a card
_DATA = ("dataset", "prompts", "dataset_val", "eval_prompts")
_CARD = "README.md"


def card(source: Source, merged: bool) -> str:
    """Return the model card of a merged model, or of an adapter."""
    head: dict[str, object] = {"tags": _TAGS, "pipeline_tag": "text-generation"}
    head["library_name"] = "transformers" if merged else "peft"
    name = source.name if is_hub_name(source.name) else Path(source.name).name
    if is_hub_name(source.name):
        head |= {"base_model": name, "base_model_relation": "finetune" if merged else "adapter"}
    licence = _licence(source.base)
    head |= licence
    run = source.run
    if run is not None and (named := list(filter(_is_data_set, _sources(run)))):
        head["datasets"] = list(dict.fromkeys(named))
    terms, shown = _plain(str(licence.get("license_name", licence.get("license", "")))), _plain(name)
    lines = [
        f"# {shown}, {'fine-tuned' if merged else 'LoRA adapter'}",
        "",
        f"Base model: {shown}. Its licence{f', {terms},' if terms else ''} applies.",
        "Trained with torchtune-rocm.",
        "",
        *_table("Settings", _settings(source)),
    ]
    if run is not None:
        # only the file's name, because a path says more about a machine
        data = [source if _is_data_set(source) else Path(source).name for source in _sources(run)]
        rows = {str(number): name for number, name in enumerate(data, 1)}
        lines += [*_table("Data", rows), *_table("Results", _results(run))]
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n" + "\n".join(lines)


def _licence(base: Path) -> dict[str, object]:
    """Return the licence from the base model's card."""
    path = base / "README.md"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    _, mark, rest = text.partition("---\n")
    try:
        head = yaml.safe_load(rest.partition("\n---")[0]) if mark else None
    except yaml.YAMLError:
        head = None
    return {key: head[key] for key in _LICENCE if key in head} if isinstance(head, Mapping) else {}


def _settings(source: Source) -> dict[str, str]:
    rows: dict[str, str] = {}
    if source.adapter is not None:
        peft = PeftConfig.read(source.adapter)
        rows = {"rank": str(peft.rank), "alpha": f"{peft.alpha:g}"}
        for name, pattern in (("rank", peft.rank_pattern), ("alpha", peft.alpha_pattern)):
            rows[name] += "".join(f", {value:g} of {key}" for key, value in list(pattern.items())[:_MOST])
            rows[name] += ", …" if len(pattern) > _MOST else ""
        rows |= {"DoRA": "yes"} if peft.dora else {}
    if source.run is not None:
        values = {key: source.run.setting(key) for key in _SETTINGS}
        rows |= {key: str(value) for key, value in values.items() if value is not None}
    return rows


def _sources(run: RunFolder) -> list[str]:
    components = [run.setting(key) for key in _DATA]
    parts = [part for component in components for part in (component if isinstance(component, list) else [component])]
    sources = [part.get("source") for part in parts if isinstance(part, Mapping)]
    return [name for name in sources if isinstance(name, str)]


def _is_data_set(source: str) -> bool:
    """Whether a source is a data set on the hub, and not a data file such as ``folder/rows.jsonl``."""
    return is_hub_name(source) and Path(source).suffix not in LOADERS


def _results(run: RunFolder) -> dict[str, str]:
    """Return the run's results: losses, and scores on held-out prompts."""
    rows: dict[str, str] = {}
    scores = {f"pass@1, {scored.after}": scored.scores for scored in held_out(run)}
    if run.family not in SAMPLED:
        for name, column in (("validation", run.validations["val_loss"]), ("training", run.updates["loss"])):
            values = column[~np.isnan(column)]
            if len(values):
                rows[f"{name} loss, first and last"] = f"{values[0]:.4f}, {values[-1]:.4f}"
    return rows | {key: str(Score(value.correct, value.prompts)) for key, value in scores.items()}


def _plain(text: str) -> str:
    """Return foreign text as one line of Markdown, with escaped markup."""
    return re.sub(r"[\\`*\[\]<>|~!&]", r"\\\g<0>", " ".join(text.split()))


def _table(title: str, rows: Mapping[str, str]) -> list[str]:
    cells = [f"| {_plain(key)} | {_plain(value)} |" for key, value in rows.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *cells, ""] if rows else []


# ---- upload


def push(source: Source, repo: str, card: str, folder: Path | None, files: Sequence[Path], private: bool) -> str:
    """Upload an export in one commit, create the repository if it is missing, and return its address.

    An existing ``README.md`` is not changed.

    Args:
        repo: ``OWNER/NAME``.
        folder: folder of a merged model or an adapter; only its files are uploaded.
        files: further files.
        private: whether the repository must be private.

    Raises:
        UserError: the adapter's base model has no name on the hub, the repository is public although ``private`` is
            set, the hub refuses, or cannot be reached.
    """
    if not is_hub_name(repo):
        raise UserError(f"{repo} is no name on the hub; expected OWNER/NAME")
    contents: dict[str, bytes | Path] = {path.name: path for path in files}
    if folder is not None:
        merged = (*BESIDE_WEIGHTS, *MERGED_WEIGHTS)
        contents |= _of_adapter(source) if folder == source.adapter else files_of(folder, merged)
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
        operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
        api.create_commit(repo, operations, commit_message="Upload from torchtune-rocm")
    except UserError:
        raise
    except Exception as error:  # the client also raises errors of its HTTP library
        raise UserError(
            f"cannot upload to {repo}: {one_line(error)[:300]}; if it asks who you are, log in with `hf auth login`"
        ) from error
    return f"{api.endpoint}/{repo}"


def _of_adapter(source: Source) -> dict[str, bytes | Path]:
    """Return an adapter's files, with the base model's name on the hub in its config."""
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
