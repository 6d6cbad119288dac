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
from rocm_ext.config.components import data_sets
from rocm_ext.data.loading import LOADERS
from rocm_ext.export.source import OF_ADAPTER, Source
from rocm_ext.model.adapters.merge import BESIDE_WEIGHTS, MERGED_WEIGHTS
from rocm_ext.model.adapters.peft_files import ADAPTER_CONFIG, PeftConfig
from rocm_ext.runs.folder import RunFolder, held_out
from rocm_ext.runs.records import of_sets
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
    if merged:
        library, relation, title = "transformers", "finetune", "fine-tuned"
    else:
        library, relation, title = "peft", "adapter", "LoRA adapter"
    head: dict[str, object] = {
        "tags": _TAGS,
        "pipeline_tag": "text-generation",
        "library_name": library,
    }
    name = source.name
    if is_hub_name(name):
        head |= {"base_model": name, "base_model_relation": relation}
    else:
        name = Path(name).name
    licence = _licence(source.base)
    head |= licence
    data = [] if source.run is None else _sources(source.run)
    named = [data_set for data_set in data if _is_data_set(data_set)]
    if named:
        head["datasets"] = list(dict.fromkeys(named))
    terms = _plain(str(licence.get("license_name", licence.get("license", ""))))
    shown = _plain(name)
    lines = [
        f"# {shown}, {title}",
        "",
        f"Base model: {shown}. Its licence{f', {terms},' if terms else ''} applies.",
        "Trained with torchtune-rocm.",
        "",
        *_table("Settings", _settings(source)),
    ]
    if source.run is not None:
        rows = {}
        for number, part in enumerate(data, 1):
            # only a file's name, because a path says more about a machine
            rows[str(number)] = part if _is_data_set(part) else Path(part).name
        lines += _table("Data", rows)
        lines += _table("Results", _results(source.run))
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n" + "\n".join(
        lines
    )


def _licence(base: Path) -> dict[str, object]:
    """Return the licence from the base model's card."""
    path = base / "README.md"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    _, _, rest = text.partition("---\n")
    head, _, _ = rest.partition("\n---")
    try:
        content = yaml.safe_load(head)
    except yaml.YAMLError:
        return {}
    if not isinstance(content, Mapping):
        return {}
    return {key: content[key] for key in _LICENCE if key in content}


def _settings(source: Source) -> dict[str, str]:
    rows: dict[str, str] = {}
    if source.adapter is not None:
        peft = PeftConfig.read(source.adapter)
        rows = {"rank": str(peft.rank), "alpha": f"{peft.alpha:g}"}
        for name, pattern in (("rank", peft.rank_pattern), ("alpha", peft.alpha_pattern)):
            for key, value in list(pattern.items())[:_MOST]:
                rows[name] += f", {value:g} of {key}"
            if len(pattern) > _MOST:
                rows[name] += ", …"
        if peft.dora:
            rows["DoRA"] = "yes"
    if source.run is not None:
        for key in _SETTINGS:
            setting = source.run.setting(key)
            if setting is not None:
                rows[key] = str(setting)
    return rows


def _sources(run: RunFolder) -> list[str]:
    sources = []
    components = []
    for key in _DATA:
        for component in data_sets(key, run.setting(key)).values():
            components += component if isinstance(component, list) else [component]
    for part in components:
        name = part.get("source") if isinstance(part, Mapping) else None
        if isinstance(name, str):
            sources.append(name)
    return sources


def _is_data_set(source: str) -> bool:
    """Whether a source is a data set on the hub, and not a data file such as ``folder/rows.jsonl``."""
    return is_hub_name(source) and Path(source).suffix not in LOADERS


def _results(run: RunFolder) -> dict[str, str]:
    """Return the run's results: losses, and scores on held-out prompts."""
    rows: dict[str, str] = {}
    if run.family not in SAMPLED:
        losses = {}
        for column, title in of_sets(run.validations.lines).items():
            losses[title] = run.validations[column]
        losses["training loss"] = run.updates["loss"]
        for title, of_run in losses.items():
            values = of_run[~np.isnan(of_run)]
            if len(values):
                rows[f"{title}, first and last"] = f"{values[0]:.4f}, {values[-1]:.4f}"
    for of_set, evaluations in held_out(run).items():
        for scored in evaluations:
            score = Score(scored.scores.correct, scored.scores.prompts)
            rows[f"pass@1{of_set}, {scored.after}"] = str(score)
    return rows


def _plain(text: str) -> str:
    """Return foreign text as one line of Markdown, with escaped markup."""
    line = " ".join(text.split())
    return re.sub(r"[\\`*\[\]<>|~!&]", r"\\\g<0>", line)


def _table(title: str, rows: Mapping[str, str]) -> list[str]:
    if not rows:
        return []
    cells = [f"| {_plain(key)} | {_plain(value)} |" for key, value in rows.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *cells, ""]


# ---- upload


def push(
    source: Source, repo: str, card: str, folder: Path | None, files: Sequence[Path], private: bool
) -> str:
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
            raise UserError(
                f"{repo} exists and is public; make it private in its settings on the hub, or name another"
            )
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
