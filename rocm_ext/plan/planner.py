"""Plan the work, time and memory of training and sampling, and find the settings that fit best.

Weights stay on the meta device and layers run on fake tensors (:mod:`rocm_ext.plan.costs`), so a plan for a 72B
model takes seconds and no memory. The recipes use the same planner for their ``auto`` values.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch
from omegaconf import DictConfig

from rocm_ext.data.batches import Steps, cut, rows_per_step, width_multiple
from rocm_ext.losses import Objective
from rocm_ext.machine.budget import readable
from rocm_ext.machine.numerics import dtype_name
from rocm_ext.model.attention import span_for
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.sampler import MIN_ROWS, Sampler, copied_bytes, stays_quantized
from rocm_ext.plan.costs import Kernels, Operation, launches_of
from rocm_ext.plan.memory import MemoryPlan, plan_memory, shared_bytes, worst_rows
from rocm_ext.plan.speeds import Figures
from rocm_ext.plan.workload import Questions, Workload, longest_answer
from rocm_ext.sampling import Sampling
from rocm_ext.sampling.slots import SHARE, most_slots, slot_memory, slots_beside

_GAIN = 1.02  # the speed-up that justifies another setting


@dataclass(frozen=True)
class Step:
    """Work and expected time of one optimiser step on one rank.

    Attributes:
        tokens: tokens of this rank, without padding.
        micro_batches: number of micro-batches.
        flops: floating-point operations.
        bytes: bytes that kernels read and write.
        seconds: expected time.
        forward_seconds: expected time of a forward pass over the same rows, without gradients.
    """

    tokens: float
    micro_batches: int
    flops: float
    bytes: float
    seconds: float
    forward_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of this rank per second, without padding."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Choice:
    """One way to run a step.

    Attributes:
        micro_batch: the most tokens computed at once.
        checkpointed: indices of the checkpointed layers.
        memory: memory by part.
        step: work and time.
    """

    micro_batch: int
    checkpointed: Sequence[int]
    memory: MemoryPlan
    step: Step

    @property
    def peak(self) -> int:
        """Peak bytes of a training step."""
        return self.memory.peak(self.checkpointed)


@dataclass(frozen=True)
class _Repeated:
    """Kernels that a micro-batch runs a number of times."""

    operations: Sequence[Operation]
    times: float
    compiled: bool = False

    def total(self, what: str) -> float:
        return self.times * sum(getattr(operation, what) for operation in self.operations)


@dataclass(eq=False)
class TrainingPlanner:
    """Plans the training of one model with one config on one machine.

    Attributes:
        cfg: config of a recipe.
        decoder: model with adapters, without weights.
        objective: computes the loss from hidden states.
        dtype: dtype of weights and activations.
        device: the target; the planner computes nothing there.
        rows: the training data.
        ranks: number of ranks that share the work.
        speeds: function that returns the machine's speeds; called only when the plan needs a time.
        kernels: fused kernels of ``device``.
    """

    cfg: DictConfig
    decoder: Decoder
    objective: Objective
    dtype: torch.dtype
    device: torch.device
    rows: Workload
    ranks: int
    speeds: Callable[[], Figures]
    kernels: Kernels
    _plans: dict[tuple[tuple[int, ...], tuple[int, ...], int], MemoryPlan] = field(init=False, default_factory=dict)

    @cached_property
    def figures(self) -> Figures:
        """The machine's speeds."""
        return self.speeds()

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimiser step over all ranks."""
        return rows_per_step(self.cfg, self.ranks)

    def memory(self, micro_batch: int) -> MemoryPlan:
        """Plan memory for micro-batches of at most ``micro_batch`` tokens.

        With known rows it plans for the largest micro-batch that they form. With unknown rows it plans for a
        micro-batch full of rows of the longest length, every token with a label.
        """
        if not self.rows.per_row:  # a micro-batch has at most the rows of a step
            rows = self.rows.most or self.rows_per_step
            most = min(micro_batch, math.ceil(rows / self.ranks) * self.rows.longest)
            return self._plan(worst_rows(math.ceil(self.rows.longest / self.rows.sequences), most), most)
        pieces, targets = self._largest(micro_batch)
        return max((self._plan(lengths, targets, shared) for lengths, shared in pieces), key=lambda plan: plan.peak(()))

    def _largest(self, micro_batch: int) -> tuple[list[tuple[list[int], list[int]]], int]:
        """Return the sequences of the largest micro-batches, as lengths and shared tokens, and the most labels in any.

        One has the most tokens. If sequences share tokens, another one may have the most tokens for attention.
        """
        cfg, per_row = self.cfg, self.rows.per_row
        order = cfg.max_steps_per_epoch, cfg.data_seed, cfg.shuffle, self.rows.mixture
        steps = Steps(len(per_row), self.rows_per_step, *order)
        packed = self.decoder.packs
        # unpacked rows are padded to the longest
        sizes = [lambda piece: sum(piece[0]) if packed else len(piece[0]) * max(piece[0], default=0)]
        if self.rows.shared:
            sizes.append(lambda piece: sum(map(sum, piece)))
        largest: list[tuple[list[int], list[int]]] = [([], [])] * len(sizes)
        targets = 1
        for step in range(steps.per_epoch * cfg.epochs):
            rows = [per_row[i] for i in steps[step]]
            for piece in chain(*cut([sum(lengths) for lengths, *_ in rows], self.ranks, micro_batch, packed)):
                lengths = [n for i in piece for n in rows[i][0]]
                shared = [n for i in piece for n in rows[i][1]]
                largest = [max(most, (lengths, shared), key=size) for most, size in zip(largest, sizes, strict=True)]
                targets = max(targets, sum(rows[i][2] for i in piece))
        multiple = width_multiple(self.cfg.compile, self.device, self.dtype)
        for lengths, shared in largest if packed else ():
            if padding := -sum(lengths) % multiple:
                lengths.append(padding)
                shared.append(0)
        return largest, targets

    def _plan(self, lengths: Sequence[int], targets: int, shared: Sequence[int] = ()) -> MemoryPlan:
        key = (tuple(lengths), tuple(shared), targets)
        if key not in self._plans:
            self._plans[key] = plan_memory(
                self.decoder,
                self.objective,
                lengths,
                self.device,
                optimizer=self.cfg.optimizer,
                ranks=self.ranks,
                targets=targets,
                kernels=self.kernels,
                shared=shared,
            )
        return self._plans[key]

    def choice(self, micro_batch: int, checkpointed: Collection[int] | None, budget: int) -> Choice:
        """Plan a step.

        Args:
            micro_batch: the most tokens computed at once.
            checkpointed: indices of layers; None: as few layers as ``budget`` allows.
            budget: bytes that a rank may use.
        """
        memory = self.memory(micro_batch)
        layers = memory.fewest(budget) if checkpointed is None else sorted(checkpointed)
        return Choice(micro_batch, layers, memory, self._step(micro_batch, layers))

    def _step(self, micro_batch: int, checkpointed: Collection[int]) -> Step:
        tokens = self.rows_per_step * self.rows.mean / self.ranks
        count = max(1, math.ceil(tokens / micro_batch))
        size = max(1, round(tokens / count))
        plan = self._plan(*self._typical(size))
        # the frozen output layer: one product forward, a second one for losses of sequences, and one backward
        loss = plan.loss.operations
        passes = [_Repeated(loss, 1.0)]
        forward = [_Repeated(loss, 1 / 3 if self.objective.whole_sequences else 1 / 2)]
        for costs in {id(costs): costs for costs in plan.layer_costs}.values():
            alike = [i for i, other in enumerate(plan.layer_costs) if other is costs]
            again = sum(i in checkpointed for i in alike)
            kept = len(alike) - again
            compiled = bool(self.cfg.compile)  # but not the checkpointed layers
            passes += [_Repeated(costs.forward, kept, compiled), _Repeated(costs.backward, kept, compiled)]
            passes += [_Repeated(costs.forward, 2 * again), _Repeated(costs.backward, again)]
            forward += [_Repeated(costs.forward, kept, compiled), _Repeated(costs.forward, again)]
        forward_seconds = count * max(self._seconds(forward), self._gathering() / 2)
        # KTO's baseline is a separate forward pass
        before, waits = (forward, forward_seconds) if getattr(self.objective, "baseline", None) is not None else ([], 0)
        update = _Repeated([Operation(0, 2 * (plan.adapter + plan.optimizer) + plan.gradients)], 1.0)
        return Step(
            tokens=tokens,
            micro_batches=count,
            flops=count * sum(kernels.total("flops") for kernels in passes + before),
            bytes=count * sum(kernels.total("bytes") for kernels in passes + before) + update.total("bytes"),
            seconds=count * max(self._seconds(passes), self._gathering()) + waits + self._seconds([update]),
            forward_seconds=forward_seconds,
        )

    def _typical(self, tokens: int) -> tuple[list[int], int, list[int]]:
        """Return lengths, number of labels and shared tokens of the sequences in a micro-batch of ``tokens`` tokens."""
        rows = self.rows
        targets = max(1, round(rows.supervised * tokens))
        if not rows.shared:
            return worst_rows(min(tokens, max(1, round(rows.mean / rows.sequences))), tokens), targets, []
        lengths: list[int] = []
        shared: list[int] = []
        count, sequences = max(1, round(tokens / rows.mean)), max(2, round(rows.sequences))
        for i in range(count):  # rows of sequences of equal length, shared tokens included
            size = tokens * (i + 1) // count - tokens * i // count
            common = rows.shared / (sequences - 1)
            length = max(1, int((size - common) / sequences))
            lengths += [size - (sequences - 1) * length, *[length] * (sequences - 1)]
            shared += [0, *[min(round(common), lengths[-sequences])] * (sequences - 1)]
        return lengths, targets, shared

    def _gathering(self) -> float:
        """Seconds to gather the layers' weights, forward and backward, in parallel with computing."""
        return 2 * shared_bytes(self.decoder) / self.ranks * (self.ranks - 1) / self.figures.link

    def _seconds(self, passes: Sequence["_Repeated"]) -> float:
        dtype = dtype_name(self.dtype)
        timed = (work for work in passes if work.times)
        return sum(work.times * self.figures.seconds(work.operations, dtype, work.compiled) for work in timed)

    def fit(self, budget: int) -> Choice:
        """Return the fastest way to run a step within ``budget`` bytes, or the smallest if none fits."""
        longest = self.rows.longest
        per_rank = self.rows_per_step / self.ranks * self.rows.mean
        best = last = self.choice(longest, None, budget)
        rows = 2
        while (rows - 1) * longest < per_rank:
            other = self.choice(rows * longest, None, budget)
            if other.peak > budget:
                break
            best = self.better(best, other, budget)
            if other.step.seconds * _GAIN >= last.step.seconds:  # nor will more rows be faster
                break
            last, rows = other, rows * 2
        return best

    def cures(self, tokens: int, layers: Sequence[int], goal: float) -> list[str]:
        """List changes of the config that lower the planned peak, the fastest first.

        Args:
            tokens: tokens of a micro-batch.
            layers: the checkpointed layers.
            goal: the most bytes that a change may plan.

        Returns:
            Up to two changes, as ``key=value`` with their peak and their cost; none, if no smaller micro-batch reaches
            ``goal``.
        """
        now, every = self.choice(tokens, layers, 0), range(self.memory(tokens).layers)
        ways = {"enable_activation_checkpointing=True": self.choice(tokens, every, 0)}
        size = math.ceil(tokens / self.rows.longest)  # rows of the longest length
        while size > 1 and (size := size // 2):
            fewer = size * self.rows.longest
            key = f"tokens_per_micro_batch={fewer}"  # batch_size may also say how many rows a step has
            ways[key] = self.choice(fewer, layers, 0)
            ways[f"{key} enable_activation_checkpointing=True"] = self.choice(fewer, every, 0)
            if ways[key].peak <= goal:
                break
        enough = {way: choice for way, choice in ways.items() if choice.peak <= min(goal, now.peak - 1)}
        changes = []
        for way, choice in sorted(enough.items(), key=lambda item: item[1].step.seconds)[:2]:
            slower = round(100 * (choice.step.seconds / now.step.seconds - 1))
            changes.append(f"{way} (plans {readable(choice.peak)}{f', {slower} % slower' if slower > 0 else ''})")
        return changes

    def better(self, choice: Choice, other: Choice, budget: int) -> Choice:
        """Return ``other`` if it fits, and ``choice`` does not fit or is clearly slower; else ``choice``."""
        if other.peak <= budget and (choice.peak > budget or other.step.seconds * _GAIN < choice.step.seconds):
            return other
        return choice


@dataclass(frozen=True)
class SamplingPlan:
    """Memory and speed of sampling in this process.

    Attributes:
        layout: bytes of the copied weights.
        slots: answers decoded at once.
        cache: bytes of keys and values of all slots.
        working: further bytes.
        tokens_per_second: answer tokens with all slots full.
        launches: see :class:`SamplingPlanner`.
    """

    layout: int
    slots: int
    cache: int
    working: int
    tokens_per_second: float
    launches: int

    @property
    def peak(self) -> int:
        """Peak bytes of sampling, in addition to the model and what training keeps allocated."""
        return self.layout + self.cache + self.working


class SamplingPlanner:
    """Plans sampling with :class:`rocm_ext.sampling.LocalEngine`.

    Attributes:
        layout: bytes of the copied weights.
        launches: kernels that the host starts in a step; 0: one graph, or the cost of a launch is unknown.

    Args:
        cfg: config of a recipe that samples.
        decoder: model with adapters, on the meta device.
        device: the target.
        asked: prompts and answers.
        ranks: number of ranks that shard the weights; every rank samples from a full copy.
        figures: the machine's speeds.
    """

    def __init__(
        self, cfg: DictConfig, decoder: Decoder, device: torch.device, asked: Questions, *, ranks: int, figures: Figures
    ) -> None:
        merge = cfg.engine.get("merge")
        with torch.no_grad():
            self._decoder = decoder.sampler(merge, device)
        # several ranks gather one copy each
        frozen = (p.nbytes for p in decoder.parameters() if not p.requires_grad and not stays_quantized(p))
        self.layout = copied_bytes(decoder, merge) if ranks == 1 else sum(frozen)
        wanted = device.type == "cuda" and cfg.engine.get("graphs") is not False
        self._graphs = self._decoder.fixed_shapes = wanted and not decoder.graph_obstacle
        self.launches = 0
        if figures.launch and not self._graphs:
            kernels = Kernels.on(device, "bf16" in figures.flops, cfg.attention)
            self.launches = launches_of(decoder, merge, device, kernels)
        self._cfg, self._device, self._asked, self._figures = cfg, device, asked, figures

    def plan(self, free: int, reserve: int = 0) -> SamplingPlan:
        """Plan sampling with the config's slots, or with as many as fit into ``free`` bytes.

        Args:
            free: bytes for the layout and the slots.
            reserve: bytes that training allocates at the same time; 0: sampling frees its memory before training.
        """
        cfg, decoder, asked = self._cfg, self._decoder, self._asked
        length = asked.longest + longest_answer(cfg)
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p)
        prompts = [asked.longest] * min(asked.prompts or 2**10, 2**10)
        memory = slot_memory(decoder, prompts, span_for(self._device, length), sampling, self._graphs)
        most = most_slots((asked.prompts or 2**20) * cfg.samples_per_prompt, self._device, decoder.splits_rows)
        fit = slots_beside(memory, most, int(SHARE * (free - self.layout)), reserve)
        slots = cfg.engine.get("slots") or max(MIN_ROWS, fit)
        cache = slots * memory.cache
        speed = slots / self.step_seconds(slots)
        return SamplingPlan(self.layout, slots, cache, memory.bytes(slots) - cache, speed, self.launches)

    def step_seconds(self, slots: int) -> float:
        """Seconds to decode one token of ``slots`` answers."""
        context = self._asked.mean + self._asked.answer / 2
        computing = decode_seconds(self._decoder, slots, context, self._figures)
        return max(computing, self.launches * self._figures.launch)  # the device computes behind the host

    def seconds(self, prompts: float, samples: int, slots: int) -> float:
        """Seconds to prefill prompts and decode ``samples`` answers per prompt, at least of the longest answer."""
        asked, decoder = self._asked, self._decoder
        steps = max(prompts * samples * asked.answer / slots, self._cfg.max_new_tokens)
        flops = prompts * asked.mean * decoder.flops_per_token
        return steps * self.step_seconds(slots) + flops / self._figures.rate(dtype_name(decoder.dtype))


def decode_seconds(decoder: Sampler, slots: int, context: float, figures: Figures) -> float:
    """Seconds to decode one token of ``slots`` answers, whose attention sees ``context`` tokens on average.

    Reading weights and cache does not overlap with computing.
    """
    read = decoder.weight_bytes + slots * decoder.cache_bytes(context)
    computing = slots * decoder.flops_per_token / figures.rate(dtype_name(decoder.dtype))
    return (read / figures.bandwidth + computing) / figures.decode_efficiency
