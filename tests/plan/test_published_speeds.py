"""`rocm-ext plan` against speeds that others published."""

import json
import math
from pathlib import Path

import pytest
import yaml

from rocm_ext.cli import main
from rocm_ext.plan.speeds import PUBLISHED as RANGES

PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_speeds.yaml").read_text())
RUNS = {"training": RANGES["training"], "decoding": RANGES["sampling"]}
ALL = [(kind, run) for kind in RUNS for run in PUBLISHED[kind]]
QUICK = (
    "Qwen 1.8B, LoRA, Transformers, rows of 1,024 tokens",
    "Gemma 4 E4B, LoRA, Transformers, rows of 652 tokens",
    "Llama 3.1 8B, vLLM, ROCm attention",
)
COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 32768,
          "tie_word_embeddings": False}  # fmt: skip


pytestmark = pytest.mark.usefixtures("as_configured")


def planned(run: dict, root: Path, capsys) -> dict:
    """The plan of a published run, through the command."""
    if "slots" in run:
        config = ["strix_halo_qwen7b_raft", "--rows=500", f"--row-tokens={run['prompt']}"]
        config.append(f"--answer-tokens={run['answer']}")
        changes = [f"engine.slots={run['slots']}", f"max_new_tokens={run['answer']}"]
        changes.append(f"model.checkpoint_dir={run['model']}")
    else:
        config = [run["config"]]
        changes = [
            *run["set"],
            f"tokenizer.max_seq_len={run['tokens']}",
            f"batch_size={run['rows']}",
        ]
        changes.append(f"sequences_per_step={run['rows'] * run.get('steps', 1)}")
    if shape := run.get("shape"):
        (root / "config.json").write_text(json.dumps({**COMMON, **shape}))
        changes += [f"{key}.checkpoint_dir={root}" for key in ("model", "checkpointer")]
    main(["plan", "--json", "--machine", run["machine"], "--config", *config, *changes])
    return json.loads(capsys.readouterr().out)


def ratio(kind: str, run: dict, root: Path, capsys) -> float:
    """The published speed over the computed one."""
    plan = planned(run, root, capsys)
    assert plan["figures"]["measured"] is False
    if kind == "decoding":
        assert plan["rollout"]["sampling"]["slots"] == run["slots"]
        return run["value"] / plan["rollout"]["sampling"]["tokens_per_second"]
    step = plan["configured"]["step"]
    if run["unit"] == "s/step":
        return step["seconds"] / run["value"]
    if run["unit"] == "share":
        return run["value"] * run["sheet"] * 1e12 / (step["flops"] / step["seconds"])
    return run["value"] / step["tokens_per_second"]


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("kind", "run"), [each for each in ALL if each[1]["name"] in QUICK], ids=QUICK
)
def test_a_published_run_is_within_the_range_that_plans_print(kind, run, tmp_path, capsys):
    assert RUNS[kind][0] <= ratio(kind, run, tmp_path, capsys) <= RUNS[kind][1]


@pytest.mark.wide
@pytest.mark.parametrize("kind", RUNS)
def test_plans_print_the_range_of_published_runs(kind, tmp_path, capsys):
    found = {run["name"]: ratio(kind, run, tmp_path, capsys) for run in PUBLISHED[kind]}
    assert RUNS[kind][0] == math.floor(20 * min(found.values())) / 20, found
    assert RUNS[kind][1] == math.ceil(20 * max(found.values())) / 20, found
