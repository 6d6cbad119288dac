"""The measurements of ``rocm-ext bench``, from matrix products to training."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from statistics import quantiles
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torchtune.modules import TransformerDecoder

from rocm_ext import config
from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.log import log
from rocm_ext.bench.sweep import COPIES, Item, ProbeReply, ProbeResult, Spec, Values
from rocm_ext.data.batches import Layout, StepLoader, Update
from rocm_ext.data.rows import Rows
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.machine import numerics
from rocm_ext.machine.budget import open_device, readable
from rocm_ext.machine.detect import detect
from rocm_ext.machine.profile import load_profile
from rocm_ext.model.attention import choose_attention, span_for
from rocm_ext.model.build import Weights, build_model, load_weights
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.download import use_shape
from rocm_ext.model.lora import plain
from rocm_ext.model.sampler import copied_bytes, sampler_of
from rocm_ext.model.weights.quantized import Quantized
from rocm_ext.plan import workload
from rocm_ext.plan.costs import CostCounter
from rocm_ext.plan.memory import frozen_bytes
from rocm_ext.sampling import Request, Sampling
from rocm_ext.sampling.local import LocalSession
from rocm_ext.sampling.slots import slot_memory
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Runtime
from rocm_ext.train.output_dir import OutputDir
from rocm_ext.train.trainer import Trainer

_TOKENS = {"cuda": 4096, "cpu": 512}  # tokens of a matrix product
_COPIED = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}  # bytes, well above the caches
_PROMPT = 64  # tokens of the prompts that are decoded from
_WARM_UP, _STEPS = 8, 40  # decoding steps; the first ones also prefill, and capture graphs
_LONGEST = 2048  # tokens of a training row, unless the config says less
_CHECKPOINTED = "_checkpoint_wrapped_module"  # attribute of torch's wrapper of a layer


class Skipped(Exception):
    """A probe cannot measure this here; the message says why."""


@contextmanager
def _skipping() -> Iterator[None]:
    """Context in which a UserError is about something that cannot be measured here, so that the probe is skipped."""
    try:
        yield
    except UserError as error:
        raise Skipped(str(error)) from error


class Bench:
    """The config, machine, device and model that a child measures."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.machine = detect()
        recipe = config.recipe_of(spec.config, spec.overrides)
        cfg = config.load(recipe, spec.config, spec.overrides)
        self.cfg = OmegaConf.create(config.trainer_config(cfg))
        use_shape(self.cfg)
        self.profile = load_profile(self.cfg.hardware)
        fraction = None
        if self.cfg.device != "cpu" and not self.machine.unified:  # open_device caps unified memory
            # keeps the process within its budget where a probe underestimates its memory
            fraction = min(1.0, spec.budget / self.machine.total_memory)
        self.device = open_device(self.profile, self.machine, 0, fraction, self.cfg.device)
        self.dtype, _ = numerics.pick_dtype(self.cfg.dtype, self.machine)

    @cached_property
    def shape(self) -> TransformerDecoder:
        """The config's model without weights."""
        decoder = build_model(self.cfg.model, self.dtype, 0, torch.device("meta"))
        choose_attention(decoder, self.cfg.attention)
        return decoder

    @cached_property
    def decoder(self) -> Any:
        """The config's model with random weights, for sampling."""
        with _skipping():
            self.shape.check_sampling()
        self.require(frozen_bytes(self.shape) + copied_bytes(self.shape, device=self.device))
        decoder = build_model(self.cfg.model, self.dtype, 0, self.device)
        choose_attention(decoder, self.cfg.attention)
        weights = Weights(RandomWeights(decoder, self.device), "random")
        load_weights(decoder, weights, Ranks(self.device))
        return decoder

    def timed(
        self, work: Callable[[], Any], least: int = 5, seconds: float | None = None
    ) -> list[float]:
        """Seconds of at least ``least`` calls of ``work``, after two that are not timed.

        On a GPU it waits after every call, so ``work`` should last longer than the launch of its kernels.
        ``seconds`` is the duration of the measurement, by default the spec's.
        """
        times: list[float] = []
        end = math.inf
        while len(times) < least + 2 or time.perf_counter() < end:
            began = time.perf_counter()
            work()
            wait(self.device)
            times.append(time.perf_counter() - began)
            if len(times) == 2:
                end = time.perf_counter() + (seconds or self.spec.seconds)
        return times[2:]

    def require(self, needed: int) -> None:
        """Raise :class:`Skipped` if ``needed`` bytes exceed the budget."""
        if needed > self.spec.budget:
            raise Skipped(f"needs {readable(needed)}, the budget is {readable(self.spec.budget)}")


def measure(bench: Bench, item: Item) -> ProbeReply:
    """Measure one item; return its status, with the result or with the detail of the failure."""
    try:
        result = PROBES[item.probe](bench, item.values)
        return {"status": "ok", "result": result}
    except Skipped as reason:
        return {"status": "skipped", "detail": str(reason)}
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "detail": one_line(error)[:200]}
    except Exception as error:  # drivers, kernels and libraries may raise anything
        return {"status": "failed", "detail": one_line(error)[:200]}


# ---- times


def rate(times: Sequence[float], amount: float, unit: str) -> ProbeResult:
    """``amount`` per second of calls that took ``times``: the median as ``value``, and the quartiles."""
    low, median, high = quantiles(times, n=4, method="inclusive")
    return {
        "value": amount / median,
        "low": amount / high,
        "high": amount / low,
        "unit": f"{unit}/s",
        "seconds": median,
    }


def wait(device: torch.device) -> None:
    """Wait until ``device`` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the device


def gemm(bench: Bench, values: Values) -> ProbeResult:
    """FLOP/s of the feed-forward layer: x Wᵀ (``forward``) or g W (``dgrad``)."""
    mlp: Any = bench.shape.layers[0].mlp  # type: ignore[union-attr, index]
    wide, width = mlp.w1.weight.shape
    tokens = _TOKENS[bench.device.type]
    dtype = numerics.DTYPES[values["dtype"]]
    elements = tokens * width + width * wide + tokens * wide
    bench.require(2 * elements * dtype.itemsize)
    weight = torch.randn(wide, width, device=bench.device).to(dtype)
    if values["direction"] == "forward":
        weight = weight.T
    x = torch.randn(tokens, len(weight), device=bench.device).to(dtype)
    times = bench.timed(lambda: x @ weight)
    flops = 2 * tokens * width * wide
    return {**rate(times, flops, "FLOP"), "shape": [tokens, width, wide]}


def bandwidth(bench: Bench, values: Values) -> ProbeResult:
    """Bytes per second of a copy; within the device every byte counts twice, as read and as written."""
    size = _COPIED[bench.device.type]
    bench.require(2 * size)

    def allocated(place: str) -> Tensor:
        device = torch.device("cpu")
        if place == "device":
            device = bench.device
        elif place == "other":
            device = torch.device("cuda", 1)
        return torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=place == "pinned")

    start, end = COPIES[values["what"]]
    source, target = allocated(start), allocated(end)
    moved = 2 * size if start == end else size
    return rate(bench.timed(lambda: target.copy_(source)), moved, "B")


def loader(bench: Bench, values: Values) -> ProbeResult:
    """Tokens per second that the loader packs into micro-batches, from rows of all lengths."""
    longest = longest_row(bench.cfg)
    steps, rows_of_step = 50, 16
    count = steps * rows_of_step
    rows = random_rows(count, longest // 8, longest, 256)
    layout = Layout(0, 1, 4 * longest, packed=True, pad_id=0)
    order = [range(first, first + rows_of_step) for first in range(0, count, rows_of_step)]
    loads = StepLoader(rows, order, layout, values["num_workers"], bench.cfg.pin_memory)

    def load_all() -> None:
        for _ in loads.range(0, steps):
            pass

    tokens = sum(map(len, rows.tokens))
    return rate(bench.timed(load_all, least=3), tokens, "tokens")


# ---- decoding


class _Clocked(LocalSession):
    """Records the seconds of the steps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.steps: list[float] = []

    def _count(self, tokens: int, rows: int, slots: int, read: int, seconds: float) -> None:
        super()._count(tokens, rows, slots, read, seconds)
        self.steps.append(seconds)


def decoding(bench: Bench, values: Values) -> ProbeResult:
    """Answer tokens per second of the config's model with random weights, with all slots full."""
    decoder, slots = bench.decoder, values["slots"]
    sampling = Sampling(_WARM_UP + _STEPS)
    vocabulary = decoder.tok_embeddings.num_embeddings
    requests = []
    for i in range(slots):
        prompt = tuple((i * 7 + j) % vocabulary for j in range(_PROMPT))
        requests.append(Request(str(i), sample=0, seed=i, tokens=prompt))
    endless = SimpleNamespace(stop_tokens=[-1], decode=lambda ids, **_: "")
    graphs = bench.device.type == "cuda"
    with sampler_of(decoder) as sampler:
        span = span_for(bench.device, _PROMPT + _WARM_UP + _STEPS)
        memory = slot_memory(sampler, [_PROMPT] * slots, span, sampling, graphs)
        bench.require(frozen_bytes(decoder) + copied_bytes(decoder) + memory.bytes(slots))
        session = _Clocked(sampler, endless, lambda: bench.spec.budget, slots, graphs)
        list(session.generate(requests, sampling))
    context = _PROMPT + _WARM_UP + _STEPS / 2
    return {**rate(session.steps[_WARM_UP:], slots, "tokens"), "context": context}


# ---- training


class RandomWeights(Mapping[str, Tensor]):
    """Random weights with the names and shapes of ``decoder``'s, drawn at every access."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._device = device
        self._quantizes = decoder.quantizes
        self._shapes: dict[str, Tensor] = {}  # keys are the names in checkpoints
        for name, parameter in decoder.named_parameters():
            if not parameter.requires_grad:
                self._shapes[plain(name)] = parameter
        for name, buffer in decoder.buffers_to_load().items():
            self._shapes[plain(name)] = buffer

    def __getitem__(self, name: str) -> Tensor:
        like = self._shapes[name]
        if isinstance(like, Quantized) and not self._quantizes:
            least = 116 if like.kind in ("", "MXFP4") else 4
            return like.with_parts(lambda part: self._part(part, least))
        weight = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        return weight.normal_(std=0.02)

    def _part(self, like: Tensor, least: int) -> Tensor:
        """Values or scales of a quantised weight; bytes are ``least`` or little more.

        ggml's blocks have fp16 scales among their bytes; these bytes make them about 1e-4.
        """
        if like.dtype == torch.uint8:
            return torch.randint(
                least, least + 6, like.shape, dtype=torch.uint8, device=self._device
            )
        scale = 0.02 if like.element_size() > 1 else 1.0
        values = torch.empty(like.shape, device=self._device).normal_(std=scale)
        return values.to(like.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class ProbeLearner(Learner):
    """The recipe's model with random weights; a step may take ``budget`` bytes."""

    def __init__(self, cfg: DictConfig, runtime: Runtime, budget: int) -> None:
        super().__init__(cfg, runtime, tokenizer=None)
        self._budget = budget

    def read_weights(self) -> Weights:
        """Random weights, if a step fits into the budget."""
        if self.planned_peak > self._budget:
            raise Skipped(
                f"would take {readable(self.planned_peak)}, the budget is {readable(self._budget)}"
            )
        return Weights(RandomWeights(self.decoder, self.runtime.device), "random")


def random_rows(count: int, shortest: int, longest: int, vocabulary: int) -> Rows:
    """Rows of ``shortest`` to ``longest`` random tokens, with a label on every token."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest + 1, count)
    tokens = [rng.integers(0, vocabulary, length, dtype=np.int32) for length in lengths]
    return Rows(tokens, tokens, [(int(length),) for length in lengths], {})


def longest_row(cfg: DictConfig) -> int:
    """Tokens of a training row."""
    return min(cfg.tokenizer.get("max_seq_len") or _LONGEST, _LONGEST)


def probe_config(cfg: DictConfig, values: Values, insist: list[str]) -> DictConfig:
    """``cfg`` for steps of ``values["rows"]`` rows at once; the other ``values`` replace its keys."""
    changes: dict[str, Any] = {
        "sequences_per_step": values["rows"],
        "gradient_accumulation_steps": None,
        "batch_size": values["rows"],
        "tokens_per_micro_batch": None,
        "max_steps_per_epoch": None,
        "epochs": 1,
        "seed": 0,
        "lr_scheduler": None,
        "resume_from_checkpoint": False,
        "overwrite_output_dir": True,
        "hardware_overrides": insist,
        "startup_checks": False,
        "metric_logger": None,
        "profiler": None,
        "profile_steps": None,
    }
    changed = OmegaConf.create({**OmegaConf.to_container(cfg), **changes})  # type: ignore[dict-item]
    for key, value in values.items():
        if key != "rows":
            OmegaConf.update(changed, key, value)
    changed.checkpointer.pop("adapter_checkpoint", None)
    return changed


def training(bench: Bench, values: Values) -> ProbeResult:
    """Tokens per second of training steps with random weights, and their peak memory."""
    log.disabled = True
    cfg = probe_config(bench.cfg, values, list(bench.profile.locked))
    runtime = Runtime.open(cfg)
    longest, count = longest_row(cfg), values["rows"]
    rows = random_rows(count, longest, longest, 256)
    # the machine may lack a kernel of attention
    may_skip = _skipping() if "attention" in values else nullcontext()
    try:
        with may_skip, TemporaryDirectory() as folder:
            cfg.output_dir = folder
            learner = ProbeLearner(cfg, runtime, bench.spec.budget)
            learner.setup(workload.describe(rows, count, "random"))
            trainer = Trainer(learner, rows, cfg, OutputDir.open(cfg, runtime.ranks))
            trainer.open()
            (update,) = trainer.loader.range(0, 1)
            learner.model.train()
            if bench.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(bench.device)
            times = bench.timed(lambda: trainer.train_step(update), 3, 2 * bench.spec.seconds)
            layers = learner.decoder.layers
            return {
                **rate(times, count * longest, "tokens"),
                "peak_memory": _peak(trainer, update),
                "planned_memory": learner.planned_peak,
                "dtype": numerics.dtype_name(runtime.dtype),
                "checkpointed": sum(hasattr(layer, _CHECKPOINTED) for layer in layers),
            }
    finally:
        runtime.ranks.close()
        gc.collect()  # a compiled model is in cycles


def _peak(trainer: Trainer, update: Update) -> int:
    """Peak bytes of an update; a CPU's are counted in one more update."""
    if trainer.runtime.device.type == "cuda":
        return torch.cuda.max_memory_allocated(trainer.runtime.device)
    decoder = trainer.learner.decoder
    tensors = [*decoder.parameters(), *decoder.buffers()]
    for state in trainer.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    tally = CostCounter()
    tally.ignore(tensors)
    with tally:
        trainer.train_step(update)
    distinct = {id(tensor): tensor for tensor in tensors}
    return tally.peak + sum(tensor.nbytes for tensor in distinct.values())


PROBES: dict[str, Callable[[Bench, Values], ProbeResult]] = {
    "gemm": gemm,
    "bandwidth": bandwidth,
    "loader": loader,
    "decoding": decoding,
    "training": training,
}
