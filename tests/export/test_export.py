"""`rocm-ext export`: merged models, files as other programs read them, and their modes."""

import inspect
import json
import logging
import os
import re
import shutil
import signal
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import peft
import pytest
import torch
import yaml
from huggingface_hub.utils import RepositoryNotFoundError
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rocm_ext import cli, config
from rocm_ext.base.files import replace_folder
from rocm_ext.data.messages import to_turns
from rocm_ext.data.template import TEMPLATE, ChatTemplate
from rocm_ext.export.ollama import parts
from rocm_ext.train.lifecycle import run
from tests.kit.families import CHATML, folder_config, id_of, on_demand, write_family
from tests.kit.hf_models import write_theirs
from tests.kit.tiny import write_rows, write_yaml

TOKENS = torch.tensor([[5, 17, 99, 3, 250, 42, 8, 8, 120, 61, 33, 7]])


def finetune(top: Path, base: Path, **changes) -> Path:
    """Run SFT on a few rows, as a user would; return the run's folder."""
    out, rows = top / "run", write_rows(top / "rows.jsonl", 16)
    cfg = folder_config(base, rows, out, **{"epochs": 1, **changes})
    cfg["optimizer"]["lr"] = 0.02
    run(LoRAFinetune(config.load("lora_finetune_rocm", str(write_yaml(top / "run.yaml", cfg)))))
    return out


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    return on_demand(tmp_path_factory.mktemp("bases"), write_family, sharded="qwen3")


@pytest.fixture(scope="session")
def trained(tmp_path_factory, bases):
    """A run, whose base model is ``bases("llama")``, and whose files nobody but their owner and group may write."""
    before = os.umask(0o027)
    try:
        return finetune(
            tmp_path_factory.mktemp("trained"), bases("llama"), save_adapter_weights_only=False
        )
    finally:
        os.umask(before)


def export(*arguments: object) -> int:
    return cli.main(["export", *map(str, arguments)])


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def test_a_runs_files_have_the_modes_of_the_umask(trained):
    files = [path for path in trained.rglob("*") if path.is_file()]
    assert {path.relative_to(trained).parts[0] for path in files} >= {
        "adapter",
        "checkpoints",
        "merged",
    }
    written = [
        path for path in files if path.suffix in (".safetensors", ".json", ".jsonl", ".yaml", ".pt")
    ]
    assert {oct(path.stat().st_mode & 0o777) for path in written} == {"0o640"}


@pytest.mark.parametrize("name", ["llama", "gemma 2"])
def test_the_end_of_a_run_tells_what_to_do_next(tmp_path, bases, messages, name):
    top = tmp_path / "a b"
    top.mkdir()
    logging.getLogger("rocm_ext").setLevel(logging.INFO)  # a recipe's `main` does
    base = bases(name) if name == "llama" else write_theirs(tmp_path / "base", name)
    out = finetune(top, base, max_steps_per_epoch=1)
    way = (
        "--merged DIR, and to GGUF with convert_hf_to_gguf.py"
        if name == "gemma 2"
        else "--gguf FILE"
    )
    assert messages[-1].startswith(
        f"try it: rocm-ext chat '{out}'; take it elsewhere: rocm-ext export '{out}' {way}"
    )


def test_the_merged_model_is_pefts(trained, bases, tmp_path, capsys):
    assert export(trained, "--merged", tmp_path / "merged") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'merged'}\n"
    found, theirs = logits(tmp_path / "merged"), logits(bases("llama"), trained / "adapter")
    torch.testing.assert_close(found, theirs, atol=2e-4, rtol=1e-4)
    assert (theirs - logits(bases("llama"))).abs().max() > 0.1, "the adapter changes something"
    assert (tmp_path / "merged" / TEMPLATE).read_text() == CHATML
    # an adapter's folder and its base model are enough; a checkpoint's adapter belongs to its run
    adapter = shutil.copytree(trained / "adapter", tmp_path / "adapter")
    assert export(adapter, "--base-model", bases("llama"), "--merged", tmp_path / "other") == 0
    both = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("other", "merged")]
    assert both[0] == both[1]


def test_the_merged_model_stops_where_the_template_ends_a_turn(bases, tmp_path, monkeypatch):
    """Its folder is complete once it is there, so that a kill at that moment leaves nothing out."""

    @contextmanager
    def killed(folder):
        with replace_folder(folder) as aside:
            yield aside
        raise KeyboardInterrupt

    base = shutil.copytree(bases("qwen2"), tmp_path / "base")
    text, turn = id_of(base, "<|endoftext|>"), id_of(base, "<|im_end|>")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": text, "top_p": 0.9}))
    out = finetune(tmp_path, base, max_steps_per_epoch=1)
    monkeypatch.setattr("rocm_ext.model.adapters.merge.replace_folder", killed)
    assert export(out, "--merged", tmp_path / "merged") == 128 + signal.SIGINT
    assert (
        head_of((tmp_path / "merged" / "README.md").read_text())["library_name"] == "transformers"
    )
    written = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [text, turn], "top_p": 0.9}


def test_what_cannot_be_exported(trained, bases, tmp_path, capsys, monkeypatch):
    def fails(*arguments: object) -> str:
        assert export(*arguments) in (1, 2)
        return capsys.readouterr().err

    assert "nothing to write; set --merged DIR, --gguf FILE" in fails(trained)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "full exists; choose a new folder" in fails(trained, "--merged", tmp_path / "full")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert ". exists; choose a new folder" in fails(trained, "--merged", ".")
    assert "no_such is not a folder" in fails(tmp_path / "no_such", "--merged", tmp_path / "x")
    assert "full holds no run" in fails(tmp_path / "full", "--merged", tmp_path / "x")
    assert "has no adapter to merge" in fails(bases("llama"), "--merged", tmp_path / "x")
    lone = shutil.copytree(trained, tmp_path / "lone", ignore=shutil.ignore_patterns("adapter"))
    assert "has no adapter yet" in fails(lone, "--merged", tmp_path / "x")
    assert "no base model in nowhere" in fails(
        trained, "--base-model", "nowhere", "--merged", tmp_path / "x"
    )
    assert not (tmp_path / "x").exists()
    (mine := tmp_path / "full" / "mine.Modelfile").write_text("FROM me\n")
    for option, name in (
        ("--card", "mine"),
        ("--gguf", "mine.gguf"),
        ("--gguf-adapter", "mine.gguf"),
    ):
        assert "exists; name another file, or add --force" in fails(
            trained, option, tmp_path / "full" / name
        )
    both = ("--gguf", tmp_path / "x.f16", "--gguf-adapter", tmp_path / "x.lora")
    assert "x.Modelfile would be written twice" in fails(trained, *both)
    assert mine.read_text() == "FROM me\n"
    assert fails(trained, "--card", mine / "card.md").count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "here", "lone"]


WEIGHTS = "adapter_model.safetensors"
ENDS = ("A.weight", "B.weight", "magnitude_vector")
A, B, M = (f"base_model.model.model.layers.0.mlp.down_proj.lora_{end}" for end in ENDS)


def of(name: str, change) -> object:
    """Change one weight of an adapter."""
    return lambda state: {**state, name: change(state.get(name))}


def with_value(value: float) -> object:
    return lambda tensor: tensor.index_fill(1, torch.tensor([2]), value)


DAMAGES = {  # bytes of the weights, changes of the weights, or of the config; and what the message names
    "empty": (lambda content: b"", "header"),
    "without weights": (lambda state: {}, "has no weights"),
    "NaN": (of(A, with_value(float("nan"))), f"{A} has values that are not finite"),
    "too large to merge": (lambda state: {name: tensor + 1e30 for name, tensor in state.items()},
                           "the merged model.layers.0.mlp.down_proj.weight has values"),
    "whole numbers": (of(A, torch.Tensor.int), f"{A} is torch.int32"),
    "another part": (of(M, lambda _: torch.ones(64)), "unexpected model.layers.0.mlp.down_proj.lora_magnitude_vector"),
    "no magnitudes": ({"use_dora": True}, "missing"),
    "of another width": (of(A, lambda a: a[:, :1]), "down_proj.weight [64, 1] of rank 4, but"),
    "r": ({"r": 8}, "with r=8, expected [8, inputs]"),
    "two lines": ({"a\nb": 1}, "a b=1"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_adapter_is_refused_by_name(trained, bases, tmp_path, capsys, damage, named):
    adapter = shutil.copytree(trained / "adapter", tmp_path / "adapter")
    if isinstance(damage, dict):
        settings = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(settings | damage))
    elif named in ("header", "cannot read the adapter"):
        (adapter / WEIGHTS).write_bytes(damage((adapter / WEIGHTS).read_bytes()))
    else:
        state = damage(load_file(adapter / WEIGHTS))
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, adapter / WEIGHTS)
    for option in ("--merged", "--gguf", "--gguf-adapter"):
        if "merged" in named and option == "--gguf-adapter":
            continue  # it is finite, and stays as it is
        assert export(adapter, "--base-model", bases("llama"), option, tmp_path / "out") == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert named in error
        assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": 4096}, "model.embed_tokens.weight"),
        ({"num_key_value_heads": None}, "layers.0.self_attn.k_proj.weight"),
        ({"text_config": {"num_experts": 10**9}}, "num_experts"),
    ],
    ids=str,
)
def test_a_base_model_of_another_config_is_refused_by_name(
    trained, bases, tmp_path, capsys, changes, named
):
    base = shutil.copytree(bases("llama"), tmp_path / "base")
    (base / "config.json").write_text(
        json.dumps(json.loads((base / "config.json").read_text()) | changes)
    )
    for option in ("--merged", "--gguf", "--gguf-adapter"):
        assert export(trained / "adapter", "--base-model", base, option, tmp_path / "out") == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert named in error
        assert [path.name for path in tmp_path.iterdir()] == ["base"]
    shutil.copytree(bases("llama"), base, dirs_exist_ok=True)
    (base / "tokenizer.json").write_text("{")
    assert export(trained / "adapter", "--base-model", base, "--merged", tmp_path / "out") == 1
    assert not (tmp_path / "out").exists()


def head_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_tells_base_model_data_settings_and_results(trained, bases, tmp_path):
    base = shutil.copytree(bases("llama"), tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: llama3.1\nlanguage: en\n---\n# Base\n")
    (base / "original_repo_id.json").write_text('{"repo_id": "someone/Base-1B"}')
    assert (
        export(
            trained,
            "--base-model",
            base,
            "--card",
            tmp_path / "card.md",
            "--merged",
            tmp_path / "merged",
        )
        == 0
    )
    card = (tmp_path / "merged" / "README.md").read_text()
    assert card == (tmp_path / "card.md").read_text()
    assert head_of(card) == {
        "tags": ["lora", "peft", "torchtune-rocm"], "pipeline_tag": "text-generation", "library_name": "transformers",
        "base_model": "someone/Base-1B", "base_model_relation": "finetune", "license": "llama3.1",
    }  # fmt: skip
    assert not (tmp_path / "merged" / "original_repo_id.json").exists(), (
        "an adapter of it would name the base model"
    )
    losses = [
        json.loads(line)["loss"] for line in (trained / "metrics.jsonl").read_text().splitlines()
    ]
    for row in (
        "rank | 4",
        "alpha | 8",
        "optimizer.lr | 0.02",
        "1 | rows.jsonl",
        "recipe | lora_finetune_rocm",
    ):
        assert f"| {row} |" in card
    assert f"| training loss, first and last | {losses[0]:.4f}, {losses[-1]:.4f} |" in card
    assert str(trained.parent) not in card
    # a path of the run's folder is no name on the hub; a data set has one
    for source, named in (("elsewhere/rows.jsonl", None), ("someone/rows", ["someone/rows"])):
        other = shutil.copytree(trained, tmp_path / source.replace("/", "_"))
        settings = (other / "config.yaml").read_text()
        (other / "config.yaml").write_text(
            settings.replace(str(trained.parent / "rows.jsonl"), source)
        )
        assert export(other, "--base-model", base, "--card", other / "card.md") == 0
        card = (other / "card.md").read_text()
        assert head_of(card).get("datasets") == named
        assert f"| 1 | {source if named else 'rows.jsonl'} |" in card


class FakeHub:
    """Keeps what huggingface_hub's client is asked to upload; ``known`` are its repositories."""

    endpoint = "https://huggingface.co"

    def __init__(self, known: dict[str, SimpleNamespace]) -> None:
        self.known, self.private, self.files = known, None, {}

    def model_info(self, repo_id):
        if repo_id not in self.known:
            raise RepositoryNotFoundError.__new__(
                RepositoryNotFoundError
            )  # its arguments differ between versions
        return self.known[repo_id]

    def create_repo(self, repo_id, *, private):
        assert repo_id not in self.known
        self.private = private

    def create_commit(self, repo_id, operations, *, commit_message):
        for each in operations:
            content = each.path_or_fileobj
            self.files[each.path_in_repo] = (
                content if isinstance(content, bytes) else Path(content).read_bytes()
            )


@pytest.fixture
def pushed(monkeypatch):
    """Push to a hub of this test's own: returns the hub, whose ``files`` are what was uploaded, and the exit code."""
    from rocm_ext.export import push

    for name, own in inspect.getmembers(FakeHub, inspect.isfunction):
        if not name.startswith("__"):
            theirs = inspect.signature(getattr(huggingface_hub.HfApi, name)).parameters
            assert inspect.signature(own).parameters.keys() <= theirs.keys()

    def pushed(*arguments: object, **known: SimpleNamespace) -> tuple[FakeHub, int]:
        fake = FakeHub({f"me/{name}": info for name, info in known.items()})
        monkeypatch.setattr(push, "HfApi", lambda: fake)
        return fake, export(*arguments)

    return pushed


BASE_NAME = ("--base-name", "someone/Base-1B")
OF_AN_ADAPTER = {"README.md", "adapter_config.json", "adapter_model.safetensors"}


def test_push_uploads_the_adapter_or_what_was_written(trained, tmp_path, pushed, capsys):
    hub, code = pushed(trained, "--push", "me/adapter", "--private", *BASE_NAME)
    assert code == 0
    assert capsys.readouterr().out == "https://huggingface.co/me/adapter\n"
    assert hub.private is True
    assert hub.files.keys() == OF_AN_ADAPTER
    head = head_of(hub.files["README.md"].decode())
    assert (head["library_name"], head["base_model"]) == ("peft", "someone/Base-1B")
    hub, _ = pushed(trained, "--merged", tmp_path / "merged", "--push", "me/merged")
    assert hub.files.keys() == {path.name for path in (tmp_path / "merged").iterdir()}
    assert hub.private is False
    hub, _ = pushed(trained, "--gguf-adapter", tmp_path / "mine.gguf", "--push", "me/gguf")
    assert hub.files.keys() == {"README.md", "mine.gguf"}, "its Modelfile names a folder here"
    assert (tmp_path / "mine.Modelfile").exists()
    assert pushed(trained, "--push", "me")[1] == 1
    assert "me is no name on the hub; expected OWNER/NAME" in capsys.readouterr().err


def test_push_takes_no_paths_state_or_hidden_files_along(trained, bases, tmp_path, pushed, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    checkpoint = next((run / "checkpoints").iterdir())
    (checkpoint / ".env").write_text("TOKEN=topsecret")
    (checkpoint / "notes.txt").write_text("topsecret")
    assert (checkpoint / "state.pt").is_file()
    hub, code = pushed(checkpoint, "--push", "me/adapter", *BASE_NAME)
    assert (code, hub.files.keys()) == (0, OF_AN_ADAPTER)
    settings = json.loads(hub.files["adapter_config.json"])
    assert settings["base_model_name_or_path"] == "someone/Base-1B"
    for word in ("topsecret", str(bases("llama")), str(trained.parent)):
        assert not any(word.encode() in content for content in hub.files.values())
    # a base model without a name on the hub
    hub, code = pushed(run, "--push", "me/adapter")
    assert (code, hub.files) == (1, {})
    error = capsys.readouterr().err
    assert str(bases("llama")) in error
    assert "--base-name OWNER/NAME" in error
    assert pushed(run, "--push", "me/adapter", "--base-name", "models")[1] == 2
    # a link out of the folder
    (tmp_path / "id_rsa").write_text("topsecret")
    (run / "adapter" / TEMPLATE).symlink_to("../../id_rsa")
    capsys.readouterr()
    for more in ((), ("--merged", tmp_path / "merged"), ("--gguf", tmp_path / "all.gguf")):
        hub, code = pushed(run, "--push", "me/adapter", *BASE_NAME, *more)
        assert (code, hub.files) == (1, {})
        assert "is a link to" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()


def test_a_merged_model_takes_along_what_belongs_to_a_model(
    trained, bases, tmp_path, pushed, capsys
):
    base = shutil.copytree(bases("llama"), tmp_path / "base")
    (tmp_path / "id_rsa").write_text("topsecret")
    (base / "usage.txt").symlink_to("../id_rsa")
    for name in (".env", "notes.txt", "LICENSE", "modeling.py"):
        (base / name).write_text("mine")
    merged = tmp_path / "merged"
    hub, code = pushed(trained, "--base-model", base, "--merged", merged, "--push", "me/merged")
    assert code == 0
    names = {path.name for path in merged.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors", "LICENSE"} < names
    assert not names & {".env", "notes.txt", "usage.txt", "modeling.py"}
    assert hub.files.keys() == names
    # a link that belongs to a model, out of the folder
    (base / "NOTICE").symlink_to("../id_rsa")
    assert export(trained, "--base-model", base, "--merged", tmp_path / "other") == 1
    assert (
        f"NOTICE is a link to {tmp_path / 'id_rsa'}, outside of its folder"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "other").exists()
    # in the hub's cache all files are links
    cached = tmp_path / "models--someone--Base" / "snapshots" / ("a" * 40)
    (cached.parents[1] / "blobs").mkdir(parents=True)
    cached.mkdir(parents=True)
    for path in bases("llama").iterdir():
        shutil.copy(path, cached.parents[1] / "blobs" / path.name)
        (cached / path.name).symlink_to(f"../../blobs/{path.name}")
    assert export(trained, "--base-model", cached, "--merged", tmp_path / "third") == 0
    (cached / "NOTICE").symlink_to("../../../id_rsa")
    assert export(trained, "--base-model", cached, "--merged", tmp_path / "fourth") == 1


def test_the_card_shows_markup_of_others_as_text(trained, bases, tmp_path):
    base = shutil.copytree(bases("llama"), tmp_path / "a [b](c) <b>*d*")
    terms = "'[x](https://example.org) <img src=x>\n\n# y'"
    (base / "README.md").write_text(f"---\nlicense: other\nlicense_name: {terms}\n---\n")
    assert export(trained, "--base-model", base, "--card", tmp_path / "card.md") == 0
    body = (tmp_path / "card.md").read_text().split("---\n", 2)[2]
    assert r"# a \[b\](c) \<b\>\*d\*, LoRA adapter" in body
    assert r"Its licence, \[x\](https://example.org) \<img src=x\> # y, applies." in body


# ---- what a downloaded folder may do
def change(run: Path, **changes: object) -> None:
    """Change keys in a run's config.yaml."""
    content = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**content, **changes}))


def test_a_downloaded_adapter_runs_no_code(trained, tmp_path, capsys):
    mark, out = tmp_path / "mark", ("--merged", tmp_path / "merged")
    attacks = [
        {"_component_": "os.system", "command": f"touch {mark}"},
        {"_component_": "torchtune.utils.os.system", "command": f"touch {mark}"},
        {"_component_": "rocm_ext.config.launch.subprocess.run", "args": ["touch", str(mark)]},
        {
            "_component_": "rocm_ext.model.from_checkpoint",
            "checkpoint_dir": "x",
            "trust_remote_code": True,
        },
    ]
    for number, model in enumerate(attacks):
        run = shutil.copytree(trained, tmp_path / str(number))
        change(run, model=model)
        for source in (run, run / "adapter", next((run / "checkpoints").iterdir())):
            assert export(source, *out) == 1
            error = capsys.readouterr().err
            assert str(model.get("trust_remote_code", model["_component_"])) in error
            assert "--trust-config" in error
            assert error.count("\n") == 1
    # that of a folder further up is nobody's
    adapter = shutil.copytree(trained / "adapter", tmp_path / "0" / "some" / "adapter")
    assert export(adapter, *out) == 0
    assert not mark.exists()


def test_a_model_of_the_users_own_needs_trust(trained, tmp_path, capsys, monkeypatch):
    (tmp_path / "own_builder.py").write_text("from rocm_ext.model import from_checkpoint as mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = shutil.copytree(trained, tmp_path / "run")
    model = yaml.safe_load((run / "config.yaml").read_text())["model"]
    change(run, model={**model, "_component_": "own_builder.mine"})
    assert export(run, "--merged", tmp_path / "merged") == 1
    assert "config.yaml: model._component_ is 'own_builder.mine'" in capsys.readouterr().err
    assert export(run, "--merged", tmp_path / "merged", "--trust-config") == 0


def go(template: str, messages: list[dict[str, str]]) -> str:
    """Render the templates of Modelfiles, as Go does: ``if .System``, ``range .Messages``, ``if eq .Role``."""
    system = next((each["content"] for each in messages if each["role"] == "system"), "")
    head, _, rest = template.partition("{{ range .Messages }}")
    if found := re.fullmatch(
        r"(.*)\{\{ if \.System \}\}(.*)\{\{ else \}\}(.*)\{\{ end \}\}", head, re.DOTALL
    ):
        head = found[1] + (found[2].replace("{{ .System }}", system) if system else found[3])
    body, _, last = rest.rpartition("{{ end }}{{ end }}")
    user, answer = body.split('{{ else if eq .Role "assistant" }}')
    user = user.removeprefix('{{ if eq .Role "user" }}')
    by_role = {"user": user, "assistant": answer, "system": ""}
    return (
        head
        + "".join(
            by_role[each["role"]].replace("{{ .Content }}", each["content"]) for each in messages
        )
        + last
    )


QWEN = (  # with a system message of its own
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN3 = (  # without reasoning: answers begin behind an empty one, and turns of the history do not show it
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% else %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("text", "system"), [(CHATML, 1), (QWEN, 1), (QWEN3, 1), (LLAMA3, 1), (MISTRAL, 0)]
)
def test_ollamas_template_renders_as_the_models(text, system):
    template = ChatTemplate(text, {"bos_token": "<s>"}, date(2024, 7, 26), "a test")
    said = {"user": "Hi", "assistant": "Yes?"}
    talk = [
        *({"role": role, "content": text} for role, text in said.items()),
        {"role": "user", "content": "Go"},
    ]
    for chat in [
        talk,
        talk[:1],
        *([[{"role": "system", "content": "Be brief."}, *talk]] if system else []),
    ]:
        expected = template.render(to_turns(chat), None, prompt=True)
        assert go(parts(template).go(), chat) == expected
        assert go(parts(template, "<s>").go(), chat) == expected.removeprefix("<s>")


def test_templates_without_an_equal_in_ollama():
    numbered = "{% for m in messages %}{{ loop.index }} {{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert parts(ChatTemplate(numbered, {}, date(2024, 7, 26), "a test")) is None
