"""Configs with torchtune's builder, checkpointer and tokenizer train what ``from_checkpoint`` trains, and go on."""

import json
import re
from pathlib import Path

import pytest
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune, main
from safetensors.torch import load_file

from rocm_ext import config
from rocm_ext.base.errors import UserError
from tests.kit.families import folder_config, id_of
from tests.kit.forks import forked, succeed
from tests.kit.tiny import metrics, run_config, write_model, write_rows, write_yaml

# as Qwen2.5's, with a default system message, which torchtune's own prompts lack
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(params=["qwen2", "llama"])
def configs(request, tmp_path) -> tuple[Path, Path]:
    """Two configs of one run: in torchtune's terms, and from the folder."""
    model = write_model(tmp_path / "model", request.param)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    ends = [id_of(model, "<|im_end|>"), id_of(model, "<|endoftext|>")]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    rows = write_rows(tmp_path / "rows.jsonl", 24)
    more = {"save_every_n_steps": 2}
    theirs = run_config(model, rows, tmp_path / "theirs", **more)
    ours = folder_config(model, rows, tmp_path / "ours", **more)
    return write_yaml(tmp_path / "theirs.yaml", theirs), write_yaml(tmp_path / "ours.yaml", ours)


def trained(path: Path) -> tuple[list, list[float], dict]:
    """Run a config; return its rows, losses and the exported adapter."""
    recipe = LoRAFinetune(config.load("lora_finetune_rocm", str(path)))
    recipe.setup()
    rows = [[*recipe.trainer.rows.tokens], [*recipe.trainer.rows.labels], recipe.learner.tokenizer.end_of_text]
    recipe.train()
    recipe.cleanup()
    out = path.with_suffix("")
    return rows, metrics(out), load_file(out / "adapter" / "adapter_model.safetensors")


@pytest.mark.wide(always=1)
def test_both_train_the_same(configs):
    (rows, losses, adapter), (our_rows, our_losses, ours) = map(trained, configs)
    assert str(rows) == str(our_rows), "the same prompts, labels and end of text"
    assert our_losses == pytest.approx(losses, rel=1e-5)
    assert adapter.keys() == ours.keys()
    for name, tensor in adapter.items():
        assert ours[name].allclose(tensor, atol=1e-5), name


@pytest.mark.parametrize("configs", ["qwen2"], indirect=True)
def test_a_run_in_torchtune_s_terms_goes_on_with_its_own_config_alone(configs, tmp_path):
    theirs, ours = configs
    out = tmp_path / "theirs"
    assert forked(main, theirs)[0] == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    cfg = config.load("lora_finetune_rocm", str(ours), [f"output_dir={out}", "resume_from_checkpoint=True"])
    message = r"belongs to another run: .*model\._component_: was torchtune\S+, is rocm_ext.model.from_checkpoint"
    with pytest.raises(UserError, match=rf"{message}.*{re.escape(str(out / 'config.yaml'))}") as caught:
        LoRAFinetune(cfg).setup()
    assert "\n" not in str(caught.value)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    succeed(main, out / "config.yaml", "resume_from_checkpoint=True", "epochs=2")
    assert len(metrics(out)) == 6
