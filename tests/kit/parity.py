"""Our models and runs, and what transformers, PEFT and torchtune compute of the same weights and rows."""

import importlib.util
import inspect
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import torchtune
from omegaconf import DictConfig, OmegaConf
from peft.optimizers import create_loraplus_optimizer
from rocm_ext.recipes.dpo_rocm import DPO
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune, main
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from rocm_ext import config
from rocm_ext.data.batches import MicroBatch, collate
from rocm_ext.data.rows import Rows
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.model.build import build_model, load_weights, read_weights
from rocm_ext.model.hf.packed_states import ROWS
from rocm_ext.train.scoring import reference, without_adapter
from tests.kit.families import folder_config
from tests.kit.forks import forked, forked_ranks
from tests.kit.tiny import metrics, write_yaml

CPU = torch.device("cpu")
TOKENS = torch.tensor([[5, 17, 99, 3, 250, 42, 8, 8, 120, 61, 33, 7]])
STOCK_RECIPES = Path(torchtune.__file__).parents[1] / "recipes"
WEIGHTS = "adapter/adapter_model.safetensors"
RECIPES = {LoRAFinetune: "lora_finetune_rocm", DPO: "dpo_rocm"}


# ---- sequences


def random_sequences(lengths: Sequence[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 64, (n,), generator=generator) for n in lengths]


def pack(sequences: list[torch.Tensor], multiple: int = 1) -> MicroBatch:
    """Return the micro-batch of ``sequences`` with every token labelled."""
    arrays = [s.numpy() for s in sequences]
    rows = Rows(arrays, arrays, [(len(s),) for s in arrays], {})
    return collate(rows, list(range(len(arrays))), packed=True, pad_id=0, multiple=multiple)


def rows_that_begin_alike() -> Rows:
    """Return a pair that shares 20 tokens, one that shares too few, and four sequences; every token has a label."""
    pairs = random_sequences([20, 7, 1, 15, 9, 3, 16, 5, 6, 30], 5)
    prompt, a, b, few, c, d, other, e, f, g = (s.numpy() for s in pairs)
    pieces = [
        [np.r_[prompt, a], np.r_[prompt, b]],
        [np.r_[few, c], np.r_[few, 64 - c, d]],
        [np.r_[other, e], np.r_[other, f], g, np.r_[g[:16], f]],
    ]
    tokens = [np.concatenate(row).astype(np.int32) for row in pieces]
    return Rows(tokens, tokens, [tuple(map(len, row)) for row in pieces], {})


# ---- our models and runs


def load(cfg: dict, recipe: type = LoRAFinetune) -> DictConfig:
    """Load the YAML content ``cfg`` for ``recipe``; the file is written beside the output folder."""
    out = Path(cfg["output_dir"])
    out.parent.mkdir(parents=True, exist_ok=True)
    return config.load(RECIPES[recipe], str(write_yaml(out.with_suffix(".yaml"), cfg)))


def prepare(cfg: dict, recipe: type = LoRAFinetune) -> Any:
    """Set ``recipe`` up for the YAML content ``cfg``."""
    made = recipe(load(cfg, recipe))
    made.setup()
    return made


def finetune(cfg: dict, recipe: type = LoRAFinetune) -> Any:
    """Run ``recipe`` and return it."""
    made = prepare(cfg, recipe)
    made.train()
    made.cleanup()
    return made


def our_model(folder: Path, **lora: Any) -> nn.Module:
    """Build and load our decoder, with fresh adapters."""
    node = OmegaConf.create(
        {"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": str(folder), **lora}
    )
    decoder = build_model(node, torch.float32, 0, CPU)
    checkpointer = {
        "_component_": "rocm_ext.model.HFCheckpointer",
        "checkpoint_dir": str(folder),
        "model_type": "HF",
    }
    load_weights(decoder, read_weights(OmegaConf.create(checkpointer)), Ranks(CPU))
    return decoder


@torch.no_grad()
def our_logits(recipe: LoRAFinetune) -> torch.Tensor:
    recipe.learner.model.eval()
    return recipe.learner.decoder(TOKENS)


def run_files(out: Path) -> tuple[list[float], bytes]:
    return metrics(out), (out / WEIGHTS).read_bytes()


def whole_run(base: Path, rows: Path, out: Path, lora: dict | None = None, **more: Any) -> dict:
    """Run five steps with dropout; return the config."""
    changes = {"epochs": 1, "max_steps_per_epoch": 5, "save_every_n_steps": 2, **more}
    cfg = folder_config(base, rows, out, {"lora_dropout": 0.1, **(lora or {})}, **changes)
    finetune(cfg)
    return cfg


def check_resumes(cfg: dict, name: str, moved: Callable[[], str] | None = None) -> None:
    """Kill the run of :func:`whole_run` and resume it; the files must be the same, bit for bit.

    Args:
        cfg: of the whole run.
        name: output folder of the killed run, beside that of the whole one.
        moved: called after the kill, returns an override. None: resume from the config that the run recorded.
    """
    whole = Path(cfg["output_dir"])
    out = whole.with_name(name)
    logger = {
        "_component_": "tests.recipes.test_resume.Do",
        "step": 3,
        "function": "send",
        "argument": int(signal.SIGKILL),
    }
    path = write_yaml(
        out.with_suffix(".yaml"), {**cfg, "metric_logger": logger, "output_dir": str(out)}
    )
    assert forked(main, path)[0] == -signal.SIGKILL
    again = (out / "config.yaml",) if moved is None else (path, moved())
    code, said = forked(main, *again, "resume_from_checkpoint=True", "metric_logger=null")
    assert code == 0, said
    assert run_files(out) == run_files(whole)


def check_two_ranks(
    base: Path, rows: Path, top: Path, lora: dict | None = None, **more: Any
) -> None:
    """Compare the losses, gradients and adapter of a run on two ranks with those of a run on one."""
    cfg = folder_config(
        base, rows, top / "one", lora, max_steps_per_epoch=4, clip_grad_norm=0.5, **more
    )
    finetune(cfg)
    path = write_yaml(top / "two.yaml", {**cfg, "output_dir": str(top / "two")})
    for code, messages in forked_ranks(main, path):
        assert code == 0, messages
    for key in ("loss", "grad_norm"):
        found, expected = (metrics(top / out, key) for out in ("two", "one"))
        assert len(expected) == 4
        assert found == pytest.approx(expected, rel=1e-5)
    found, expected = (load_file(top / out / WEIGHTS) for out in ("two", "one"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


# ---- transformers and PEFT


def their_model(
    folder: Path,
    adapter: Path | None = None,
    trainable: bool = False,
    auto: Any = AutoModelForCausalLM,
) -> nn.Module:
    """Open a model in transformers, by the class ``auto``, and an adapter in PEFT; neither may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns about weights it did not use
        warnings.filterwarnings(
            "ignore", "Unsupported layer type .*Experts"
        )  # PEFT 0.18 says so of each it adapts
        theirs = auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        if adapter is not None:
            theirs = peft.PeftModel.from_pretrained(theirs, adapter, is_trainable=trainable)
    return theirs.eval()


@torch.no_grad()
@contextmanager
def transformers_own() -> Iterator[None]:
    """transformers' own functions: ours take the place of those that carry states in its modules."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("transformers.models.")]:
            for key, value in list(vars(sys.modules[name]).items()):
                if inspect.isfunction(value) and hasattr(value, ROWS):
                    patch.setattr(sys.modules[name], key, value.__wrapped__)
        yield


def their_logits(
    folder: Path, adapter: Path | None = None, auto: Any = AutoModelForCausalLM
) -> torch.Tensor:
    with transformers_own():
        return their_model(folder, adapter, auto=auto)(TOKENS).logits


def their_training(
    theirs: nn.Module, rows: Rows, ratio: float | None = None
) -> dict[str, torch.Tensor]:
    """Train PEFT's model on ten steps of 8 rows, one row at a time; ``ratio`` is LoRA+'s. Return its adapter."""
    if ratio is None:
        optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=1e-3)
    else:
        settings = {"lr": 1e-3, "loraplus_lr_ratio": ratio, "loraplus_weight_decay": 0.01}
        optimizer = create_loraplus_optimizer(theirs, torch.optim.AdamW, **settings)
    for step in range(10):
        chunk = range(8 * step, 8 * step + 8)
        count = sum(int((torch.from_numpy(rows.labels[i][1:]) >= 0).sum()) for i in chunk)
        for i in chunk:
            tokens, labels = (
                torch.from_numpy(part[i]).long() for part in (rows.tokens, rows.labels)
            )
            with transformers_own():
                logits = theirs(tokens[None]).logits[0, :-1]
            (
                F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum") / count
            ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)


def ten_steps(
    cfg: dict, folder: Path, top: Path, model: Callable[..., nn.Module] = their_model
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train ten steps here, packed or padded, and with PEFT, one row at a time.

    Args:
        cfg: of our run.
        folder: of the base model.
        top: folder for the first adapter.
        model: opens base model and adapter as :func:`their_model` does.

    Returns:
        The first adapter, ours and theirs.
    """
    recipe = prepare({**cfg, "shuffle": False, "max_steps_per_epoch": 10})
    start = top / "start"
    start.mkdir()
    recipe.learner.write_adapter(start)
    rows = recipe.trainer.rows
    recipe.train()
    recipe.cleanup()
    ours = load_file(Path(cfg["output_dir"]) / WEIGHTS)
    ratio = cfg.get("loraplus_lr_ratio")
    theirs = their_training(model(folder, start, trainable=True).train(), rows, ratio)
    assert ours.keys() == theirs.keys()
    return load_file(start / "adapter_model.safetensors"), ours, theirs


def check_exports(
    base: Path,
    rows: Path,
    top: Path,
    lora: dict | None = None,
    logits: Callable[..., torch.Tensor] = their_logits,
    cfg: dict | None = None,
) -> torch.Tensor:
    """Train three steps: the adapter in PEFT, the merged model, and a run from the adapter have our logits.

    Args:
        base: folder of the base model.
        rows: to train on, with ``lora``, where there is no ``cfg`` of a run into ``top / "run"``.
        top: folder of the runs.
        lora: arguments of the adapter.
        logits: of a model's folder and an adapter's.
        cfg: of the run.

    Without the adapter ours are the base model's.

    Returns:
        Our logits. The adapter and the merged model are in ``top / "run"``.
    """
    cfg = {**(cfg or folder_config(base, rows, top / "run", lora)), "max_steps_per_epoch": 3}
    cfg |= {
        "save_adapter_weights_only": False,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-2},
    }
    ours = finetune(cfg)
    expected = our_logits(ours)
    for without in (reference(ours.learner), without_adapter(ours.learner)):
        with without:
            torch.testing.assert_close(our_logits(ours), logits(base), rtol=0, atol=1e-4)
    assert torch.equal(our_logits(ours), expected)
    adapter = top / "run" / "adapter"
    assert (logits(base) - expected).abs().max() > 0.1
    torch.testing.assert_close(logits(base, adapter), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(top / "run" / "merged"), expected, rtol=0, atol=1e-4)
    checkpointer = {**cfg.get("checkpointer", {}), "adapter_checkpoint": str(adapter)}
    again = prepare({**cfg, "output_dir": str(top / "again"), "checkpointer": checkpointer})
    # not bit for bit, because MKL's rounding may depend on a matrix's address in memory
    torch.testing.assert_close(our_logits(again), expected, rtol=0, atol=1e-5)
    return expected


# ---- torchtune


def local_overrides(cfg: dict, **more: Any) -> list[str]:
    """Return the command line that gives torchtune's config the small model and tokenizer of ``cfg``, and ``more``."""
    values = {
        "hardware": "cpu",
        "output_dir": cfg["output_dir"],
        "seed": 1,
        "gradient_accumulation_steps": 2,
    }
    values |= {"optimizer.lr": 1e-3, "lr_scheduler.num_warmup_steps": 1}
    values["checkpointer.checkpoint_dir"] = cfg["checkpointer"]["checkpoint_dir"]
    for part in ("model", "tokenizer"):
        values[part] = cfg[part]["_component_"]
        values |= {
            f"{part}.{key}": value
            for key, value in cfg[part].items()
            if "lora" not in key and key[0] != "_"
        }
    return [f"{key}={value}" for key, value in {**values, **more}.items()]


def stock_recipe(name: str) -> Any:
    """Load torchtune's class from its file ``name``, because the package ``recipes`` refuses imports."""
    path = STOCK_RECIPES / f"{name}_single_device.py"
    spec = importlib.util.spec_from_file_location(f"stock_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return next(made for key, made in vars(module).items() if key.endswith("RecipeSingleDevice"))


class StockLog:
    """Stands in for torchtune's metric logger."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        self.steps.append({key: float(value) for key, value in payload.items()})

    def close(self) -> None:
        pass


def run_stock(name: str, cfg: dict, initial: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Run torchtune's recipe; return each step's metrics and the final adapter, and save the first to ``initial``."""
    recipe = stock_recipe(name)(OmegaConf.create(cfg))
    recipe.setup(OmegaConf.create(cfg))
    recipe._metric_logger.close()
    recipe._metric_logger = StockLog()
    recipe.save_checkpoint = lambda epoch: None
    weights = recipe.adapter_params
    torch.save({name: p.detach().clone() for name, p in weights.items()}, initial)
    recipe.train()
    return recipe._metric_logger.steps, {name: p.detach() for name, p in weights.items()}
