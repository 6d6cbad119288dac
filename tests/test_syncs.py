"""How often a step makes the host wait for the device, counted on fake tensors of a pretended accelerator.

A GPU computes behind the host. Where the host reads a value or copies without `non_blocking`, it waits for all work
that it has queued, and the GPU then waits for the host. One wait per step is the least: it brings the step's results.
"""

import json
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from rocm_ext.recipes.dpo_rocm import DPO
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rocm_ext import config
from rocm_ext.generation import slots
from rocm_ext.generation.base import Request, Sampling
from rocm_ext.generation.batch import Batch
from rocm_ext.generation.decoder import Decoder
from rocm_ext.model.build import build_model
from rocm_ext.model.lora import adapter_parameters
from rocm_ext.train.trainer import Trainer
from tests.tiny import run_config, write_model, write_rows, write_yaml

DEVICE = "fakegpu"  # CPU builds of torch cannot compute gradients of fake CUDA tensors
_pretend = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
pytestmark = pytest.mark.skipif(_pretend is None, reason="this torch cannot pretend to have an accelerator")


def counted_in_a_fork(count: Callable[[], list[str]]) -> list[str]:
    """Return what ``count`` returns in a process of its own: torch cannot forget the accelerator again."""
    receive, send = os.pipe()
    if not (pid := os.fork()):
        try:
            with os.fdopen(send, "w") as pipe:
                _pretend_accelerator()
                json.dump(count(), pipe)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(send)
    with os.fdopen(receive) as pipe:
        found = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(found)


def _pretend_accelerator() -> None:
    _pretend(DEVICE)
    getattr(torch, DEVICE).get_amp_supported_dtype = lambda: [torch.bfloat16]  # checkpointing asks
    slots._SPAN[DEVICE] = slots._SPAN["cuda"]
    make = torch.tensor  # on the device itself, which is none
    torch.tensor = lambda data, *, device=None, **kind: make(data, **kind).to(device)


class _Waits(TorchDispatchMode):
    """Counts kernels whose result the host needs before it goes on, and answers those that return a number."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        devices = [leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "_local_scalar_dense" and DEVICE in devices:
            self._waits.append(_where(name))
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if name in _DATA_DEPENDENT and DEVICE in devices:
            self._waits.append(_where(name))
        out = func(*args, **kwargs)
        if name == "_to_copy" and not kwargs.get("non_blocking") and {out.device.type, *devices} == {"cpu", DEVICE}:
            self._waits.append(_where(name))
        if name == "copy_" and not (len(args) > 2 and args[2]) and set(devices) == {"cpu", DEVICE}:
            self._waits.append(_where(name))
        return out


_DATA_DEPENDENT = {"nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal", "is_nonzero"}


def _where(name: str) -> str:
    ours = [f for f in traceback.extract_stack() if "/rocm_ext/" in f.filename or "/recipes/" in f.filename]
    return f"{name} in {Path(ours[-1].filename).name}: {ours[-1].line}" if ours else name


FAKE = FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Context on fake tensors; gives the waits so far, as texts."""

    waits: list[str] = []
    with FAKE, _Waits(waits), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeTensor, "tolist", lambda tensor: _ones(tensor, waits))
        yield waits


def _ones(tensor: Tensor, waits: list[str]) -> Any:
    """Answer ``tolist``: one copy to the host, which torch's fake tensors do element by element."""
    if tensor.device.type == DEVICE:
        waits.append(_where("tolist"))
    return np.ones(tensor.shape).tolist()


def to_accelerator(module: nn.Module) -> None:
    """Replace a module's parameters and buffers by fake ones on the accelerator."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with FAKE:
            module._apply(lambda t: FAKE.from_tensor(t.detach()).to(DEVICE))
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


class OnAccelerator(Trainer):
    """The recipes' trainer over a model that was set up on the CPU and then moved."""

    def __init__(self, learner: Any, *args: Any, **kwargs: Any) -> None:
        to_accelerator(learner.model)
        learner.adapter = adapter_parameters(learner.decoder)
        learner.runtime = replace(learner.runtime, device=torch.device(DEVICE))
        with FAKE:
            super().__init__(learner, *args, **kwargs)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("syncs")
    write_model(top / "base")
    write_rows(top / "rows.jsonl", 32)
    said = [[{"role": "user", "content": f"What is {i}?"}] for i in range(32)]
    answers = [[{"role": "assistant", "content": f"It is {i}." * (1 + i % 4)}] for i in range(33)]
    pairs = [{"chosen": said[i] + answers[i], "rejected": said[i] + answers[i + 1]} for i in range(32)]
    (top / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return top


def waits_of_decoding(top: Path, sampling: Sampling) -> list[str]:
    """Return the waits of a session's second step of 8 answers."""
    cfg = run_config(top / "base", top / "rows.jsonl", top / "out")
    model = build_model(OmegaConf.create(cfg["model"]), torch.bfloat16, 0, torch.device("cpu"))
    model.to_empty(device="cpu")
    to_accelerator(model)
    with FAKE:
        decoder = Decoder(model)
        batch = Batch(decoder, 8, 256, sampling, graphs=False)
        (prefix,) = decoder.prefill([(1, 2, 3)])
        batch.admit([Request("a", seed, seed, (1, 2, 3, 4)) for seed in range(8)], prefix)
    with counted():
        batch.step()
    with counted() as waits:
        batch.step()
    assert [len(running.tokens) for running in batch.running] == [2] * 8
    return waits


def set_up(recipe: type[LoRAFinetune], name: str, folder: Path, cfg: dict) -> Trainer:
    """Return the trainer of a run on the accelerator."""
    made = recipe(config.load(name, write_yaml(folder / "run.yaml", cfg)), trainer=OnAccelerator)
    made.setup()
    made.trainer.learner.model.train()
    return made.trainer


def waits_of(trainer: Trainer) -> list[str]:
    """Return the waits of a run's second step, which has several micro-batches."""
    _, batches = trainer.loader.range(0, 2)
    assert len(batches) > 1
    fake = [batch._map(FAKE.from_tensor) for batch in batches]
    with counted() as waits:
        trainer.train_step(fake)
    return waits


def test_a_training_step_waits_once(base, tmp_path):
    cfg = run_config(base / "base", base / "rows.jsonl", tmp_path / "out", dtype="bf16", startup_checks=False)
    cfg |= {"batch_size": 2, "enable_activation_checkpointing": True, "clip_grad_norm": 1.0}
    waits = counted_in_a_fork(lambda: waits_of(set_up(LoRAFinetune, "lora_finetune_rocm", tmp_path, cfg)))
    assert len(waits) == 1, waits


def test_what_a_loss_measures_waits_once_more(base, tmp_path):
    cfg = run_config(base / "base", base / "pairs.jsonl", tmp_path / "out", dtype="bf16", startup_checks=False)
    cfg["dataset"] = {"_component_": "rocm_ext.data.preference_dataset", "source": str(base / "pairs.jsonl")}
    cfg["batch_size"] = 2
    waits = counted_in_a_fork(lambda: waits_of(set_up(DPO, "dpo_rocm", tmp_path, cfg)))
    assert len(waits) == 2, waits


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [({"temperature": 0.0}, 1), ({}, 1), ({"top_k": 20}, 1), ({"min_p": 0.1}, 1), ({"top_p": 0.9}, 2)],
    ids=["greedy", "sampled", "top_k", "min_p", "top_p"],
)
def test_a_decoding_step_waits_once(base, sampling, expected):
    """With top_p it asks once more, whether the most probable 1,024 tokens hold enough."""
    waits = counted_in_a_fork(lambda: waits_of_decoding(base, Sampling(8, **{"temperature": 1.0, **sampling})))
    assert len(waits) == expected, waits


def test_a_read_in_the_step_is_found(base, monkeypatch):
    inner = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda *args: (out := inner(*args), bool((out > 0).any()))[0])
    waits = counted_in_a_fork(lambda: waits_of_decoding(base, Sampling(8, 0.0)))
    assert len(waits) == 2, waits
