"""Models by their name on the Hugging Face hub."""

import errno
import json
from pathlib import Path

import huggingface_hub
import pytest
from omegaconf import OmegaConf
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune, main

import rocm_ext.model.download
from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.hub import how_to_download, hub_name, in_cache, is_hub_name
from rocm_ext.model.adapters.peft_files import base_model_name
from rocm_ext.model.download import fetch_texts, fetch_weights
from tests.kit.families import folder_config, write_family
from tests.kit.forks import forked, forked_ranks, several_ranks
from tests.kit.hub import hub
from tests.kit.tiny import metrics, write_rows, write_yaml

NAME = "Qwen/Qwen3-Tiny"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder as it is on the hub: with weights in other formats, and files that nobody needs."""
    folder = write_family(tmp_path_factory.mktemp("hub") / "tiny", "qwen3")
    for name in (
        "original/consolidated.safetensors",
        "onnx/model.safetensors",
        "consolidated.safetensors",
        "a.png",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"large")
    (folder / "LICENSE").write_text("do as you like")
    (folder / "modeling.py").write_text("")  # with trust_remote_code
    return folder


@pytest.fixture
def served(model, tmp_path, monkeypatch):
    with hub(monkeypatch, tmp_path / "cache", {NAME: model}, gated="Qwen/Closed") as asked:
        yield asked


def download(name: str) -> Path:
    return fetch_weights(fetch_texts(name))


def run_yaml(tmp_path: Path, name: str, out: str = "run", **changes) -> Path:
    rows = write_rows(tmp_path / "rows.jsonl", 16)
    cfg = folder_config(Path("unused"), rows, tmp_path / out, max_steps_per_epoch=2, **changes)
    cfg["model"]["checkpoint_dir"] = name
    return write_yaml(tmp_path / f"{out}.yaml", cfg)


@pytest.mark.parametrize(("text", "is_name"), [
    ("Qwen/Qwen3-8B", True), ("meta-llama/Llama-3.2-1B", True), ("models/Qwen3-8B", False), ("here/Qwen3-8B", False),
    ("./Qwen3-8B", False), ("/models/Qwen3-8B", False), ("Qwen3-8B", False), ("a/b/c", False),
])  # fmt: skip
def test_names(tmp_path, monkeypatch, text, is_name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(text) == is_name


def test_what_is_needed_is_downloaded_once(served, model, tmp_path):
    assert in_cache(NAME) is None
    path = run_yaml(tmp_path, NAME)
    recipe = LoRAFinetune(config.load("lora_finetune_rocm", str(path)))
    recipe.setup()
    recipe.train()
    recipe.cleanup()
    folder = in_cache(NAME)
    needed = {p.name for p in model.iterdir() if p.is_file()} - {
        "consolidated.safetensors",
        "a.png",
    }
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == needed
    assert {"model.safetensors", "LICENSE", "chat_template.jinja", "merges.txt"} <= needed
    served.clear()
    assert download(NAME) == folder
    assert served == [], "the hub is not asked again"

    recorded = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert recorded.model.checkpoint_dir == recorded.checkpointer.checkpoint_dir == str(folder)
    assert recorded.tokenizer.path == str(folder / "tokenizer.json")
    adapter = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == NAME
    # the same name resumes what the folder began, without the hub
    code, said = forked(main, path, "resume_from_checkpoint=True", "epochs=2")
    assert code == 0, said
    assert len(metrics(tmp_path / "run")) == 4
    assert served == []


def test_weights_come_last(served, tmp_path):
    """A mistake that needs no weights ends the run before they are downloaded; what came is used later."""
    huggingface_hub.hf_hub_download(
        NAME, "config.json"
    )  # what another program has cached is completed
    path = run_yaml(
        tmp_path,
        NAME,
        dataset={"_component_": "rocm_ext.data.sft_dataset", "source": "missing.jsonl"},
    )
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        LoRAFinetune(config.load("lora_finetune_rocm", str(path))).setup()
    assert "tokenizer.json" in served
    assert "model.safetensors" not in served
    served.clear()
    download(NAME)
    assert set(served) == {"model.safetensors"}


@several_ranks
def test_one_rank_downloads(served, tmp_path):
    """The files come once; then both ranks train."""
    path = run_yaml(tmp_path, NAME)
    for code, said in forked_ranks(main, path):
        assert code == 0, said
    assert served.count("model.safetensors") <= 2  # HEAD and GET


@pytest.mark.parametrize(("name", "message"), [
    ("Qwen/Qwen9", "Qwen/Qwen9 is neither a folder nor a model on the Hugging Face hub"),
    ("Qwen/Closed", r"gated: accept its licence at https://huggingface.co/Qwen/Closed and run `hf auth login`"),
    ("a--b/c..d", "is neither a folder nor a model"),
])  # fmt: skip
def test_names_that_cannot_be_had(served, name, message):
    with pytest.raises(UserError, match=message) as caught:
        download(name)
    assert "\n" not in str(caught.value)


def test_offline(served, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=f"cannot download {NAME}: .*tune download {NAME} --output-dir DIR"
    ):
        download(NAME)
    assert served == []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    download(NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert download(NAME) == in_cache(NAME)


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rocm_ext.model.download, "snapshot_download", full)
    with pytest.raises(
        UserError,
        match=rf"cannot download {NAME}: No space left on device: .*; HF_HOME sets another",
    ):
        fetch_weights(tmp_path / "models--Qwen--Qwen3-Tiny" / "snapshots" / "abc")


def test_a_snapshot_tells_its_name(tmp_path):
    snapshot = Path("/x/hub/models--Qwen--Qwen3-8B/snapshots/abc")
    assert (
        how_to_download(snapshot) == "download the model: hf download Qwen/Qwen3-8B --revision abc"
    )
    assert hub_name(snapshot) == base_model_name(snapshot) == "Qwen/Qwen3-8B"
    assert hub_name(tmp_path) is None
