"""Checks of training steps: dtypes, compile, memory plan, checkpointing, offloading, 4-bit weights and GGUF's blocks.

Each trains the same model with the same random weights on the same rows, and compares the losses.
"""

import gc
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from rocm_ext.bench import probes
from rocm_ext.bench.probes import Bench, ProbeLearner, RandomWeights, probe_config, random_rows
from rocm_ext.machine.detect import detect
from rocm_ext.machine.numerics import dtype_name
from rocm_ext.model.build import Weights, read_weights
from rocm_ext.model.weights.unpack import BLOCKS, unpack
from rocm_ext.plan import workload
from rocm_ext.train.lifecycle import Runtime
from rocm_ext.train.output_dir import OutputDir
from rocm_ext.train.trainer import Trainer
from tools.benchmarks.protocol import Ratio
from tools.gpu.here import GIB, Here, Row, Skipped, check, speed

STEPS = 6
# the pocket model's matrices have too few weights for NF4's blocks
WIDER = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 320, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 256, "intermediate_size": 512,
         "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
         "tie_word_embeddings": True}  # fmt: skip
LEAST, MOST = 0.6, 1.05  # of the planned peak that the allocator may report


class SeededWeights(RandomWeights):
    """The same random weights in every dtype: drawn in fp32, then rounded. Scales of norms are 1."""

    def __getitem__(self, name: str) -> Tensor:
        like = self._shapes[name]
        rng = torch.Generator(self._device).manual_seed(sum(name.encode()) + like.numel())
        if like.ndim == 1 and not name.endswith("bias"):
            return torch.ones(like.shape, dtype=like.dtype, device=self._device)
        return (0.02 * torch.randn(like.shape, generator=rng, device=self._device)).to(like.dtype)


class SeededLearner(ProbeLearner):
    """A learner over :class:`SeededWeights`."""

    def read_weights(self) -> Weights:
        return Weights(SeededWeights(self.decoder, self.runtime.device), "random")


class StoredLearner(ProbeLearner):
    """A learner over the weights in ``folder``, which the config's model may have in another form."""

    def __init__(self, *args: Any, folder: str) -> None:
        super().__init__(*args)
        self._folder = folder

    def read_weights(self) -> Weights:
        super().read_weights()  # which says if a step does not fit
        return read_weights(
            OmegaConf.merge(self.cfg.checkpointer, {"checkpoint_dir": self._folder})
        )


@dataclass(frozen=True)
class Trained:
    """Losses and seconds of steps, tokens of a step, the allocator's peak in bytes (0 on a CPU), the planned peak."""

    losses: list[float]
    seconds: list[float]
    tokens: int
    peak: int
    planned: int


def train(
    bench: Bench, rows: int, learner_of: Any = SeededLearner, compiled: bool = False, **changes: Any
) -> Trained:
    """Train :data:`STEPS` steps on the same ``rows`` rows; ``changes`` as a probe has them."""
    cfg = probe_config(
        bench.cfg, {"rows": rows, "compile": compiled, **changes}, list(bench.profile.locked)
    )
    runtime = Runtime.open(cfg)
    longest = min(probes.longest_row(cfg), 1024)
    data = random_rows(rows, longest // 2, longest, 256)
    try:
        with TemporaryDirectory() as folder:
            cfg.output_dir = folder
            learner = learner_of(cfg, runtime, bench.spec.budget)
            learner.setup(workload.describe(data, rows, "random"))
            trainer = Trainer(learner, data, cfg, OutputDir.open(cfg, runtime.ranks))
            trainer.open()
            (update,) = trainer.loader.range(0, 1)
            learner.model.train()
            gpu = runtime.device.type == "cuda"
            if gpu:
                torch.cuda.reset_peak_memory_stats()
            losses, ends = [], [time.perf_counter()]
            for _ in range(STEPS):
                losses.append(trainer.train_step(update).loss)
                probes.wait(runtime.device)
                ends.append(time.perf_counter())
            tokens, peak = (
                sum(map(len, data.tokens)),
                torch.cuda.max_memory_allocated() if gpu else 0,
            )
            return Trained(losses, np.diff(ends).tolist(), tokens, peak, learner.planned_peak)
    finally:
        runtime.ranks.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def compare(what: str, result: Trained, expected: Trained, tolerance: float) -> Row:
    """Compare the losses of all steps, which must also fall."""
    apart = max(abs(a - b) / abs(b) for a, b in zip(result.losses, expected.losses, strict=True))
    falls = result.losses[-1] < result.losses[0]
    curve = f"{result.losses[0]:.4f} to {result.losses[-1]:.4f}"
    return check(what, apart <= tolerance and falls, f"losses {curve}, off by {apart:.1e} at most")


def dtypes(here: Here) -> Iterator[Row]:
    """Losses in bf16, and in fp16 with loss scaling, are those in fp32."""
    bench = here.bench("0.5b")
    expected = train(bench, 2, dtype="fp32")
    yield compare("training in fp32", expected, expected, 0.0)
    for dtype in (*["bf16"] * bench.machine.bf16, "fp16"):
        yield compare(f"training in {dtype}", train(bench, 2, dtype=dtype), expected, 0.02)


def compiled(here: Here) -> Iterator[Row]:
    """Compiled layers give the losses of plain ones."""
    bench = here.bench("0.5b")
    plain = train(bench, 2)
    yield compare("compiled layers", train(bench, 2, compiled=True), plain, 0.01)


def offloading(here: Here) -> Iterator[Row]:
    """Activations in host memory: the same losses, and less memory on the device."""
    bench = here.bench("0.5b")
    if bench.machine.unified:
        raise Skipped("host and device share their memory")
    plain = train(bench, 4, enable_activation_checkpointing=False)
    moved = train(
        bench, 4, enable_activation_checkpointing=False, enable_activation_offloading=True
    )
    yield compare("activation offloading", moved, plain, 1e-3)
    yield check("offloading takes less device memory", moved.peak < plain.peak,
                f"{moved.peak / GIB:.2f} instead of {plain.peak / GIB:.2f} GiB")  # fmt: skip


def four_bit(here: Here) -> Iterator[Row]:
    """A 4-bit base (NF4) gives nearly the same losses in less memory."""
    bench = _wider(here, "0.5b")
    plain, small = train(bench, 2), train(bench, 2, **{"model.quantize_base": True})
    yield compare("training over a 4-bit base", small, plain, 0.03)
    if here.gpu:
        note = f"{small.peak / GIB:.2f} instead of {plain.peak / GIB:.2f} GiB"
        yield check("a 4-bit base takes less memory", small.peak < 0.95 * plain.peak, note)


def _wider(here: Here, size: str) -> Bench:
    folder = here.folder / "wider"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(WIDER))
    return here.bench(size, *([f"model.checkpoint_dir={folder}"] if here.tiny else []))


def blocks(here: Here) -> Iterator[Row]:
    """Values of all types of GGUF's blocks are those that a CPU unpacks, and what follows from them is the same."""
    from tools.gpu import unpacking  # not every machine has its packages

    rng, wrong, alike = np.random.default_rng(0), [], 0
    for kind in BLOCKS:
        stored = torch.from_numpy(unpacking.random_blocks(kind, 64, 8, rng))
        for dtype in (torch.float32, torch.bfloat16):
            result = unpack(stored.to(here.torch_device), kind, dtype).cpu()
            expected = unpack(stored, kind, dtype)
            alike += torch.equal(result, expected)  # a compiled product and sum may round once
            near = torch.allclose(result.float(), expected.float(), torch.finfo(dtype).eps, 0)
            wrong += [f"{kind} in {dtype}"] * (not near)
    yield check(f"values of {len(BLOCKS)} types of blocks are a CPU's", not wrong,
                ", ".join(wrong) or f"bit for bit in {alike} of {2 * len(BLOCKS)} cases")  # fmt: skip
    os.environ["XDG_CACHE_HOME"] = str(here.folder)  # where a file's config.json and tokenizer go
    top, _ = here.world("gguf", lambda _: None)
    for name in ("fp32", *["bf16"] * detect().bf16):
        sides = unpacking.sides(top, "Q4_K", name, here.torch_device)
        apart = unpacking.difference(*sides, unpacking.micro_batch(256, here.torch_device))
        yield check(f"logits, loss and gradients over Q4_K are those over unpacked weights, {name}",
                    apart <= unpacking.LIMITS[name], f"off by {apart:.1e} at most")  # fmt: skip


def gguf(here: Here, size: str) -> Iterator[Row]:
    """Steps over a GGUF file in Q4_K whose blocks stay packed, and whose blocks a CPU unpacks as it reads them."""
    from tools.gpu import unpacking  # as above

    bench, rows = _wider(here, size), 2 if here.tiny else 8
    os.environ["XDG_CACHE_HOME"] = str(here.folder)  # as above
    model, gib = Path(bench.cfg.model.checkpoint_dir), {"0.5b": 0.6, "7b": 6.0}[size]
    top, _ = here.world(
        f"gguf-{size}",
        lambda to: unpacking.write_random_gguf(to / "model.gguf", model, "Q4_K"),
        gib,
    )
    packed = here.bench(size, f"model.checkpoint_dir={top / 'model.gguf'}")
    result = []
    for side, weights in (packed, "Q4_K"), (bench, f"the same values in {dtype_name(bench.dtype)}"):
        result.append(
            train(side, rows, partial(StoredLearner, folder=packed.cfg.model.checkpoint_dir))
        )
        seconds, peak = result[-1].seconds[1:], result[-1].peak  # the first step chooses kernels
        note = f"{1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f} ms a step, peak {peak / GIB:.2f} GiB"
        tokens = result[-1].tokens / median(seconds)
        yield speed(
            f"LoRA SFT of {here.size(size)} over {weights}", tokens, "tokens/s", note, peak=peak
        )
    ratio = Ratio.of(*(steps.seconds[1:] for steps in result))
    yield speed(f"a step of {here.size(size)} over Q4_K, by one over the same values", ratio.median, "x",
                f"{ratio.low:.2f} to {ratio.high:.2f}")  # fmt: skip
    yield compare("training over blocks", *result, 1e-3)


def checkpointing(here: Here) -> Iterator[Row]:
    """Recomputed layers give the same losses."""
    bench = here.bench("0.5b")
    plain = train(bench, 2, enable_activation_checkpointing=False)
    for value in (True, 2):
        again = train(bench, 2, enable_activation_checkpointing=value)
        yield compare(f"enable_activation_checkpointing: {value}", again, plain, 1e-3)


def memory(here: Here, size: str) -> Iterator[Row]:
    """The planned peak of a training step beside the allocator's."""
    bench = here.bench(size)
    for rows in (2,) if here.tiny else (1, 4, 16):
        for recompute in (False, True):
            values = {"rows": rows, "compile": False, "enable_activation_checkpointing": recompute}
            what = f"memory of {here.size(size)}, {rows} rows{', recomputed' if recompute else ''}"
            try:
                result = probes.training(bench, values)
            except (probes.Skipped, torch.OutOfMemoryError) as reason:
                yield {"what": what, "ok": None, "found": str(reason).splitlines()[0][:200]}
                continue
            ratio = result["peak_memory"] / result["planned_memory"]
            said = f"{result['peak_memory'] / GIB:.2f} GiB of {result['planned_memory'] / GIB:.2f} planned, {ratio:.2f}"
            yield check(what, LEAST <= ratio <= MOST, said)
            yield speed(f"training of {here.size(size)}, {rows} rows{', recomputed' if recompute else ''}",
                        result["value"], "tokens/s", f"peak {result['peak_memory'] / GIB:.2f} GiB")  # fmt: skip
