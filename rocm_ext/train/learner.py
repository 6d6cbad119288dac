"""The model to train: decoder, adapter and objective. A :class:`~rocm_ext.train.trainer.Trainer` updates it."""

import contextlib
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder

from rocm_ext import config
from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.heartbeat import RETRY, beat
from rocm_ext.base.log import log, warn
from rocm_ext.data.batches import Layout, MicroBatch, micro_batch_budget, width_multiple
from rocm_ext.data.rows import Rows, check_vocabulary, concatenated
from rocm_ext.data.tokenizer import ChatTokenizer
from rocm_ext.losses import Objective, check_fit, objective_of
from rocm_ext.machine import numerics
from rocm_ext.machine.budget import readable
from rocm_ext.machine.cooling import rest
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.adapters.merge import check_mergeable
from rocm_ext.model.adapters.peft_files import PeftConfig
from rocm_ext.model.attention import check_kernel, choose_attention, shares_beginnings
from rocm_ext.model.build import (
    Weights,
    build_model,
    check_adapter,
    check_quantized,
    load_adapter,
    load_weights,
    read_weights,
)
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.download import use_weights
from rocm_ext.model.lora import adapter_parameters, adapters, plain, quantized, reset, trained
from rocm_ext.model.names import replace_parameter
from rocm_ext.model.weights.quantized import unpacked_once
from rocm_ext.plan.costs import Kernels
from rocm_ext.plan.memory import apply_checkpointing, checkpointed_layers
from rocm_ext.plan.planner import TrainingPlanner
from rocm_ext.plan.speeds import figures_for
from rocm_ext.plan.workload import Workload
from rocm_ext.train.lifecycle import Runtime
from rocm_ext.train.machines import check_same


def first_adapter(cfg: DictConfig) -> Path | None:
    """Return the adapter that a config starts from; None for the base model."""
    path = cfg.checkpointer.get("adapter_checkpoint")
    return Path(path) if path else None


class Learner:
    """Decoder, adapter and objective on this rank's device.

    The constructor builds the model without its weights and does the cheap checks. :meth:`plan` plans memory.
    :meth:`load` shards the model and reads the weights, which takes minutes for a large model.

    To change a part, subclass and override :meth:`setup_model`, :meth:`setup_loss` or :meth:`read_weights`.

    Args:
        cfg: config of the SFT recipe or of a recipe that extends it.
        runtime: machine, device, dtype and ranks.
        tokenizer: the model's tokenizer; None if the rows were made without one.

    Attributes:
        decoder: the model without its objective, with packed attention if it supports that.
        adapter: trainable parameters under torchtune's names.
        objective: function that a step minimises.
        model: decoder and objective as one module.
        packed: whether a micro-batch holds its rows end to end, without padding.
        shares: whether a row stores a common beginning of its sequences once, as of the sides of a pair.

    Raises:
        UserError: the config's model or loss is not supported, or the machine cannot train it.
    """

    def __init__(self, cfg: DictConfig, runtime: Runtime, tokenizer: Any) -> None:
        self.cfg = cfg
        self.runtime = runtime
        self.tokenizer = tokenizer
        first = first_adapter(cfg)
        if first is not None and not first.exists():
            raise UserError(
                f"no adapter in checkpointer.adapter_checkpoint {first}; null begins with the base model"
            )
        if cfg.use_rslora is None:
            cfg.use_rslora = first is not None and peft_files.is_rslora(first)
        self.decoder = self.setup_model()
        peft_files.check_checkpointer(cfg, self.decoder)
        for _, layer in adapters(self.decoder):
            layer.rslora = cfg.use_rslora
        self.adapter: Mapping[str, nn.Parameter] = adapter_parameters(self.decoder)
        warn(
            check_quantized(
                self.decoder,
                runtime.profile,
                list(cfg.hardware_overrides),
                runtime.ranks.world,
                runtime.budget(),
            )
        )
        self.packed = self.decoder.packs
        choose_attention(self.decoder, cfg.attention)
        check_kernel(
            cfg.attention,
            runtime.device,
            runtime.dtype,
            self.decoder.num_heads,
            self.decoder.head_dim,
        )
        if cfg.startup_checks:
            checks = numerics.canaries(
                runtime.machine,
                runtime.device,
                runtime.dtype,
                self.decoder.head_dim,
                self.decoder.num_heads,
                attention=cfg.attention,
                convolution=any(isinstance(module, nn.Conv1d) for module in self.decoder.modules()),
                compiled=bool(cfg.compile),
                kernels=self.decoder.kernels,
            )
            warn(numerics.require(checks))
        self._pad_id = getattr(tokenizer, "pad_id", 0) or 0
        self._multiple = width_multiple(cfg.compile, runtime.device, runtime.dtype)
        self.objective = self.setup_loss()
        self.model = CausalLM(self.decoder, self.objective)
        self._first: Mapping[str, Tensor] | None = None
        if first is not None:
            self._first = self.read_adapter(first)
            check_adapter(self.decoder, self._first, str(first))
            folder = peft_files.config_folder(first)
            if folder is not None:
                warn(filter(None, [PeftConfig.read(folder).other_base(folder, self._base)]))

    @cached_property
    def shares(self) -> bool:
        """Whether a row stores a common beginning of its sequences once."""
        return self.packed and shares_beginnings(self.decoder)

    @cached_property
    def _base(self) -> str:
        return peft_files.base_model_name(Path(self.cfg.checkpointer.checkpoint_dir))

    @property
    def layout(self) -> Layout:
        """The layout of this rank's micro-batches, after :meth:`plan` has chosen their size."""
        return Layout(
            self.runtime.ranks.rank,
            self.runtime.ranks.world,
            self.tokens_per_micro_batch,
            self.packed,
            self._pad_id,
            self._multiple,
            self.shares,
        )

    def setup_model(self) -> TransformerDecoder:
        """Build the decoder: frozen parameters on the meta device, fresh adapters on the runtime's device."""
        return build_model(self.cfg.model, self.runtime.dtype, self.cfg.seed, self.runtime.device)

    def setup_loss(self) -> Objective:
        """Build the objective that the config's ``loss`` names."""
        return objective_of(config.instantiate(self.cfg.loss, key="loss"))

    def read_weights(self) -> Weights:
        """Read the base weights with the config's checkpointer, after a download from the hub if need be."""
        use_weights(Path(self.cfg.checkpointer.checkpoint_dir), self.runtime.ranks)
        return read_weights(self.cfg.checkpointer)

    def check_rows(self, rows: Rows, coming: Collection[str] = ()) -> None:
        """Check that the model can train on ``rows``, which will also have the columns ``coming``.

        Raises:
            UserError: a token id is outside the vocabulary, the rows lack a column that the objective needs, or the
                objective is for another kind of preferences.
        """
        check_vocabulary(
            int(concatenated(rows.tokens).max()), self.decoder.tok_embeddings.num_embeddings
        )
        check_fit(self.objective, {*rows.columns, *coming}, rows.pairs)

    def setup(self, work: Workload) -> None:
        """Make the model ready to train: :meth:`plan`, then :meth:`load`."""
        self.plan(work)
        self.load()

    def plan(
        self,
        work: Workload,
        beside: int = 0,
        budget: int | None = None,
        before: Mapping[str, int] | None = None,
    ) -> None:
        """Plan memory, and apply the planned activation checkpointing. This needs no weights.

        It sets seven more attributes: ``tokens_per_micro_batch``; ``checkpointed``, the number of layers whose
        activations are computed again; ``planned_peak``, ``planned_fixed`` and ``planned_budget``: bytes at the peak,
        allocated all the time, and available; ``budget_reason``; ``offloading``, the context of a forward pass.

        Args:
            work: description of the rows; it determines micro-batches and checkpointed layers.
            beside: bytes of the budget that other parts of the run hold during training.
            budget: bytes for the model and what is ``beside`` it; by default what is free.
            before: the plan of the checkpoint that the run resumes. ``tokens_per_micro_batch: auto`` keeps its size of
                micro-batches where it fits, so that the results are those of an undisturbed run.
        """
        self.budget_reason = "as the caller says"
        if budget is None:
            budget, self.budget_reason = self.runtime.budget_and_reason()
        try:
            tokens = before.get("tokens_per_micro_batch") if before else None
            self._plan(work, budget - beside, tokens)
        # the plan runs a step without data
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            component = self.cfg.model[config.COMPONENT]
            raise UserError(
                f"model: {component} cannot compute a step with these arguments: {one_line(error)}"
            ) from error
        self.offloading: contextlib.AbstractContextManager = contextlib.nullcontext()
        if self.cfg.enable_activation_offloading:
            if self.runtime.device.type != "cuda":
                raise UserError(
                    "enable_activation_offloading needs a GPU; activations are in host memory already"
                )
            # here, because it takes a second
            from torchtune.training import get_act_offloading_ctx_manager

            self.offloading = get_act_offloading_ctx_manager(self.decoder, True)
        if self.cfg.compile:
            mode = "max-autotune-no-cudagraphs" if self.cfg.compile == "max-autotune" else None
            # the first layer's input needs no gradient, for which all layers' code would be compiled once more
            for layer in self.decoder.layers[1:]:
                layer.compile(dynamic=True, mode=mode)

    def check_budget(self) -> None:
        """Check that the planned peak is within the budget, unless the config says ``over_budget=try``."""
        if self.planned_peak <= self.planned_budget or self.cfg.over_budget != "refuse":
            return
        needs = f"the memory plan needs {readable(self.planned_peak)} and has {readable(self.planned_budget)}"
        ways = self.cures(self.planned_budget)
        cure = "No smaller micro-batch fits; `rocm-ext plan` tries other settings"
        if ways:
            cure = f"Set {' or '.join(ways)}"
        cure = f"{cure}. over_budget=try starts the run regardless"
        held = self.runtime.held_by_others()
        gain = self.runtime.budget(held) - self.runtime.budget()
        if held and self.planned_peak <= self.planned_budget + gain:
            others = f"other processes hold {readable(held)}, and without them it fits"
            raise UserError(f"{needs}; {others}. Stop them. {cure}", RETRY)
        raise UserError(f"{needs}. {cure}")

    def cures(self, goal: float) -> list[str]:
        """List changes that lower the planned peak to ``goal`` bytes; see :class:`TrainingPlanner`."""
        planner, tokens, layers = self._planned
        # planning copies parts of the model, which by now may be loaded and sharded
        planner.decoder = build_model(
            self.cfg.model, self.runtime.dtype, self.cfg.seed, torch.device("meta")
        )
        choose_attention(planner.decoder, self.cfg.attention)
        return planner.cures(tokens, layers, goal)

    def load(self) -> None:
        """Read the weights and the first adapter, and set ``base_fingerprint``, a hash that identifies the base model.

        Raises:
            UserError: the weights are missing, damaged or of another model.
        """
        weights = self.read_weights()
        if not self.cfg.save_adapter_weights_only:
            check_mergeable(self.decoder, weights.state)
        self.base_fingerprint = weights.fingerprint(str(getattr(self.decoder, "architecture", "")))
        first = self._first
        check_same(
            lambda: {
                "the base model's weights": self.base_fingerprint,
                "adapter_checkpoint": first and peft_files.fingerprint(first),
            },
            self.runtime.ranks,
            "copy the model and the adapter from one machine to the others",
        )
        unsharded = {*self.adapter.values(), *quantized(self.decoder)}
        self.runtime.ranks.shard(self.decoder.layers, self.model, unsharded)
        load_weights(self.decoder, weights, self.runtime.ranks)
        self._load_first()
        trainable = sum(p.numel() for p in self.adapter.values())
        total = sum(p.numel() for p in self.decoder.parameters())
        log.info("model: %s parameters, %s trainable", f"{total:,}", f"{trainable:,}")

    def load_beside(self, other: "Learner") -> None:
        """Take the base weights of ``other``, which is loaded, instead of reading them: memory holds them once.

        Raises:
            UserError: the two quantise other layers.
        """
        if _in_four_bits(self.decoder) != _in_four_bits(other.decoder):
            raise UserError(
                "quantize_base stores adapted layers in 4 bits, so all adapters over one base need LoRA on the same "
                "layers; train attention and MLP, or set quantize_base=False"
            )
        theirs = _frozen(other.decoder)
        for name, parameter in list(self.decoder.named_parameters()):
            if not parameter.requires_grad:
                replace_parameter(self.decoder, name, theirs[plain(name)])
        loaded = other.decoder.buffers_to_load()
        for name, buffer in self.decoder.buffers_to_load().items():
            buffer.copy_(loaded[name])
        for _, part in trained(self.decoder):
            reset(part)
        self.base_fingerprint = other.base_fingerprint
        self._load_first()

    def _load_first(self) -> None:
        """Load the adapter that the config starts from, if there is one."""
        if self._first is not None:
            self.load_adapter(self._first, self.cfg.checkpointer.adapter_checkpoint)
            self._first = None  # frees its tensors

    def _plan(self, work: Workload, budget: int, before: int | None) -> None:
        """Choose the size of a micro-batch, of ``before`` tokens if it can, and the checkpointed layers."""
        cfg, runtime = self.cfg, self.runtime
        planner = TrainingPlanner(
            cfg,
            self.decoder,
            self.objective,
            runtime.dtype,
            runtime.device,
            rows=work,
            ranks=runtime.ranks.world,
            speeds=partial(figures_for, runtime.profile, runtime.machine),
            kernels=Kernels.on(runtime.device, runtime.machine.bf16, cfg.attention),
        )
        if cfg.tokens_per_micro_batch != "auto":
            tokens = micro_batch_budget(cfg, work.longest)
        elif before is not None and runtime.ranks.agree(_fits(planner, before, budget)):
            tokens = before
            log.info("micro-batches: %s tokens, as before the run was resumed", f"{tokens:,}")
        else:
            tokens = runtime.ranks.agree(planner.fit(budget).micro_batch)
            log.info("micro-batches: %s tokens, from the memory plan", f"{tokens:,}")
        memory = planner.memory(tokens)
        chosen = checkpointed_layers(cfg.enable_activation_checkpointing, memory, budget)
        layers, why = runtime.ranks.agree(chosen)  # ranks may see different free host memory
        apply_checkpointing(self.decoder, layers)
        self.tokens_per_micro_batch = tokens
        self.planned_budget = budget
        self.planned_fixed = memory.fixed
        self.planned_peak = memory.peak(layers)
        self.checkpointed = len(layers)
        self._planned = planner, tokens, layers
        if cfg.compile and layers:
            log.warning(
                "compile: torch does not compile the %d checkpointed layers; enable_activation_checkpointing: False "
                "needs more memory, and compiles them",
                len(layers),
            )
        log.info("activation checkpointing: %d of %d layers (%s)", len(layers), memory.layers, why)

    def adapter_state(self) -> dict[str, Tensor]:
        """Return a copy of the adapter on the CPU, under torchtune's names."""
        return peft_files.adapter_state(self.decoder)

    def load_adapter(self, state: Mapping[str, Tensor], source: str) -> None:
        """Copy the adapter weights ``state``, by torchtune's names, into the model.

        A UserError names their origin, ``source``, and the weights that do not fit.
        """
        load_adapter(self.decoder, state, source)

    def read_adapter(self, folder: Path) -> dict[str, Tensor]:
        """Read the weights of a PEFT folder, under torchtune's names; a UserError if this model cannot take them."""
        return peft_files.read_adapter(folder, self.decoder, self.cfg.checkpointer.model_type)

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter to ``folder`` in PEFT's format, with a chat template that is not the model's."""
        peft_files.write_adapter(folder, self.decoder, self.cfg.checkpointer.model_type, self._base)
        if isinstance(self.tokenizer, ChatTokenizer):
            self.tokenizer.write_template(folder)


def _fits(planner: TrainingPlanner, tokens: int, budget: int) -> bool:
    """Whether micro-batches of ``tokens`` tokens fit if all layers are checkpointed."""
    memory = planner.memory(tokens)
    return memory.peak(range(memory.layers)) <= budget


def _frozen(decoder: Decoder) -> dict[str, nn.Parameter]:
    """Return the parameters that no training changes, by name."""
    parameters = decoder.named_parameters()
    return {plain(name): parameter for name, parameter in parameters if not parameter.requires_grad}


def _in_four_bits(decoder: Decoder) -> set[str]:
    """Return the names of the adapted layers whose weights are stored in 4 bits."""
    return {name for name, layer in adapters(decoder) if layer._quantize_base}


class CausalLM(nn.Module):
    """Decoder and objective in one module, so that FSDP2 gathers the output weights once for both."""

    def __init__(self, decoder: Decoder, objective: Objective) -> None:
        super().__init__()
        self.decoder = decoder
        self.objective = objective

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the objective summed over ``batch.targets``: a scalar in fp32."""
        beat()
        rest()
        columns = {**batch.columns, **self.objective.columns_of(batch)}
        hidden = self.decoder.hidden_states(batch).flatten(0, 1)[batch.index]
        tally = self.objective.tally
        if batch.routes is not None and tally is not None:
            tally.mean("routing_mismatch", *self.decoder.replay.differing())
        with unpacked_once():
            return self.objective(
                self.decoder.output, hidden, batch.targets, columns, batch.sequence
            )
