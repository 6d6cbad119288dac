"""What torch's hook does in `tune run`: which variables it sets, and which command replaces the process."""

import gc
import os
import signal
import sys
from contextlib import nullcontext

import pytest
import torch

from rocm_ext import hook
from rocm_ext.base import registry
from rocm_ext.config import launch, startup
from rocm_ext.machine.environment import replace_process
from rocm_ext.machine.profile import load_profile
from tests.machine.test_device import CPU, H200, MI300X, STRIX

PROFILES = ("cpu", "strix_halo", "mi300x", "mi50", "radeon")
VARIABLES = {registry.DECIDED, startup._LAUNCHER}.union(
    *(load_profile(each).environment for each in PROFILES)
)
POCKET = ("--config", "cpu_pocket")


@pytest.fixture
def begin(monkeypatch):
    """``begin(machine, *arguments)`` of `tune`: the command that replaces the process, or None."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    replaced = []
    monkeypatch.setattr(startup, "replace_process", replaced.append)
    monkeypatch.setattr(startup, "report_ranks", lambda: None)

    def begin(machine, *arguments: str, tune: bool = True, initialized: bool = False):
        monkeypatch.setattr(startup, "detect", lambda: machine)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
        monkeypatch.setattr(sys, "argv", ["/bin/tune", "run", *arguments])
        monkeypatch.setattr(
            sys, "orig_argv", ["python", "-W", "ignore", "/bin/tune", "run", *arguments]
        )
        startup.begin(tune)
        return replaced.pop() if replaced else None

    gc.enable()
    yield begin
    gc.enable()


def test_a_recipe_by_name_gets_the_profiles_variables(begin):
    command = begin(CPU, "lora_finetune_rocm", "--config", "cpu_pocket", "epochs=1")
    script = str(registry.find("lora_finetune_rocm").file)
    assert command == [
        sys.executable,
        "-W",
        "ignore",
        launch.__file__,
        "file",
        script,
        *POCKET,
        "epochs=1",
    ]
    assert os.environ["GOMP_SPINCOUNT"] == "20000"
    assert registry.DECIDED in os.environ
    assert not gc.isenabled()
    assert begin(CPU, "lora_finetune_rocm", "--config", "cpu_pocket") is None, "once"


def test_a_file_goes_on_as_the_module_that_tune_would_run(begin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.py").write_text("recipe_main('lora_finetune_rocm')(main)()")
    assert begin(CPU, "mine/recipe.py", *POCKET)[4:] == ["module", "mine.recipe", *POCKET]


@pytest.mark.parametrize(("machine", "hardware", "expected"), [
    (STRIX, "auto", "HSA_ENABLE_SDMA"), (STRIX, "strix_halo", "ROCBLAS_USE_HIPBLASLT"),
    (STRIX, "cpu", "GOMP_SPINCOUNT"), (MI300X, "mi300x", None), (H200, "auto", None),
])  # fmt: skip
def test_the_profile_is_the_one_that_the_run_will_have(begin, machine, hardware, expected):
    command = begin(machine, "raft_rocm", "--config", "mi300x_qwen7b_raft", f"hardware={hardware}")
    assert (command is not None) == (expected is not None)
    assert expected is None or os.environ[expected]


@pytest.mark.parametrize(("options", "several"), [
    (["--nproc_per_node", "8"], True), (["--nproc-per-node=8"], True), (["--nproc_per_node", "gpu"], True),
    (["--nnodes", "2", "--node_rank", "1", "--rdzv_endpoint", "trainer:29500"], True),
    (["--nnodes", "1:4", "--nproc_per_node", "1"], True), (["--nnodes", "1", "--nproc_per_node", "1"], False),
])  # fmt: skip
def test_a_launcher_sets_what_its_ranks_inherit_and_goes_on(begin, options, several):
    assert begin(MI300X, *options, "lora_finetune_rocm", "--config", "mi300x_qwen72b") is None
    assert ("GPU_MAX_HW_QUEUES" in os.environ) == several
    assert gc.isenabled(), "the launcher is no run"


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        (["--nnodes", "2"], {}, "--nnodes 2 needs --rdzv_endpoint HOST:PORT"),
        (
            ["--nnodes=2:4", "--node_rank=1", "--master_addr=a"],
            {},
            "--nnodes 2 needs --rdzv_endpoint HOST:PORT",
        ),
        (
            ["--nnodes", "2", "--rdzv_endpoint", "a:1"],
            {},
            "needs --node_rank.* 0 on .* 1 on the other$",
        ),
        (["--nnodes", "2"], {"PET_RDZV_ENDPOINT": "a:1", "PET_NODE_RANK": "1"}, None),
        (["--nnodes", "2", "--rdzv_endpoint", "a:1", "--rdzv_backend", "c10d"], {}, None),
        (["--nnodes", "1:2"], {}, None),
    ],
)
def test_a_launcher_that_would_wait_for_nobody_ends(
    begin, monkeypatch, options, variables, expected
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=f"^error: .*{expected}") if expected else nullcontext():
        begin(CPU, *options, "--nproc_per_node", "1", "lora_finetune_rocm", *POCKET)


def test_a_launcher_does_not_keep_the_gpu_that_it_looked_at(begin):
    arguments = ["--nproc_per_node", "8", "lora_finetune_rocm", "--config", "mi300x_qwen72b"]
    command = begin(MI300X, *arguments, initialized=True)
    assert command == [sys.executable, "-W", "ignore", "/bin/tune", "run", *arguments]
    assert begin(MI300X, *arguments, initialized=True) is None, "once"


def test_a_recipe_far_from_its_config_gets_its_hardware(begin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "recipes" / "mine.py").write_text(
        "recipe_main('mine', defaults='mine.yaml')(main)()"
    )
    (tmp_path / "recipes" / "mine.yaml").write_text(
        "recipe: mine\nextends: lora_finetune_rocm\nhardware: cpu\n"
    )
    (tmp_path / "configs" / "run.yaml").write_text("recipe: mine\n")
    assert begin(STRIX, "recipes/mine.py", "--config", "configs/run.yaml")
    assert os.environ["GOMP_SPINCOUNT"] == "20000"


@pytest.mark.parametrize(("options", "argv", "is_tune"), [
    (["/bin/tune"], ["/bin/tune", "run"], True),
    (["-W", "ignore", "-m", "torchtune._cli.tune"], ["-m", "run", "x"], True),
    (["-m", "check"], ["-m", "tune"], False),
])  # fmt: skip
def test_what_counts_as_tune(monkeypatch, options, argv, is_tune):
    monkeypatch.setattr(sys, "orig_argv", ["python", *options, *argv[1:]])
    monkeypatch.setattr(sys, "argv", argv)
    assert hook._is_tune() == is_tune


@pytest.mark.parametrize(("folder", "script"), [("/lib/rocm_ext/config", "/lib/rocm_ext/config/launch.py"),
                                                (r"C:\lib\rocm_ext", r"C:\lib\rocm_ext\launch.py")])  # fmt: skip
def test_the_launcher_s_modules_do_not_hide_the_user_s(tmp_path, monkeypatch, folder, script):
    (tmp_path / "recipe.py").write_text("import sys\nsys.found = list(sys.path)")
    monkeypatch.setattr(launch, "__file__", script)
    monkeypatch.setattr(sys, "path", [folder, *sys.path])
    monkeypatch.setattr(sys, "argv", [script, "file", str(tmp_path / "recipe.py")])
    monkeypatch.setattr(sys, "found", None, raising=False)
    launch.main()
    gc.enable()
    assert folder not in sys.found
    assert sys.found[-1] == os.getcwd()


def test_on_windows_the_program_ends_by_itself_after_ctrl_c(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    child = "import os, signal, time; time.sleep(.3); os.kill(os.getppid(), signal.SIGINT); time.sleep(.3); os._exit(3)"
    monkeypatch.setattr(os, "name", "nt")
    try:
        with pytest.raises(SystemExit) as left:
            replace_process([sys.executable, "-S", "-c", child])
    finally:
        signal.signal(signal.SIGINT, before)
    assert left.value.code == 3
