"""`rocm-ext serve` as a program: killed, started again, ended by Ctrl-C."""

import os
import re
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from rocm_ext.train.checkpoint import read_state
from tests.kit.families import write_family
from tests.serve.test_serve import LAYERS, datum, tokens_of, types

tinker = pytest.importorskip("tinker", reason="the SDK needs Python 3.11")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Program:
    """The command, once it accepts requests."""

    def __init__(self, folder, out, *options):
        command = [sys.executable, "-m", "rocm_ext.cli", "serve", str(folder), "--out", str(out)]
        changes = ["hardware=cpu", "tokenizer.max_seq_len=128", "startup_checks=False"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("TINKER_API_KEY", None)
        self.process = subprocess.Popen(
            [*command, "--port", "0", *options, *changes],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        printed = self.process.stdout.readline() + self.process.stdout.readline()
        values = dict(re.findall(r"export (\w+)=(\S+)", printed))
        self.url, self.key = values["TINKER_BASE_URL"], values["TINKER_API_KEY"]

    def client(self, name):
        client = tinker.ServiceClient(base_url=self.url, api_key=self.key)
        return client, client.create_lora_training_client(name, rank=8, seed=0, **LAYERS).result()

    def end(self, signum):
        self.process.send_signal(signum)
        _, messages = self.process.communicate(timeout=60)
        return self.process.returncode, messages


def step(trainer, ids):
    gradients = trainer.forward_backward([datum(one) for one in ids], "cross_entropy")
    done = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
    gradients.result()
    return done.result()


@pytest.mark.timeout(240)
def test_a_killed_server_goes_on(tmp_path):
    """What `save_state` returned is whole after SIGKILL amid further saves, and training goes on from it."""
    base = write_family(tmp_path / "base", "qwen2")
    out = tmp_path / "out"
    ids = tokens_of(4)
    program = Program(base, out)
    client, trainer = program.client(str(base))
    step(trainer, ids)
    path = trainer.save_state("kept").result().path
    step(trainer, ids)
    expected = trainer.save_state("expected").result().path
    saves = [trainer.save_state(f"more_{number}") for number in range(40)]
    saves[2].result()
    code, _ = program.end(signal.SIGKILL)
    assert code == -signal.SIGKILL

    run = out / path.split("/")[2].replace(":", "-") / "weights"
    for folder in run.iterdir():
        if not folder.name.startswith("."):
            read_state(folder)  # whole, by its checksums

    program = Program(base, out)
    client = tinker.ServiceClient(base_url=program.url, api_key=program.key)
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    assert step(resumed, ids).metrics["optimizer_step"] == 2
    code, messages = program.end(signal.SIGINT)
    assert code == 0, messages
    assert "Traceback" not in messages
    (left,) = out.glob("*/weights/unsaved_000002")
    ours = load_file(left / "adapter_model.safetensors")
    theirs = load_file(run / expected.split("/")[-1] / "adapter_model.safetensors")
    for name, value in theirs.items():
        assert (ours[name] == value).all()


@pytest.mark.parametrize(
    ("variables", "options", "found"),
    [
        ({"TINKER_API_KEY": "secret"}, [], "tml-"),
        ({}, ["--port", "PORT"], "cannot listen"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    variables, options, found, tmp_path, monkeypatch, capsys
):
    import socket

    from rocm_ext.cli import main

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    base = write_family(tmp_path / "base", "qwen2")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        options = [port if option == "PORT" else option for option in options]
        assert main(["serve", str(base), *options]) != 0
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert found in line
