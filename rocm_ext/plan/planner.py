"""Plan the work, time and memory of training and sampling, and find the settings that fit best.

Weights stay on the meta device and layers run on fake tensors (:mod:`rocm_ext.plan.costs`), so a plan for a 72B
model takes seconds and no memory. The recipes use the same planner for their ``auto`` values.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
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
from rocm_ext.model.products import uses_onednn
from rocm_ext.model.sampler import MIN_ROWS, Sampler, copied_bytes, stays_quantized
from rocm_ext.plan.costs import Kernels, Operation, launches_of
from rocm_ext.plan.memory import MemoryPlan, plan_memory, shared_bytes, worst_rows
from rocm_ext.plan.speeds import Figures
from rocm_ext.plan.workload import Questions, Row, Workload, longest_answer
from rocm_ext.sampling import Sampling
from rocm_ext.sampling.slots import SHARE, most_slots, slot_memory, slots_beside

_GAIN = 1.02  # the speed-up that justifies another setting
# Lengths and shared tokens of the sequences in a micro-batch
_Sequences = tuple[list[int], list[int]]


@dataclass(frozen=True)
class StepWork:
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
    step: StepWork

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


_Passes = list[_Repeated]


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
    _plans: dict[tuple[tuple[int, ...], tuple[int, ...], int], MemoryPlan] = field(
        init=False, default_factory=dict
    )

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
        rows = self.rows
        if not rows.per_row:
            rows_of_rank = math.ceil((rows.most or self.rows_per_step) / self.ranks)
            tokens = min(micro_batch, rows_of_rank * rows.longest)
            longest_sequence = math.ceil(rows.longest / rows.sequences)
            return self._plan(worst_rows(longest_sequence, tokens), tokens)
        largest, targets = self._largest(micro_batch)
        plans = [self._plan(lengths, targets, shared) for lengths, shared in largest]
        return max(plans, key=lambda plan: plan.peak(()))

    def _largest(self, micro_batch: int) -> tuple[list[_Sequences], int]:
        """Return the largest micro-batches, and the most labels in any.

        One has the most tokens. If sequences share tokens, another one may have the most tokens for attention.
        """
        rows, packed = self.rows, self.decoder.packs
        most_tokens: _Sequences = ([], [])
        most_attended: _Sequences = ([], [])
        tokens = attended = 0
        most_targets = 1
        for batch in self._micro_batches(micro_batch):
            lengths: list[int] = []
            shared: list[int] = []
            targets = 0
            for row_lengths, row_shared, row_targets in batch:
                lengths += row_lengths
                shared += row_shared
                targets += row_targets
            # unpacked rows are padded to the longest
            size = sum(lengths) if packed else len(lengths) * max(lengths, default=0)
            if size > tokens:
                tokens, most_tokens = size, (lengths, shared)
            if sum(lengths) + sum(shared) > attended:
                attended, most_attended = sum(lengths) + sum(shared), (lengths, shared)
            most_targets = max(most_targets, targets)
        largest = [most_tokens, most_attended] if rows.shared else [most_tokens]
        multiple = width_multiple(self.cfg.compile, self.device, self.dtype)
        for lengths, shared in largest:
            padding = -sum(lengths) % multiple
            if packed and padding:
                lengths.append(padding)
                shared.append(0)
        return largest, most_targets

    def _micro_batches(self, micro_batch: int) -> Iterator[list[Row]]:
        """Yield the rows of every micro-batch of the run, on all ranks."""
        cfg = self.cfg
        per_row = self.rows.per_row
        steps = Steps(
            rows=len(per_row),
            per_step=self.rows_per_step,
            limit=cfg.max_steps_per_epoch,
            data_seed=cfg.data_seed,
            shuffle=cfg.shuffle,
            mixture=self.rows.mixture,
        )
        for step in range(steps.per_epoch * cfg.epochs):
            rows = [per_row[i] for i in steps[step]]
            sizes = [sum(lengths) for lengths, _, _ in rows]
            by_rank = cut(sizes, self.ranks, micro_batch, self.decoder.packs)
            for numbers in chain.from_iterable(by_rank):
                yield [rows[number] for number in numbers]

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
            checkpointed: indices of layers. Without them, as few layers as ``budget`` allows.
            budget: bytes that a rank may use.
        """
        memory = self.memory(micro_batch)
        layers = memory.fewest(budget) if checkpointed is None else sorted(checkpointed)
        return Choice(micro_batch, layers, memory, self._step(micro_batch, layers))

    def _step(self, micro_batch: int, checkpointed: Collection[int]) -> StepWork:
        tokens = self.rows_per_step * self.rows.mean / self.ranks
        count = max(1, math.ceil(tokens / micro_batch))
        lengths, targets, shared = self._typical(max(1, round(tokens / count)))
        plan = self._plan(lengths, targets, shared)
        passes, forward = self._passes(plan, checkpointed)
        gathering = self._gathering()
        forward_seconds = count * max(self._seconds(forward), gathering / 2)
        seconds = count * max(self._seconds(passes), gathering)
        # KTO's baseline is a separate forward pass
        if getattr(self.objective, "baseline", None) is not None:
            passes += forward
            seconds += forward_seconds
        moved = 2 * (plan.adapter + plan.optimizer) + plan.gradients
        update = _Repeated([Operation(0, moved)], 1.0)
        flops = written = 0.0
        for kernels in passes:
            for operation in kernels.operations:
                flops += kernels.times * operation.flops
                written += kernels.times * operation.bytes
        return StepWork(
            tokens=tokens,
            micro_batches=count,
            flops=count * flops,
            bytes=count * written + moved,
            seconds=seconds + self._seconds([update]),
            forward_seconds=forward_seconds,
        )

    def _passes(self, plan: MemoryPlan, checkpointed: Collection[int]) -> tuple[_Passes, _Passes]:
        """Return a micro-batch's kernels: of the forward and backward passes, and of a forward pass alone."""
        output = plan.loss.operations
        # the frozen output layer: one product forward, a second one for losses of sequences, and one backward
        forward_share = 1 / 3 if self.objective.whole_sequences else 1 / 2
        passes = [_Repeated(output, 1.0)]
        forward = [_Repeated(output, forward_share)]
        compiled = bool(self.cfg.compile)  # but not the checkpointed layers
        kinds = {id(costs): costs for costs in plan.layer_costs}
        for costs in kinds.values():
            layers = [i for i, other in enumerate(plan.layer_costs) if other is costs]
            again = sum(i in checkpointed for i in layers)
            kept = len(layers) - again
            passes.append(_Repeated(costs.forward, kept, compiled))
            passes.append(_Repeated(costs.backward, kept, compiled))
            passes.append(_Repeated(costs.forward, 2 * again))
            passes.append(_Repeated(costs.backward, again))
            forward.append(_Repeated(costs.forward, kept, compiled))
            forward.append(_Repeated(costs.forward, again))
        return passes, forward

    def _typical(self, tokens: int) -> tuple[list[int], int, list[int]]:
        """Return lengths, number of labels and shared tokens of the sequences in a micro-batch of ``tokens`` tokens."""
        rows = self.rows
        targets = max(1, round(rows.supervised * tokens))
        if not rows.shared:
            length = max(1, round(rows.mean / rows.sequences))
            return worst_rows(min(tokens, length), tokens), targets, []
        lengths: list[int] = []
        shared: list[int] = []
        count = max(1, round(tokens / rows.mean))
        # sequences of a row that share the beginning of its first
        others = max(2, round(rows.sequences)) - 1
        common = rows.shared / others
        for i in range(count):  # rows of sequences of equal length, shared tokens included
            size = tokens * (i + 1) // count - tokens * i // count
            length = max(1, int((size - common) / (others + 1)))
            first = size - others * length
            lengths += [first] + [length] * others
            shared += [0] + [min(round(common), first)] * others
        return lengths, targets, shared

    def _gathering(self) -> float:
        """Seconds to gather the layers' weights, forward and backward, in parallel with computing."""
        received = 2 * shared_bytes(self.decoder) / self.ranks * (self.ranks - 1)
        return received / self.figures.link

    def _seconds(self, passes: Sequence[_Repeated]) -> float:
        dtype = dtype_name(self.dtype)
        seconds = [
            kernels.times * self.figures.seconds(kernels.operations, dtype, kernels.compiled)
            for kernels in passes
        ]
        return sum(seconds)  # Python 3.12 and newer add more exactly here than in a loop

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
        now = self.choice(tokens, layers, 0)
        all_layers = range(now.memory.layers)
        ways = {"enable_activation_checkpointing=True": self.choice(tokens, all_layers, 0)}
        rows = math.ceil(tokens / self.rows.longest) // 2
        while rows >= 1:
            fewer = rows * self.rows.longest
            key = f"tokens_per_micro_batch={fewer}"  # batch_size may also say how many rows a step has
            ways[key] = self.choice(fewer, layers, 0)
            ways[f"{key} enable_activation_checkpointing=True"] = self.choice(fewer, all_layers, 0)
            if ways[key].peak <= goal:
                break
            rows //= 2
        most = min(goal, now.peak - 1)
        enough = [(way, choice) for way, choice in ways.items() if choice.peak <= most]
        enough.sort(key=lambda item: item[1].step.seconds)
        changes = []
        for way, choice in enough[:2]:
            effect = f"plans {readable(choice.peak)}"
            ratio = choice.step.seconds / now.step.seconds
            slower = round(100 * (ratio - 1))
            if slower > 0:
                effect += f", {slower} % slower"
            changes.append(f"{way} ({effect})")
        return changes

    def better(self, choice: Choice, other: Choice, budget: int) -> Choice:
        """Return ``other`` if it fits, and ``choice`` does not fit or is clearly slower; else ``choice``."""
        if other.peak > budget:
            return choice
        faster = other.step.seconds * _GAIN < choice.step.seconds
        return other if faster or choice.peak > budget else choice


@dataclass(frozen=True)
class SamplingPlan:
    """Memory and speed of sampling in this process.

    Attributes:
        layout: bytes of the copied weights.
        slots: answers decoded at once.
        cache: bytes of keys and values of all slots.
        working: further bytes.
        tokens_per_second: answer tokens with all slots full.
    """

    layout: int
    slots: int
    cache: int
    working: int
    tokens_per_second: float

    @property
    def peak(self) -> int:
        """Peak bytes of sampling, in addition to the model and what training keeps allocated."""
        return self.layout + self.cache + self.working


class SamplingPlanner:
    """Plans sampling with :class:`rocm_ext.sampling.LocalEngine`.

    Attributes:
        layout: bytes of the copied weights.

    Args:
        cfg: config of a recipe that samples.
        decoder: model with adapters, on the meta device.
        device: the target.
        asked: prompts and answers.
        ranks: number of ranks that shard the weights; every rank samples from a full copy.
        figures: the machine's speeds.
    """

    def __init__(
        self,
        cfg: DictConfig,
        decoder: Decoder,
        device: torch.device,
        asked: Questions,
        *,
        ranks: int,
        figures: Figures,
    ) -> None:
        merge = cfg.engine.get("merge")
        with torch.no_grad():
            self._decoder = decoder.sampler(merge, device)
        if ranks == 1:
            self.layout = copied_bytes(decoder, merge, device)
        else:  # every rank gathers a copy
            self.layout = 0
            for p in decoder.parameters():
                if not p.requires_grad and not stays_quantized(p):
                    self.layout += p.nbytes
            embeddings = decoder.tok_embeddings.weight
            if decoder.transposes_tied and uses_onednn(embeddings.dtype, device):
                self.layout += embeddings.nbytes
        wanted = device.type == "cuda" and cfg.engine.get("graphs") is not False
        self._graphs = wanted and not decoder.graph_obstacle
        self._decoder.fixed_shapes = self._graphs
        # seconds in which the host starts the kernels of a step without a graph
        self._launching = 0.0
        if figures.launch and not self._graphs:
            kernels = Kernels.on(device, "bf16" in figures.flops, cfg.attention)
            self._launching = figures.launch * launches_of(decoder, merge, device, kernels)
        self._cfg = cfg
        self._device = device
        self._asked = asked
        self._figures = figures

    def plan(self, free: int, reserve: int = 0) -> SamplingPlan:
        """Plan sampling with the config's slots, or with as many as fit into ``free`` bytes.

        Args:
            free: bytes for the layout and the slots.
            reserve: bytes that training allocates at the same time. 0 if sampling frees its memory before training.
        """
        cfg, decoder, asked = self._cfg, self._decoder, self._asked
        span = span_for(self._device, asked.longest + longest_answer(cfg))
        sampling = Sampling(cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, cfg.min_p)
        prompts = [asked.longest] * min(asked.prompts or 2**10, 2**10)
        memory = slot_memory(decoder, prompts, span, sampling, self._graphs)
        slots = cfg.engine.get("slots")
        if not slots:
            answers = (asked.prompts or 2**20) * cfg.samples_per_prompt
            most = most_slots(answers, self._device, decoder.splits_rows)
            room = int(SHARE * (free - self.layout))
            slots = max(MIN_ROWS, slots_beside(memory, most, room, reserve))
        cache = slots * memory.cache
        return SamplingPlan(
            layout=self.layout,
            slots=slots,
            cache=cache,
            working=memory.bytes(slots) - cache,
            tokens_per_second=slots / self.step_seconds(slots),
        )

    def step_seconds(self, slots: int) -> float:
        """Seconds to decode one token of ``slots`` answers."""
        context = self._asked.mean + self._asked.answer / 2
        computing = decode_seconds(self._decoder, slots, context, self._figures)
        return max(computing, self._launching)  # the device computes behind the host

    def seconds(self, prompts: float, samples: int, slots: int) -> float:
        """Seconds to prefill prompts and decode ``samples`` answers per prompt, at least of the longest answer."""
        asked, decoder = self._asked, self._decoder
        steps = max(prompts * samples * asked.answer / slots, self._cfg.max_new_tokens)
        flops = prompts * asked.mean * decoder.flops_per_token
        prefill = flops / self._figures.rate(dtype_name(decoder.dtype))
        return steps * self.step_seconds(slots) + prefill


def decode_seconds(decoder: Sampler, slots: int, context: float, figures: Figures) -> float:
    """Seconds to decode one token of ``slots`` answers, whose attention sees ``context`` tokens on average.

    Reading weights and cache does not overlap with computing.
    """
    read = decoder.weight_bytes + slots * decoder.cache_bytes(context)
    computing = slots * decoder.flops_per_token / figures.rate(dtype_name(decoder.dtype))
    return (read / figures.bandwidth + computing) / figures.decode_efficiency
