"""Counts how often a step makes the host wait for the device, on fake tensors of a pretended accelerator.

``python -m tests.kit.syncs FOLDER`` prints the waits of each step as JSON. It needs a process of its own, because torch
cannot forget the accelerator again, and its autograd must not have run before.
"""

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
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
from rocm_ext.model import attention
from rocm_ext.model.build import build_model
from rocm_ext.model.lora import adapter_parameters
from rocm_ext.model.native.decoder import NativeSampler
from rocm_ext.sampling.engine import Request, Sampling
from rocm_ext.sampling.slots import Graphs, SlotBatch
from rocm_ext.train.trainer import Trainer
from tests.kit.tiny import run_config, write_yaml

DEVICE = "fakegpu"  # CPU builds of torch cannot compute gradients of fake CUDA tensors


def pretend_accelerator() -> None:
    """Give torch the device :data:`DEVICE`, which has no kernels."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    getattr(torch, DEVICE).get_amp_supported_dtype = lambda: [torch.bfloat16]  # checkpointing asks
    attention._SPAN[DEVICE] = attention._SPAN["cuda"]
    make = torch.tensor  # it builds on the device, which has no kernels
    torch.tensor = lambda data, *, device=None, **kind: make(data, **kind).to(device)


class _Waits(TorchDispatchMode):
    """Counts kernels whose result the host needs before it goes on, and answers those that return a number."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        devices = [
            leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        ]
        if name == "_local_scalar_dense" and DEVICE in devices:
            self._waits.append(_where(name))
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if name in _DATA_DEPENDENT and DEVICE in devices:
            self._waits.append(_where(name))
        out = func(*args, **kwargs)
        if (
            name == "_to_copy"
            and not kwargs.get("non_blocking")
            and {out.device.type, *devices} == {"cpu", DEVICE}
        ):
            self._waits.append(_where(name))
        if name == "copy_" and not (len(args) > 2 and args[2]) and set(devices) == {"cpu", DEVICE}:
            self._waits.append(_where(name))
        return out


_DATA_DEPENDENT = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "bincount",
    "equal",
    "is_nonzero",
}


def _where(name: str) -> str:
    ours = [
        f
        for f in traceback.extract_stack()
        if "/rocm_ext/" in f.filename or "/recipes/" in f.filename
    ]
    return f"{name} in {Path(ours[-1].filename).name}: {ours[-1].line}" if ours else name


FAKE = FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def counted() -> Iterator[list[str]]:
    """Context on fake tensors; gives the waits so far, as texts."""

    waits: list[str] = []
    with (
        FAKE,
        _Waits(waits),
        mock.patch.object(FakeTensor, "tolist", lambda tensor: _ones(tensor, waits)),
    ):
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

    def open(self) -> None:
        with FAKE:
            super().open()


def of_decoding(top: Path, sampling: Sampling) -> list[str]:
    """Return the waits of a session's second step of 8 answers."""
    cfg = run_config(top / "base", top / "rows.jsonl", top / "out")
    model = build_model(OmegaConf.create(cfg["model"]), torch.bfloat16, 0, torch.device("cpu"))
    model.to_empty(device="cpu")
    to_accelerator(model)
    with FAKE:
        decoder = model.sampler()
        batch = SlotBatch(decoder, 8, 256, sampling, Graphs(False))
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
    _, update = trainer.loader.range(0, 2)
    assert len(update.batches) > 1
    fake = replace(update, batches=[batch._map(FAKE.from_tensor) for batch in update.batches])
    with counted() as waits:
        trainer.train_step(fake)
    return waits


def of_training(top: Path, key: str, recipe: type[LoRAFinetune], **changes: Any) -> list[str]:
    """Return the waits of a training step of ``recipe``."""
    cfg = run_config(
        top / "base", top / "rows.jsonl", top / f"{key}_out", dtype="bf16", startup_checks=False
    )
    cfg |= {
        "batch_size": 2,
        "enable_activation_checkpointing": True,
        "clip_grad_norm": 1.0,
        **changes,
    }
    (top / key).mkdir()
    return waits_of(set_up(recipe, key, top / key, cfg))


def with_a_read(top: Path) -> list[str]:
    """Return the waits of a decoding step that also asks for a value."""
    inner = NativeSampler.step
    read = mock.patch.object(
        NativeSampler, "step", lambda *args: (out := inner(*args), bool((out > 0).any()))[0]
    )
    with read:
        return of_decoding(top, Sampling(8, 0.0))


def main(top: Path) -> None:
    """Print the waits of each kind of step."""
    pretend_accelerator()
    pairs = {"_component_": "rocm_ext.data.preference_dataset", "source": str(top / "pairs.jsonl")}
    found = {name: of_decoding(top, sampling) for name, sampling in SAMPLINGS.items()}
    found["a read"] = with_a_read(top)
    found["training"] = of_training(top, "lora_finetune_rocm", LoRAFinetune)
    found["pairs"] = of_training(top, "dpo_rocm", DPO, dataset=pairs)
    print(json.dumps(found))


SAMPLINGS = {
    "greedy": Sampling(8, 0.0),
    "sampled": Sampling(8, 1.0),
    "top_k": Sampling(8, 1.0, top_k=20),
    "min_p": Sampling(8, 1.0, min_p=0.1),
    "top_p": Sampling(8, 1.0, top_p=0.9),
}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
