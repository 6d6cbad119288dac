"""A resumed run equals an undisturbed run bit for bit, after a kill, a stop or a full disk.

Most runs here are forks of this process that call the recipe's ``main`` as ``tune`` does. Forks start at once and can
be killed anywhere.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune, main

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.train.learner import Learner
from tests.kit import forks
from tests.kit.forks import RESUME, forked, kill_before, refused
from tests.kit.lines import one_line_has
from tests.kit.tiny import run_config, tune, write_model, write_rows, write_yaml

resource = pytest.importorskip("resource", reason="forks, POSIX signals and limits")
REPO = Path(__file__).parents[2]


class Do:
    """A metric logger that calls a function of this module with ``argument`` right after a step."""

    def __init__(self, step: int, function: str, argument: int | str) -> None:
        self.step, self.function, self.argument = step, globals()[function], argument

    def log_dict(self, payload, step: int) -> None:
        if step == self.step:
            self.function(self.argument)

    def close(self) -> None:
        """Do nothing; no file is open."""


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


def fill_disk(path: str) -> None:
    with Path(path).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


def stop_growth(path: str) -> None:
    """Limit every file's size to that of the file at ``path`` plus half a line."""
    limit_files(Path(path).stat().st_size + 100)


def pause(path: str) -> None:
    """Create ``PATH.waiting``, and wait for ``PATH``."""
    Path(path).with_suffix(".waiting").touch()
    wait_for(Path(path))


def wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def at(step: int, what: int | Callable, *path: Path) -> dict:
    """Return the config of a logger that acts at ``step``: it sends a signal, or calls ``what`` on ``path``."""
    function, argument = (
        ("send", int(what)) if isinstance(what, int) else (what.__name__, str(path[0]))
    )
    return {
        "_component_": f"{__name__}.Do",
        "step": step,
        "function": function,
        "argument": argument,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with two base models and 37 training rows, which steps of 8 rows do not divide evenly."""
    top = tmp_path_factory.mktemp("resume")
    write_model(top / "base")
    write_model(top / "other", initializer_range=0.03)
    write_rows(top / "rows.jsonl", 41)
    return top


@pytest.fixture(scope="module")
def make(folder) -> Callable[..., Path]:
    """Write the YAML of a run: 10 steps in 2 epochs, with dropout, a schedule, LoRA+ and validation."""

    def make(out: Path, **changes) -> Path:
        cfg = run_config(
            folder / "base", folder / "rows.jsonl", out, epochs=2, save_every_n_steps=2
        )
        cfg["model"]["lora_dropout"] = 0.1
        cfg["lr_scheduler"] = {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 3,
        }
        cfg |= {"clip_grad_norm": 1.0, "validation_fraction": 0.1, "max_steps_per_epoch": None}
        cfg |= {"loraplus_lr_ratio": 4, **changes}
        out.parent.mkdir(exist_ok=True)
        return write_yaml(out.with_suffix(f".{len(changes)}.yaml"), cfg)

    return make


@pytest.fixture(scope="module")
def reference(make, folder) -> Path:
    """An undisturbed run."""
    out = folder / "reference"
    forks.succeed(main, make(out))
    return out


@pytest.fixture
def killed(_killed, tmp_path) -> Path:
    """A copy of a run that was killed after step 7, in ``tmp_path / "out"``."""
    return shutil.copytree(_killed, tmp_path / "out", ignore=shutil.ignore_patterns(".lock*"))


@pytest.fixture(scope="module")
def _killed(make, folder) -> Path:
    out = folder / "killed"
    assert forked(main, make(out, metric_logger=at(7, signal.SIGKILL)))[0] == -signal.SIGKILL
    return out


def resumed(path: Path) -> str:
    """Continue a run to its end; return the messages."""
    return forks.succeed(main, path, RESUME)


def steps(out: Path) -> list[int]:
    """Return the checkpoints on disk."""
    names = [p.name.removeprefix("step_") for p in (out / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())


def outcome(out: Path) -> tuple:
    """Return everything that must be equal in all runs: adapter, curves, and the last checkpoint."""
    state = torch.load(
        out / "checkpoints" / f"step_{steps(out)[-1]:08d}" / "state.pt", weights_only=True
    )
    del state["config"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timing = {"seconds", "tokens_per_second", "peak_memory"}
    curves = [{k: v for k, v in line.items() if k not in timing} for line in lines]
    return (out / "adapter" / "adapter_model.safetensors").read_bytes(), curves, plain(state)


def plain(node):
    """Convert nested state to values that ``==`` compares."""
    if isinstance(node, torch.Tensor):
        return str(node.dtype), node.tolist()
    if isinstance(node, dict):
        return {k: plain(v) for k, v in node.items()}
    return [plain(v) for v in node] if isinstance(node, list | tuple) else node


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below ``folder``."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_equal(out: Path, reference: Path) -> None:
    found, expected = outcome(out), outcome(reference)
    assert found[1] == expected[1]  # the curves first: they are the most informative
    assert found[2] == expected[2]
    assert found[0] == expected[0]


def test_reference_is_what_the_others_claim(reference):
    _, curves, state = outcome(reference)
    assert [line["step"] for line in curves if "loss" in line] == list(range(1, 11))
    assert [line["step"] for line in curves if "val_loss" in line] == [5, 10]
    assert len({line["lr"] for line in curves if "lr" in line}) == 10
    assert state["step"] == 10
    assert state["optimizer"]["state"]
    assert {"python", "numpy", "torch"} <= set(state["rng"][0])
    assert steps(reference) == [8, 10]  # keep_last_n_checkpoints is 2


def test_killed_in_mid_epoch_and_resumed(make, reference, killed):
    assert steps(killed) == [5, 6]
    assert not (killed / "adapter").exists()
    written = (killed / "rows.json").stat().st_mtime_ns
    messages = resumed(make(killed))
    assert "resumed from" in messages
    assert_equal(killed, reference)
    assert (killed / "rows.json").stat().st_mtime_ns == written, "the data is described once"


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_stopped(make, reference, tmp_path, signum, code):
    out = tmp_path / "out"
    found, messages = forked(
        main, make(out, metric_logger=at(6, signum))
    )  # in step 7, which the run still completes
    assert found == code, messages
    assert one_line_has(messages, "stopped at step 7", "all saved", RESUME)
    assert "Traceback" not in messages
    assert steps(out)[-1] == 7
    assert not (out / "adapter").exists()

    resumed(make(out))
    assert_equal(out, reference)


def test_sighup_under_nohup_is_ignored(make, reference, tmp_path):
    def nohup():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    out = tmp_path / "out"
    forks.succeed(main, make(out, metric_logger=at(6, signal.SIGHUP)), prepare=nohup)
    assert_equal(out, reference)


def test_sigterm_during_setup(make, tmp_path):
    def prepare():
        Learner.setup_model = lambda self: os.kill(os.getpid(), signal.SIGTERM)

    code, messages = forked(main, make(tmp_path / "out"), prepare=prepare)
    assert code == 143
    assert "Traceback" not in messages
    assert not (tmp_path / "out").exists()


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    "counts", [range(1, 25, 6), pytest.param(range(1, 40), marks=pytest.mark.nightly)]
)
def test_killed_while_writing(make, reference, tmp_path, counts):
    """The first start finds nothing to resume."""
    out = tmp_path / "out"
    codes = [forked(main, make(out), RESUME, prepare=kill_before(count))[0] for count in counts]
    assert set(codes) <= {-signal.SIGKILL, 0}
    assert codes.count(-signal.SIGKILL) > 2
    resumed(make(out))
    assert_equal(out, reference)
    assert not list(out.glob("checkpoints/.*"))  # the kills' leftovers are gone


def test_torn_newest_checkpoint(make, reference, killed):
    state = killed / "checkpoints" / "step_00000006" / "state.pt"
    half = state.stat().st_size // 2
    os.truncate(state, half)
    messages = resumed(make(killed))
    assert "step_00000006 cannot be read and is skipped" in messages
    assert "resumed from" in messages
    assert_equal(killed, reference)
    assert steps(killed) == [8, 10]
    assert (killed / "checkpoints" / "step_00000006.unreadable" / "state.pt").stat().st_size == half


def test_resume_of_a_finished_run_changes_nothing(make, reference, tmp_path):
    out = shutil.copytree(reference, tmp_path / "out")
    before = tree(out)
    messages = resumed(make(out))
    assert "all 10 steps are done already" in messages
    after = tree(out)
    changed = {name for name in after.keys() | before.keys() if after.get(name) != before.get(name)}
    assert changed <= {
        "summary.json",
        "config.yaml",
        "hardware.jsonl",
    }  # peak memory; resume_from_checkpoint
    assert after["hardware.jsonl"].startswith(before["hardware.jsonl"])
    assert json.loads(after["summary.json"])["steps"] == 10


@pytest.mark.wide
def test_a_mixture_of_data_sets(make, folder, tmp_path):
    """It is killed in the second epoch, in which the smaller set has repeated its rows twice."""
    small = write_rows(folder / "small.jsonl", 9, start=41)
    first = yaml.safe_load(make(tmp_path / "out").read_text())["dataset"]
    sets = [{**first, "weight": 1}, {**first, "source": str(small), "weight": 2}]
    whole, out = tmp_path / "whole", tmp_path / "out"
    messages = forks.succeed(main, make(whole, dataset=sets))
    found = json.loads((whole / "summary.json").read_text())["data_sets"]
    assert [part["rows_of_epoch"] for part in found] == [15, 30]  # of 45; 5 are set aside
    assert [part["rows_given"] for part in found] == [30, 60]
    assert sum(part["rows"] for part in found) == 45
    assert "rows, 66.7% of an epoch (30 rows, weight 2)" in messages
    assert (
        forked(main, make(out, dataset=sets, metric_logger=at(9, signal.SIGKILL)))[0]
        == -signal.SIGKILL
    )
    other = [sets[0], {**sets[1], "weight": 3}]
    line = refused(main, make(out, dataset=other), RESUME)
    assert one_line_has(
        line, "another run: rows and weights of the data sets: was (", "2.0), is (", "3.0)"
    )
    resumed(make(out, dataset=sets))
    assert_equal(out, whole)


@pytest.mark.wide(always=3)
@pytest.mark.parametrize(("override", "message"), [
    ("optimizer.lr=2e-3", "belongs to another run: .*optimizer.lr: was 0.001, is 0.002"),
    ("epochs=1", "has 10 updates, but the run ends after 5; raise epochs or steps"),
    ("max_steps_per_epoch=3", "has 10 steps, so max_steps_per_epoch cannot change from None to 3"),
    ("batch_size=2", r"another run: .*tokens_per_micro_batch, which dropout depends on: was \d+, is \d+ .set"),
    ("sequences_per_step=4", "belongs to another run: .*rows per step: was 8, is 4"),
    ("checkpointer.checkpoint_dir={folder}/other", "belongs to another run: .*base model changed"),
    ("dataset.source={folder}/fewer.jsonl", "belongs to another run: .*data changed; validation data changed"),
])  # fmt: skip
def test_another_run_is_refused(make, reference, folder, override, message):
    write_rows(folder / "fewer.jsonl", 40)
    before = tree(reference)
    path = make(reference, resume_from_checkpoint=True)
    cfg = config.load("lora_finetune_rocm", str(path), [override.format(folder=folder)])
    with pytest.raises(UserError, match=f"step_00000010 .*{message}"):
        LoRAFinetune(cfg).setup()
    assert tree(reference) == before


@pytest.mark.wide
def test_what_is_free_to_change(make, tmp_path):
    """A resumed run may have other micro-batches, chunks, validations and paths; they change only the rounding."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    model = {**yaml.safe_load(make(out).read_text())["model"], "lora_dropout": 0.0}
    forks.succeed(main, make(whole, model=model))
    assert (
        forked(main, make(out, model=model, metric_logger=at(7, signal.SIGKILL)))[0]
        == -signal.SIGKILL
    )
    changes = {
        "batch_size": 2,
        "log_every_n_steps": 3,
        "keep_last_n_checkpoints": 1,
        "run_val_every_n_steps": 4,
    }
    changes |= {"loss": {"_component_": "rocm_ext.losses.CrossEntropy", "chunk_tokens": 7}}
    resumed(make(out, model=model, early_stopping_patience=9, dtype="fp32", **changes))
    assert steps(out) == [10]
    found, expected = (
        [line["loss"] for line in outcome(o)[1] if "loss" in line] for o in (out, whole)
    )
    assert found == pytest.approx(expected, rel=1e-5)
    assert [line["step"] for line in outcome(out)[1] if "val_loss" in line] == [5, 8]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("key", "first", "then", "more"),
    [("epochs", 1, 2, {"save_every_n_steps": 1}),
     ("max_steps_per_epoch", 3, 5, {"epochs": 1, "run_val_every_n_steps": 1})],
)  # fmt: skip
def test_a_raised_limit_equals_a_run_begun_with_it(make, tmp_path, key, first, then, more):
    out, whole = tmp_path / "out", tmp_path / "whole"
    more["lr_scheduler"] = None
    forks.succeed(main, make(whole, **more, **{key: then}))
    forks.succeed(main, make(out, **more, **{key: first}))
    messages = resumed(make(out, **more, **{key: then}))
    assert key != "epochs" or "the run had 5 updates in all; it now has 10" in messages
    assert_equal(out, whole)


def test_used_output_dir(make, reference, tmp_path):
    (tmp_path / "begun" / "checkpoints").mkdir(
        parents=True
    )  # all that there is of a run that was killed early
    with pytest.raises(UserError, match="holds an earlier run"):
        LoRAFinetune(config.load("lora_finetune_rocm", str(make(tmp_path / "begun")))).check()
    out = shutil.copytree(reference, tmp_path / "out")
    before = tree(out)
    for overrides, message in (
        ([], r"resume_from_checkpoint=True .*overwrite_output_dir=True"),
        (["overwrite_output_dir=True", "tokens_per_micro_batch=1"], "tokens_per_micro_batch is 1"),
    ):
        with pytest.raises(UserError, match=message):
            LoRAFinetune(config.load("lora_finetune_rocm", str(make(out)), overrides)).setup()
        assert tree(out) == before  # a mistake changes nothing

    fresh = make(out, overwrite_output_dir=True, metric_logger=at(1, signal.SIGKILL))
    assert forked(main, fresh)[0] == -signal.SIGKILL
    left = set(os.listdir(out)) - {"hardware.jsonl", ".lock", ".lock.json"}
    assert left == {
        "config.yaml",
        "rows.json",
        "metrics.jsonl",
        "checkpoints",
    }  # nothing from the earlier run
    forks.succeed(main, make(out), "overwrite_output_dir=True")
    assert_equal(out, reference)


@pytest.mark.wide
def test_early_stopping(make, tmp_path):
    options = {"run_val_every_n_steps": 1, "early_stopping_patience": 2, "save_every_n_steps": 1}
    options |= {
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.3},
        "lr_scheduler": None,
    }  # it diverges
    options |= {"keep_last_n_checkpoints": 99}
    whole, out = tmp_path / "whole", tmp_path / "out"
    forks.succeed(main, make(whole, **options))
    summary = json.loads((whole / "summary.json").read_text())
    best = summary["best_validation"]["step"]
    assert summary["adapter_is"] == "best by validation loss"
    assert summary["steps"] == best + 2 < 10
    name = "adapter_model.safetensors"
    kept = whole / "checkpoints" / f"step_{best:08d}" / name
    assert (whole / "adapter" / name).read_bytes() == kept.read_bytes()

    killed = make(out, **options, metric_logger=at(best + 1, signal.SIGKILL))
    assert forked(main, killed)[0] == -signal.SIGKILL
    resumed(make(out, **options))
    assert_equal(out, whole)
    messages = resumed(make(out, **options, epochs=3))
    assert (
        f"stopped early at step {best + 2}: 2 validations without a better validation loss"
        in messages
    )
    assert_equal(out, whole)


def test_disk_full_in_a_checkpoint(make, reference, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(out)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.decode().strip()}")
    try:
        filler = out / "filler"
        line = refused(main, make(out, metric_logger=at(5, fill_disk, filler)))
        assert one_line_has(line, "no space left to write", "free some space")
        assert steps(out) == [2, 4]
        assert not list(out.glob("checkpoints/.*"))

        assert "no space left to write" in refused(
            main, make(out), RESUME
        )  # the disk is still full
        filler.unlink()
        resumed(make(out))
        assert_equal(out, reference)
    finally:
        subprocess.run(["umount", str(out)], check=True)


def assert_one_line(messages: str, *parts: str) -> None:
    last = messages.splitlines()[-1]
    assert last.startswith("error: ")
    assert all(part in last for part in parts), last
    assert "Traceback" not in messages
    assert "Exception ignored" not in messages


@pytest.mark.parametrize(
    "what", [pytest.param("step_00000002", marks=pytest.mark.wide), "metrics.jsonl"]
)
def test_file_that_cannot_grow(make, reference, tmp_path, what):
    """The system refuses further writes in the middle of a file."""
    out = tmp_path / "out"
    if what == "metrics.jsonl":
        line = refused(
            main, make(out, metric_logger=at(6, stop_growth, out / what), save_every_n_steps=None)
        )
        assert steps(out) == [5]
        assert not (out / what).read_text().endswith("\n")
    else:
        line = refused(main, make(out), prepare=lambda: limit_files(20_000))
        assert steps(out) == []
    assert one_line_has(line, what, "size limit is reached")
    assert not list(out.glob("checkpoints/.*"))
    resumed(make(out))
    assert_equal(out, reference)


@pytest.mark.wide
def test_two_ranks_killed_and_resumed(make, tmp_path):
    def launch(path: Path) -> subprocess.CompletedProcess:
        ranks = ["--nnodes", "1", "--nproc_per_node", "2"]
        return tune(
            "run", *ranks, "lora_finetune_rocm", "--config", path, env={"PYTHONPATH": str(REPO)}
        )

    whole, out = tmp_path / "whole", tmp_path / "out"
    assert launch(make(whole)).returncode == 0
    assert launch(make(out, metric_logger=at(7, signal.SIGKILL))).returncode != 0
    assert steps(out) == [5, 6]
    resumed = launch(make(out, resume_from_checkpoint=True))
    assert resumed.returncode == 0, resumed.stderr
    assert_equal(out, whole)
