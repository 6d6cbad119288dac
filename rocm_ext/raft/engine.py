"""Open the config's engine on the learner's model, and count the processes that verify beside it."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from omegaconf import DictConfig

from rocm_ext import config
from rocm_ext.errors import UserError
from rocm_ext.generation.base import Engine
from rocm_ext.hardware.machine import host_memory
from rocm_ext.ranks import local_world_size
from rocm_ext.train.learner import Learner


def open_engine(cfg: DictConfig, learner: Learner) -> Engine:
    """Build and check the config's engine.

    The engine gets those of ``decoder``, ``tokenizer`` and ``free_memory`` that its constructor takes.

    Args:
        cfg: config of ``raft_rocm``.
        learner: the model to sample from.

    Raises:
        UserError: the engine cannot run, or lacks the token ids and log-probs that the config needs.
    """
    offered = {
        "decoder": learner.decoder,
        "tokenizer": learner.tokenizer,
        "free_memory": partial(free_memory, cfg, learner),
    }
    wanted = {name: value for name, value in offered.items() if config.takes(cfg.engine, name, key="engine")}
    engine = config.instantiate(cfg.engine, key="engine", **wanted)
    engine.check()
    loss = learner.objective
    needs = [f"loss {type(loss).__name__}"] * ("old_logprobs" in loss.columns)
    needs += ["min_entropy"] * (cfg.min_entropy is not None)
    if needs and not (engine.exact_tokens and engine.has_logprobs):
        raise UserError(
            f"{' and '.join(needs)}: the engine returns no token ids and log-probs of sampling, which this needs"
        )
    return engine


def free_memory(cfg: DictConfig, learner: Learner) -> int:
    """Return how many bytes sampling may still take on the device."""
    runtime: Any = learner.runtime
    if runtime.device.type == "cpu":
        return host_memory(Path("/"), "MemAvailable") // local_world_size()
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_allocated(runtime.device)
    free = runtime.budget()
    if not runtime.machine.unified:  # on unified memory the budget comes from MemAvailable, which excludes `taken`
        free -= taken
    if cfg.memory_fraction is not None:
        free = min(free, int(cfg.memory_fraction * runtime.machine.total_memory) - taken)
    return free


def verify_workers(cfg: DictConfig) -> int:
    """Return the number of processes that verify while the model samples.

    This is the config's ``verify_workers``. If that is null, it is this rank's share of the physical cores minus
    one, from 1 to 16.
    """
    if cfg.verify_workers is not None:
        return cfg.verify_workers
    # one core of each rank's share drives the sampler; the data loader is idle while the model samples
    cores = psutil.cpu_count(logical=False) or 1
    if hasattr(os, "sched_getaffinity"):  # a container may have fewer cores than the machine
        cores = min(cores, len(os.sched_getaffinity(0)))
    return min(16, max(1, cores // local_world_size() - 1))
