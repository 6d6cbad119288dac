"""A first look at a config imports little, and so does the start of a run: it is seconds of each."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_ext.base import registry
from tests.kit.families import CHATML
from tests.kit.tiny import base_config, write_model, write_rows, write_yaml

# A program that calls this library's console script or a recipe, and prints the modules whose code has run
PROGRAM = """
import atexit, runpy, sys
def report():
    ran = [name for name, module in sys.modules.items() if not getattr(module, "__dict__", {}).get("_execute")]
    print("MODULES", *ran)
atexit.register(report)
sys.argv = sys.argv[1:]
if sys.argv[0] == "rocm-ext":
    from rocm_ext.cli import main
    sys.exit(main())
elif sys.argv[0] == "tune":
    from torchtune._cli.tune import main
    main()
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NEVER = [
    "datasets",
    "pandas",
    "pyarrow",
    "transformers",
    "torchtune.data",
    "torchtune.datasets",
    "torchtune.models",
]
# torchtune's merge of a config and its command line, and the components that the config names
OF_CONFIGS = {
    "torchtune.config._errors", "torchtune.config._utils", "torchtune.training.lr_schedulers",
    "torchtune.training.memory", "torchtune.training.metric_logging",
}  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config of a native model and a file of rows, with a schedule and a logger of torchtune's."""
    top = tmp_path_factory.mktemp("first_look")
    model = write_model(top / "model")
    (model / "chat_template.jinja").write_text(CHATML)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    content = base_config(write_rows(top / "rows.jsonl", 12), top / "out")
    content["model"] = {
        "_component_": "rocm_ext.model.from_checkpoint",
        "checkpoint_dir": str(model),
        "lora_rank": 4,
    }
    schedule = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    content["lr_scheduler"] = {"_component_": schedule, "num_warmup_steps": 1}
    logger = "torchtune.training.metric_logging.DiskLogger"
    content["metric_logger"] = {"_component_": logger, "log_dir": str(top / "log")}
    return write_yaml(top / "run.yaml", content)


def imported(*arguments: object) -> set[str]:
    """Run a program; return the modules of torchtune, torchao and packages in ``NEVER`` whose code has run."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (line,) = re.findall("^MODULES (.*)$", run.stdout, re.MULTILINE)
    tops = {"torchtune", "torchao", *NEVER}
    return {name for name in line.split() if name.split(".")[0] in tops or name == "torch._dynamo"}


def test_rows_reads_the_model_s_sizes_and_the_rows_alone(config):
    modules = imported("rocm-ext", "rows", "--config", config)
    assert "torch._dynamo" not in modules
    assert {name for name in modules if not name.startswith("torchtune.utils")} == OF_CONFIGS


def test_tune_copies_a_config_before_it_imports_its_other_parts(tmp_path):
    modules = imported("tune", "cp", "cpu_pocket", tmp_path / "run.yaml")
    cli = {f"torchtune._cli{name}" for name in ("", ".cp", ".subcommand")}
    assert modules - {"torchtune", "torchao"} == {"torchtune._recipe_registry", *cli}
    assert (tmp_path / "run.yaml").is_file()


@pytest.mark.parametrize("command", ["plan", "validate"])
def test_plans_and_starts_import_torchtune_s_modules_alone(config, command):
    if command == "plan":
        modules = imported("rocm-ext", "plan", "--config", config)
    else:  # what `rocm-ext validate` starts
        script = registry.find(registry.SFT).file
        modules = imported(script, "--config", config, "validate_only=True")
    assert "torchtune.modules" in modules
    assert not modules & {
        *NEVER,
        "torchao",
        "torchao.quantization",
        "torchtune",
        "torchtune.training",
    }


EACH_FIRST = """
import importlib, os, sys
from rocm_ext.base import deferred
deferred.defer()
import torch
for name in sys.argv[1:]:
    process = os.fork()
    if not process:
        sys.stderr = open(os.devnull, "w")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            os._exit(error.name.startswith(("torchtune", "torchao")))
        except BaseException:
            os._exit(1)
        os._exit(0)
    if os.waitpid(process, 0)[1]:
        print(name)
"""


@pytest.mark.nightly
def test_each_module_of_torchtune_can_be_the_first():
    top = Path(importlib.util.find_spec("torchtune").origin).parent
    files = [file.relative_to(top.parent).with_suffix("") for file in sorted(top.rglob("*.py"))]
    names = [".".join(file.parts).removesuffix(".__init__") for file in files]
    run = subprocess.run(
        [sys.executable, "-c", EACH_FIRST, *names], capture_output=True, text=True, check=True
    )
    assert run.stdout == ""
