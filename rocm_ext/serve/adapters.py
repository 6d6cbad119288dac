"""The models of clients: adapters over one base model, and the model that samples.

Every client's model has its own decoder, whose frozen weights are the base model's. So each trains as if alone. A
sampler is the folder of an adapter: later steps do not change it. One decoder, besides the clients', samples; it takes
the values of the sampler that is asked.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tinker.types import AdamParams, LoraConfig

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import remove_folder
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.config.components import COMPONENT
from rocm_ext.config.model_folder import FROM_CHECKPOINT
from rocm_ext.machine.budget import readable
from rocm_ext.model.adapters.peft_files import base_model_name
from rocm_ext.model.adapters.peft_layers import names_of, trained_layers
from rocm_ext.model.lora import reset, trained
from rocm_ext.model.names import OUTPUT, last_part
from rocm_ext.serve.checkpoints import SAMPLERS, SNAPSHOTS, TRAINING, Checkpoints
from rocm_ext.serve.losses import loss_of
from rocm_ext.serve.protocol import Computation, computed, rows_of
from rocm_ext.training.model import Model

# the protocol has no alpha; "LoRA Without Regret" and other servers take 32 at every rank
ALPHA = 32
_MOST_RANK = 4096
_MLP = re.compile(r"(?i)mlp|feed_?forward|ffn|moe|expert|\.fc\d")
_VALUE = 4  # bytes of a trained number, in fp32
_TRAINED = 16  # with its gradient and AdamW's two means
_RANGES = {
    "learning_rate": (0.0, 1e6),
    "beta1": (0.0, 0.9999999),
    "beta2": (0.0, 0.9999999),
    "eps": (1e-30, 1.0),  # below, fp32 divides 0 by 0
    "weight_decay": (0.0, 1e6),
    "grad_clip_norm": (0.0, 1e30),
}


@dataclass
class Trained:
    """A client's model.

    Attributes:
        model: adapter and optimiser.
        lora: the client's settings of LoRA.
        saved: step of the last checkpoint.
        failed: why gradients are missing from the next step; None if all are there.
        snapshots: folders of samplers without a name, oldest first.
    """

    model: Model
    lora: LoraConfig
    saved: int = 0
    failed: str | None = None
    snapshots: list[Path] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Memory of the adapter in training."""
        return _TRAINED * sum(p.numel() for p in self.model.learner.adapter.values())


@dataclass(frozen=True)
class Sampler:
    """An adapter to sample with.

    Attributes:
        folder: its folder; None for the base model.
        version: tells it from an adapter that replaced it in this folder.
    """

    folder: Path | None = None
    version: str = ""


class Adapters:
    """All models over one base model. One thread calls it, but for :attr:`checkpoints`' reading.

    Args:
        cfg: config for sampling, with the keys of training, see :func:`rocm_ext.training.opening.config_for`.
        out: folder for runs.
        most: models in training at once.
        names: names of the base model that clients may use, besides its folder's and its name on the hub.

    Attributes:
        most: as given.
        folder: the base model's folder, with its tokenizer.
        names: all of its names.
        checkpoints: the runs in ``out``.
        vocabulary: number of its token ids.
        longest: most tokens of a datum.
        window: most tokens of a prompt with its answer.
        trained: models in training, by id.

    Raises:
        UserError: the config's model cannot be served.
    """

    def __init__(self, cfg: DictConfig, out: Path, most: int, names: Sequence[str]) -> None:
        if cfg.model[COMPONENT] != FROM_CHECKPOINT:
            raise UserError(
                f"serve needs model._component_={FROM_CHECKPOINT}; the config has {cfg.model[COMPONENT]}"
            )
        self.most = most
        self._cfg = _config_of(cfg, 1, None, cfg.seed)
        self._base = Model(self._cfg)
        learner = self._base.learner
        if learner.runtime.ranks.world > 1:
            raise UserError("serve runs in one process; start it without torchrun")
        # of a download or a GGUF file the folder is known only now
        self.folder = str(Path(self._base.cfg.tokenizer.path).parent.absolute())
        configured = str(cfg.checkpointer.checkpoint_dir)
        published = base_model_name(Path(self.folder))
        self.names = list(dict.fromkeys([*names, configured, published, self.folder]))
        self.checkpoints = Checkpoints(out, self.names[0], learner.base_fingerprint)
        self.vocabulary: int = learner.decoder.tok_embeddings.num_embeddings
        self.window = self._base.positions
        # the last target takes a position, too
        self.longest = min(cfg.tokenizer.get("max_seq_len") or 2048, self.window) - 1
        self.trained: dict[str, Trained] = {}
        self._sampling: tuple[Json, Model] | None = None  # samples adapters with these settings
        self._loaded = Sampler()  # the sampler whose values it has
        self._layers = Layers(learner.decoder, cfg.checkpointer.model_type)

    def check_name(self, name: str) -> None:
        """Check that a client means this base model."""
        if name not in self.names:
            raise UserError(
                f"base_model {name!r} is not served here; served: {', '.join(self.names)}"
            )

    # ---- models in training

    @property
    def full(self) -> bool:
        """Whether no more model can be made."""
        return len(self.trained) >= self.most

    def create(self, name: str, lora: LoraConfig, metadata: object = None) -> None:
        """Make a model with a fresh adapter.

        Raises:
            UserError: the settings are not served, or there is no room.
        """
        made = Trained(self._new(lora), lora)
        self._accept(name, made, metadata)

    def load(self, name: str, path: str, optimizer: bool, metadata: object = None) -> None:
        """Make a model from a checkpoint, with its optimiser or a fresh one; a UserError as :meth:`create`."""
        folder, notes = self.checkpoints.find(path, TRAINING)
        lora = LoraConfig(**notes["lora"])
        made = Trained(self._new(lora), lora)
        try:
            _restore(made, folder, optimizer)
        except BaseException:
            made.model.close()
            raise
        self._accept(name, made, metadata)

    def load_into(self, name: str, path: str, optimizer: bool) -> None:
        """Load a checkpoint into a model that exists already."""
        folder, _ = self.checkpoints.find(path, TRAINING)
        _restore(self.of(name), folder, optimizer)

    def of(self, name: str) -> Trained:
        """Return a model by its id."""
        if name not in self.trained:
            raise UserError(
                f"model {name} is not open here: the server was started again, or the model has ended. Make a "
                "training client from its last checkpoint, tinker://RUN/weights/NAME"
            )
        return self.trained[name]

    def unload(self, name: str) -> None:
        """Free a model's memory; its steps since the last checkpoint are saved before."""
        if name in self.trained:
            self._save_rest(name)
            self._discard(name)

    def close(self) -> None:
        """Save all models with new steps, and free everything.

        Raises:
            UserError: a model could not be saved; the others are.
        """
        problems = []
        for name in list(self.trained):
            try:
                self._save_rest(name)
            except UserError as error:
                problems.append(f"{name} is not saved: {error}")
            self._discard(name)
        self._free_sampling()
        self._base.close()
        if problems:
            raise UserError("; ".join(problems))

    def _save_rest(self, name: str) -> None:
        """Save steps that no checkpoint has."""
        made = self.trained[name]
        step = made.model.step
        if step > made.saved:
            made.model.forget_gradients()
            log.info("saved %s", self.save(name, f"unsaved_{step:06d}", True, {}))

    def _discard(self, name: str) -> None:
        self.trained.pop(name).model.close()
        self.checkpoints.forget(name)

    def _new(self, lora: LoraConfig) -> Model:
        """Return a model over the base weights with a fresh adapter, if there is room for one more.

        The plan leaves room for as many adapters of this size as may train at once, and for the one that samples, so
        that a model's micro-batches do not depend on which others there are.
        """
        if self.full:
            raise UserError(
                f"{self.most} models are in training, the most that this server takes; end one "
                "(ServiceClient.close, or unload_model), or start the server with a larger --adapters"
            )
        numbers = self._layers.numbers(lora)
        taken = numbers * (_TRAINED * (self.most - 1) + _VALUE)
        model = self._model(lora, taken)
        others = sum(other.bytes for other in self.trained.values())
        room = model.learner.planned_budget - model.learner.planned_peak + taken
        if others > room:
            model.close()
            raise UserError(
                f"an adapter of rank {lora.rank} takes {readable(_TRAINED * numbers)} with its optimiser, and the "
                f"others {readable(others)} of {readable(room)}; take a lower rank, or end another model"
            )
        return model

    def _model(self, lora: LoraConfig, taken: int) -> Model:
        seed = None if lora.seed is None else lora.seed % 2**32
        cfg = _config_of(self._cfg, lora.rank, self._layers.targets(lora), seed)
        model = Model(cfg, beside=self._base, taken=taken)
        model.quiet()
        return model

    def _accept(self, name: str, made: Trained, metadata: object) -> None:
        """Take a new model, once its run is described on the disk."""
        try:
            self.checkpoints.begin(name, made.lora.model_dump(), metadata)
        except BaseException:
            made.model.close()
            raise
        self.trained[name] = made

    # ---- calls of a model

    def compute(self, call: Computation) -> bytes:
        """Compute ``forward_backward`` or ``forward``; return the result in protobuf."""
        made = self.of(call.model)
        model = made.model
        try:
            loss = loss_of(call.loss, call.settings)
            rows = rows_of(call.data, loss.columns, self.vocabulary, self.longest)
            result = (model.forward_backward if call.gradients else model.forward)(rows, loss)
        except BaseException as error:
            if call.gradients:
                made.failed = f"forward_backward {call.number} failed ({error})"
            raise
        return computed(result.summed, result.logprobs)

    def step(self, name: str, settings: AdamParams) -> dict[str, float]:
        """Do ``optim_step``; return its metrics.

        Raises:
            UserError: gradients are missing because a call failed, none wait, or a setting is out of range.
        """
        made = self.of(name)
        if made.failed is not None:
            reason = made.failed
            made.failed = None
            made.model.forget_gradients()
            raise UserError(f"{reason}, so this step was not done and its gradients were dropped")
        _check_adam(settings)
        line = made.model.optim_step(
            settings.learning_rate,
            clip_grad_norm=settings.grad_clip_norm or math.inf,
            normalize=False,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        # no name that the cookbook gives its own measurements: it merges these into its metrics.jsonl, where a `step`
        # would replace the one by which it resumes
        metrics = {"optimizer_step": float(line["step"])}
        if math.isfinite(line["grad_norm"]):
            return metrics | {"grad_norm": line["grad_norm"]}
        return metrics | {"skipped": 1.0}  # fp16's gradients overflowed, and its loss scale shrinks

    def save(self, name: str, label: str | None, overwrite: bool, further: Json) -> str:
        """Write a checkpoint with the optimiser; return its path."""
        made = self.of(name)
        step = made.model.step
        label = label or f"step_{step:06d}"
        folder = self.checkpoints.new(name, TRAINING, label, overwrite)
        made.model.save(folder, self.checkpoints.notes(made.lora.model_dump(), step, further))
        made.saved = step
        return f"tinker://{name}/{TRAINING}/{label}"

    def save_sampler(self, name: str, label: str, further: Json) -> str:
        """Write the adapter for samplers under a name; return its path."""
        made = self.of(name)
        self._write_sampler(made, self.checkpoints.new(name, SAMPLERS, label), further)
        return f"tinker://{name}/{SAMPLERS}/{label}"

    def snapshot(self, name: str, further: Json) -> Sampler:
        """Write the adapter for a sampler without a name; the oldest goes once there are many."""
        made = self.of(name)
        folder = self.checkpoints.new_snapshot(name)
        self._write_sampler(made, folder, further)
        made.snapshots.append(folder)
        if len(made.snapshots) > SNAPSHOTS:
            remove_folder(made.snapshots.pop(0))
        return self.sampler_in(folder)

    def _write_sampler(self, made: Trained, folder: Path, further: Json) -> None:
        notes = self.checkpoints.notes(made.lora.model_dump(), made.model.step, further)
        self.checkpoints.write_sampler(folder, notes, made.model.learner.write_adapter)

    # ---- samplers

    def sampler_at(self, path: str) -> Sampler:
        """Return the sampler of a checkpoint of either kind."""
        folder, _ = self.checkpoints.find(path)
        return self.sampler_in(folder)

    def sampler_in(self, folder: Path) -> Sampler:
        """Return the sampler with the adapter in a folder, as it is now."""
        notes = self.checkpoints.read_notes(folder)
        assert notes is not None
        return Sampler(folder, notes["version"])

    def ready(self, sampler: Sampler) -> Model:
        """Return a model that has the sampler's adapter."""
        if sampler.folder is None:
            return self._without_adapter()
        notes = self.checkpoints.read_notes(sampler.folder)
        if notes is None or notes["version"] != sampler.version:
            raise UserError(
                "this sampler's weights were deleted or overwritten; of samplers without a name the newest "
                f"{SNAPSHOTS} of each model are kept: give a name to those that you need longer, "
                "save_weights_for_sampler(name)"
            )
        lora = notes["lora"]
        shape = {key: value for key, value in lora.items() if key != "seed"}
        if self._sampling is None or self._sampling[0] != shape:
            self._free_sampling()
            self._base.release_sampler()
            self._sampling = shape, self._model(LoraConfig(**{**lora, "seed": 0}), 0)
        model = self._sampling[1]
        if self._loaded != sampler:
            self._loaded = Sampler()
            state = model.learner.read_adapter(sampler.folder)
            model.learner.load_adapter(state, str(sampler.folder))
            self._loaded = sampler
        return model

    def _without_adapter(self) -> Model:
        """Return a model that computes as the base model: the one that samples, to keep its memory, if there is one."""
        if self._sampling is None:
            return self._base
        _, model = self._sampling
        self._loaded = Sampler()
        for _, layer in trained(model.learner.decoder):
            reset(layer)
        return model

    def _free_sampling(self) -> None:
        if self._sampling is not None:
            self._sampling[1].close()
        self._sampling = None
        self._loaded = Sampler()


class Layers:
    """The layers of a base model that adapters may train.

    Args:
        decoder: the base model, with LoRA of rank 1 on all linear layers of attention and MLP.
        model_type: torchtune's name of the model's type.
    """

    def __init__(self, decoder: Any, model_type: str) -> None:
        layers = trained_layers(decoder, names_of(decoder, model_type))
        self._numbers = {}  # trained numbers at rank 1, by PEFT's name of the layer
        for layer in layers:
            parameters = (layer.layer.get_parameter(key) for key in layer.layer.adapter_params())
            self._numbers[layer.module] = sum(parameter.numel() for parameter in parameters)
        of_names = {name for name, _ in decoder.named_parameters()}
        self._has_output = not of_names.isdisjoint({f"{OUTPUT}.weight", "output.weight"})
        self._output_numbers = sum(decoder.tok_embeddings.weight.shape)

    def targets(self, lora: LoraConfig) -> list[str] | None:
        """Return the layers that get LoRA, by PEFT's names; None for all of attention and MLP.

        Raises:
            UserError: the rank is out of range, or no layer gets LoRA.
        """
        if not 1 <= lora.rank <= _MOST_RANK:
            raise UserError(f"lora_config.rank is {lora.rank}; expected 1 to {_MOST_RANK}")
        output = lora.train_unembed and self._has_output
        if lora.train_unembed and not self._has_output:
            log.info("train_unembed: the output layer is the embeddings, and gets no LoRA")
        if lora.train_attn and lora.train_mlp and not output:
            return None
        targets = self._short(self._chosen(lora))
        if output:
            targets.append(OUTPUT)
        if not targets:
            raise UserError(
                "lora_config trains no layer of this model, whose output layer is its embeddings; set train_attn or "
                "train_mlp"
            )
        return targets

    def numbers(self, lora: LoraConfig) -> int:
        """Return how many numbers an adapter trains."""
        at_rank_1 = sum(self._numbers[module] for module in self._chosen(lora))
        if lora.train_unembed and self._has_output:
            at_rank_1 += self._output_numbers
        return lora.rank * at_rank_1

    def _chosen(self, lora: LoraConfig) -> list[str]:
        chosen = []
        for module in self._numbers:
            is_mlp = _MLP.search(module) is not None
            if lora.train_mlp if is_mlp else lora.train_attn:
                chosen.append(module)
        return chosen

    def _short(self, modules: Sequence[str]) -> list[str]:
        """Return the ends of the layers' names, where all layers with this end are chosen; else the whole names."""
        every = Counter(map(last_part, self._numbers))
        chosen = Counter(map(last_part, modules))
        names = set()
        for module in modules:
            end = last_part(module)
            names.add(end if chosen[end] == every[end] else module)
        return sorted(names)


def _restore(made: Trained, folder: Path, optimizer: bool) -> None:
    """Load a checkpoint into a model, with its optimiser or a fresh one."""
    model = made.model
    if optimizer:
        model.load(folder)
    else:
        model.learner.load_adapter(model.learner.read_adapter(folder), str(folder))
        model.renew_optimizer()
    made.saved = model.step
    made.failed = None


def _check_adam(settings: AdamParams) -> None:
    """Refuse settings with which AdamW cannot do a step."""
    for name, (least, most) in _RANGES.items():
        value = getattr(settings, name)
        if not least <= value <= most:
            raise UserError(
                f"adam_params.{name} is {value:g}; expected a number from {least:g} to {most:g}"
            )


def _config_of(
    cfg: DictConfig, rank: int, targets: Sequence[str] | None, seed: int | None
) -> DictConfig:
    """Return the config of a model over the base model of ``cfg``, with what the protocol decides."""
    made: Any = OmegaConf.to_container(cfg)
    kept = ("checkpoint_dir", "quantize_base", "trust_remote_code")
    model: Mapping[str, Any] = made["model"]
    made["model"] = {
        COMPONENT: FROM_CHECKPOINT,
        **{key: model[key] for key in kept if key in model},
        "lora_rank": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": None if targets is None else list(targets),
    }
    made |= {
        "seed": seed,
        "use_rslora": False,
        "loraplus_lr_ratio": None,
        "lr_scheduler": None,
        "optimizer": {COMPONENT: "torch.optim.AdamW", "lr": 1e-4, "fused": True},
    }
    made["checkpointer"]["adapter_checkpoint"] = None
    return OmegaConf.create(made)
