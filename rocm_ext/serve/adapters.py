"""The models of clients: adapters over one base model, their checkpoints, and the samplers made of them.

Every client's model has its own decoder, whose frozen weights are the base model's. So each trains as if alone. A
sampler is the folder of an adapter: later steps do not change it. One decoder, besides the clients', samples; it takes
the values of the sampler that is asked.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tinker.types import AdamParams, LoraConfig
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import read_json, replace_folder
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.config.components import COMPONENT
from rocm_ext.config.model_folder import FROM_CHECKPOINT
from rocm_ext.data.rows import Rows
from rocm_ext.losses import Objective
from rocm_ext.machine.budget import readable
from rocm_ext.model.adapters.peft_files import base_model_name
from rocm_ext.model.adapters.peft_layers import names_of, trained_layers
from rocm_ext.model.names import OUTPUT, last_part
from rocm_ext.serve.losses import loss_of
from rocm_ext.serve.protocol import Computation, TopK, computed, rows_of
from rocm_ext.train.scoring import compute, score
from rocm_ext.training.model import Model

ALPHA = (
    32  # the protocol has no alpha; "LoRA Without Regret" and other servers take 32 at every rank
)
MOST_RANK = 4096
NOTES = "checkpoint.json"  # in a checkpoint's folder
_SNAPSHOTS = 16  # samplers without a name that are kept, by model
_LABEL = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(_LABEL)
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")
_PATH = re.compile(rf"tinker://({_RUN.pattern})/(weights|sampler_weights)/({_LABEL})")
_MLP = re.compile(r"\.(mlp|feed_forward|block_sparse_moe|moe|experts|ffn)\.")
_BYTES = 16  # of a trained number: value, gradient and AdamW's two means, all fp32


@dataclass
class Trained:
    """A client's model.

    Attributes:
        model: adapter and optimiser.
        lora: the client's settings of LoRA.
        session: id of the client's session.
        saved: step of the last checkpoint.
        failed: why gradients are missing from the next step; None if all are there.
        snapshots: folders of samplers without a name, oldest first.
    """

    model: Model
    lora: LoraConfig
    session: str
    saved: int = 0
    failed: str | None = None
    snapshots: list[Path] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Memory of the adapter in training."""
        return _BYTES * sum(p.numel() for p in self.model.learner.adapter.values())


class Adapters:
    """All models over one base model. One thread calls it.

    Args:
        cfg: config for sampling, with the keys of training, see :func:`rocm_ext.training.opening.config_for`.
        out: folder for runs.
        most: models in training at once.
        names: names of the base model that clients may use, besides its folder's and its name on the hub.

    Attributes:
        out, most: as given.
        folder: the base model's folder, with its tokenizer.
        names: all of its names.
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
        self.out = out
        self.most = most
        for left in out.glob("*/snapshots"):  # of a killed server; nobody knows their names
            shutil.rmtree(left, ignore_errors=True)
        self._cfg = _config_of(cfg, 1, None, cfg.seed)
        self._base = Model(self._cfg)
        # of a download or a GGUF file the folder is known only now
        self.folder = str(Path(self._base.cfg.tokenizer.path).parent.absolute())
        configured = str(cfg.checkpointer.checkpoint_dir)
        published = base_model_name(Path(self.folder))
        self.names = list(dict.fromkeys([*names, configured, published, self.folder]))
        learner = self._base.learner
        if learner.runtime.ranks.world > 1:
            raise UserError("serve runs in one process; start it without torchrun")
        self.vocabulary: int = learner.decoder.tok_embeddings.num_embeddings
        self.longest: int = (cfg.tokenizer.get("max_seq_len") or 2048) - 1
        self.window = int(self._base.positions)
        self.trained: dict[str, Trained] = {}
        self._sampling: tuple[Json, Model] | None = None  # decoder for samplers with these settings
        self._loaded: Path | None = None  # the sampler whose values it has
        layers = trained_layers(
            learner.decoder, names_of(learner.decoder, cfg.checkpointer.model_type)
        )
        modules = [layer.module for layer in layers]
        self._mlp = sorted({last_part(name) for name in modules if _MLP.search(name)})
        self._attention = sorted({last_part(name) for name in modules} - {*self._mlp})
        parameters = {name for name, _ in learner.decoder.named_parameters()}
        self.has_output = not parameters.isdisjoint({f"{OUTPUT}.weight", "output.weight"})

    def check_name(self, name: str) -> None:
        """Check that a client means this base model."""
        if name not in self.names:
            raise UserError(
                f"base_model {name!r} is not served here; served: {', '.join(self.names)}"
            )

    # ---- models in training

    def create(self, name: str, session: str, lora: LoraConfig, metadata: Any = None) -> None:
        """Make a model with a fresh adapter.

        Raises:
            UserError: the settings are not served, or there is no room.
        """
        self._open(name, session, lora)
        self._write_run(name, metadata)

    def load(
        self, name: str, session: str, path: str, optimizer: bool, metadata: Any = None
    ) -> None:
        """Make a model from a checkpoint, with its optimiser or a fresh one; a UserError as :meth:`create`."""
        folder, notes = self._checkpoint(path, "weights")
        self._open(name, session, LoraConfig(**notes["lora"]))
        trained = self.trained[name]
        try:
            self._restore(trained, folder, optimizer)
        except BaseException:
            self.unload(name)
            raise
        self._write_run(name, metadata)

    def load_into(self, name: str, path: str, optimizer: bool) -> None:
        """Load a checkpoint into a model that exists already."""
        folder, _ = self._checkpoint(path, "weights")
        self._restore(self.of(name), folder, optimizer)

    def of(self, name: str) -> Trained:
        """Return a model by its id."""
        if name not in self.trained:
            raise UserError(
                f"model {name} is not open here: the server was started again, or the model was unloaded. Make a "
                "training client from its last checkpoint, tinker://RUN/weights/NAME"
            )
        return self.trained[name]

    @property
    def full(self) -> bool:
        """Whether no more model can be made."""
        return len(self.trained) >= self.most

    def unload(self, name: str) -> None:
        """Free a model's memory; its steps since the last checkpoint are saved before."""
        trained = self.trained.get(name)
        if trained is None:
            return
        step = trained.model.step
        if step > trained.saved:
            trained.model.forget_gradients()
            log.info("saved %s", self.save(name, f"unsaved_{step:06d}", True, {}))
        del self.trained[name]
        trained.model.close()
        shutil.rmtree(self._folder(name) / "snapshots", ignore_errors=True)

    def close(self) -> None:
        """Save all models with new steps, and free everything."""
        for name in list(self.trained):
            self.unload(name)
        self._free_sampling()
        self._base.close()

    def _open(self, name: str, session: str, lora: LoraConfig) -> None:
        if self.full:
            raise UserError(
                f"{self.most} models are in training, the most that this server takes; end one "
                "(ServiceClient.close, or unload_model), or start the server with a larger --adapters"
            )
        self.trained[name] = Trained(self._model(lora), lora, session)
        learner = self.trained[name].model.learner
        own = self.trained[name].bytes
        others = sum(trained.bytes for trained in self.trained.values()) - own
        room = learner.planned_budget - learner.planned_peak + (self.most - 1) * own
        if others > room:
            self.trained.pop(name).model.close()
            raise UserError(
                f"an adapter of rank {lora.rank} takes {readable(own)} with its optimiser, and the others "
                f"{readable(others)} of {readable(room)}; take a lower rank, or end another model"
            )

    def _model(self, lora: LoraConfig) -> Model:
        """Return a model over the base weights, with a fresh adapter."""
        cfg = _config_of(self._cfg, lora.rank, self._targets(lora), lora.seed)
        trained_numbers = self._numbers(lora)
        model = Model(cfg, beside=self._base, taken=(self.most - 1) * _BYTES * trained_numbers)
        model.quiet()
        return model

    def _numbers(self, lora: LoraConfig) -> int:
        """Return how many numbers an adapter trains, from the base model's own adapter, of rank 1."""
        of_rank_1 = sum(p.numel() for p in self._base.learner.adapter.values())
        return lora.rank * of_rank_1

    def _targets(self, lora: LoraConfig) -> list[str] | None:
        """Return the layers that get LoRA; None for all of attention and MLP."""
        if not 1 <= lora.rank <= MOST_RANK:
            raise UserError(f"lora_config.rank is {lora.rank}; expected 1 to {MOST_RANK}")
        output = lora.train_unembed and self.has_output
        if lora.train_unembed and not self.has_output:
            log.info("train_unembed: the output layer is the embeddings, and gets no LoRA")
        if lora.train_attn and lora.train_mlp and not output:
            return None
        targets = []
        if lora.train_attn:
            targets += self._attention
        if lora.train_mlp:
            targets += self._mlp
        if output:
            targets.append(OUTPUT)
        if not targets:
            raise UserError(
                "lora_config trains no layer of this model; set train_attn or train_mlp (its output layer is its "
                "embeddings)"
            )
        return targets

    def _restore(self, trained: Trained, folder: Path, optimizer: bool) -> None:
        model = trained.model
        if optimizer:
            model.load(folder)
        else:
            state = model.learner.read_adapter(folder)
            model.learner.load_adapter(state, str(folder))
        trained.saved = model.step

    # ---- calls of a model

    def compute(self, call: Computation) -> bytes:
        """Compute ``forward_backward`` or ``forward``; return the result in protobuf."""
        trained = self.of(call.model)
        try:
            loss = loss_of(call.loss, call.settings)
            rows, _ = rows_of(call.data, loss.columns, self.vocabulary, self.longest)
            model = trained.model
            result = (model.forward_backward if call.gradients else model.forward)(rows, loss)
        except BaseException as error:
            if call.gradients:
                trained.model.forget_gradients()
                trained.failed = f"forward_backward {call.number} failed ({error})"
            raise
        return computed(result.summed, result.logprobs, {})

    def step(self, name: str, settings: AdamParams) -> dict[str, float]:
        """Do ``optim_step``; return its metrics.

        Raises:
            UserError: gradients are missing because a call failed, none wait, or a setting is out of range.
        """
        trained = self.of(name)
        if trained.failed is not None:
            reason = trained.failed
            trained.failed = None
            raise UserError(f"{reason}, so this step was not done and its gradients were dropped")
        _check_adam(settings)
        line = trained.model.optim_step(
            settings.learning_rate,
            clip_grad_norm=settings.grad_clip_norm or float("inf"),
            normalize=False,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        # no name that the cookbook gives its own measurements: it merges these into its metrics.jsonl, where a `step`
        # would replace the one by which it resumes
        return {"grad_norm": line["grad_norm"], "optimizer_step": float(line["step"])}

    # ---- checkpoints

    def save(self, name: str, label: str | None, overwrite: bool, notes: Json) -> str:
        """Write a checkpoint with the optimiser; return its path."""
        trained = self.of(name)
        label = label or f"step_{trained.model.step:06d}"
        folder = self._new_folder(name, "weights", label, overwrite)
        trained.model.save(folder, {NOTES: self._notes(trained, notes)})
        trained.saved = trained.model.step
        return f"tinker://{name}/weights/{label}"

    def save_sampler(self, name: str, label: str | None, notes: Json) -> tuple[str, Path]:
        """Write the adapter for samplers, under a name or for the model's lifetime; return its path and folder."""
        trained = self.of(name)
        if label is not None:
            folder = self._new_folder(name, "sampler_weights", label, overwrite=False)
        else:
            label = f"{time.time_ns():x}"
            folder = self._folder(name) / "snapshots" / label
        with replace_folder(folder) as new:
            (new / NOTES).write_text(self._notes(trained, notes))
            trained.model.learner.write_adapter(new)
        if folder.parent.name == "snapshots":
            trained.snapshots.append(folder)
            for old in trained.snapshots[:-_SNAPSHOTS]:
                shutil.rmtree(old, ignore_errors=True)
            del trained.snapshots[:-_SNAPSHOTS]
        return f"tinker://{name}/sampler_weights/{label}", folder

    def notes(self, path: str) -> Json:
        """Return what a checkpoint says about itself."""
        return self._checkpoint(path)[1]

    def sampler_folder(self, path: str) -> Path:
        """Return the adapter's folder of a checkpoint of either kind."""
        return self._checkpoint(path)[0]

    def runs(self) -> Iterator[tuple[str, Json]]:
        """Yield the runs of the output folder with their descriptions, the newest first."""
        for file in sorted(self.out.glob("*/run.json"), reverse=True):
            described = read_json(file)
            if described is not None:
                yield described["run"], described

    def checkpoints(self, run: str) -> Iterator[tuple[str, Path, Json]]:
        """Yield the checkpoints of a run: kind and name, folder, and notes."""
        if _RUN.fullmatch(run) is None:
            return
        for kind in ("weights", "sampler_weights"):
            for file in sorted((self._folder(run) / kind).glob(f"*/{NOTES}")):
                folder = file.parent
                notes = read_json(file)
                if notes is not None and not folder.name.startswith("."):
                    yield f"{kind}/{folder.name}", folder, notes

    def _folder(self, name: str) -> Path:
        """Return the folder of a model's run; ids have colons, which some file systems do not take."""
        return self.out / name.replace(":", "-")

    def _write_run(self, name: str, metadata: Any) -> None:
        trained = self.trained[name]
        described = {
            "run": name,
            "base_model": self.names[0],
            "lora": trained.lora.model_dump(),
            "session": trained.session,
            "created": time.time(),
            "user_metadata": metadata,
        }
        with replace_folder(self._folder(name)) as folder:
            (folder / "run.json").write_text(json.dumps(described, indent=1))

    def _notes(self, trained: Trained, further: Json) -> str:
        notes = {
            "base_model": self.names[0],
            "base_fingerprint": self._base.learner.base_fingerprint,
            "lora": trained.lora.model_dump(),
            "step": trained.model.step,
            "created": time.time(),
        }
        return json.dumps(notes | further, indent=1)

    def _new_folder(self, name: str, kind: str, label: str, overwrite: bool) -> Path:
        if _NAME.fullmatch(label) is None:
            raise UserError(
                f"checkpoint name {label[:40]!r} must be letters, digits, '.', '_' and '-', at most 128"
            )
        folder = self._folder(name) / kind / label
        if folder.exists() and not overwrite:
            raise UserError(
                f"tinker://{name}/{kind}/{label} exists; take another name, or overwrite=True"
            )
        return folder

    def _checkpoint(self, path: str, kind: str | None = None) -> tuple[Path, Json]:
        """Return folder and notes of a checkpoint of this base model."""
        match = _PATH.fullmatch(path)
        if match is None:
            raise UserError(f"{path!r} is no checkpoint; expected tinker://RUN/weights/NAME")
        folder = self._folder(match[1]) / match[2] / match[3]
        notes = read_json(folder / NOTES)
        if notes is None:
            raise UserError(f"there is no checkpoint {path} in {self.out}")
        if kind is not None and match[2] != kind:
            raise UserError(
                f"{path} has no optimiser to train on; name one of tinker://{match[1]}/weights"
            )
        if notes["base_fingerprint"] != self._base.learner.base_fingerprint:
            raise UserError(f"{path} belongs to another base model, {notes['base_model']}")
        return folder, notes

    # ---- samplers

    def sampler(self, folder: Path | None) -> Model:
        """Return a model that has the adapter in ``folder``; None for the base model."""
        if folder is None:
            self._free_sampling()
            return self._base
        notes = read_json(folder / NOTES)
        if notes is None:
            raise UserError(
                f"this sampler is gone: the server keeps {_SNAPSHOTS} samplers without a name for each model. Give "
                "those that you need longer a name, save_weights_for_sampler(name)"
            )
        lora = notes["lora"]
        shape = {key: value for key, value in lora.items() if key != "seed"}
        if self._sampling is None or self._sampling[0] != shape:
            self._free_sampling()
            self._base.release_sampler()
            self._sampling = shape, self._model(LoraConfig(**{**lora, "seed": 0}))
        model = self._sampling[1]
        if self._loaded != folder:
            self._loaded = None
            model.learner.load_adapter(model.learner.read_adapter(folder), str(folder))
            self._loaded = folder
        return model

    def _free_sampling(self) -> None:
        if self._sampling is not None:
            self._sampling[1].close()
        self._sampling = self._loaded = None


def prompt_logprobs(model: Model, tokens: Sequence[int], last: int | None) -> np.ndarray:
    """Return the log-probs of a prompt's tokens, [n] fp32: NaN for the first, and before the ``last`` ones."""
    scored = np.full(len(tokens), np.nan, np.float32)
    rows = _row(tokens, len(tokens) if last is None else last)
    if rows is not None:
        (values,) = score(model.learner, rows)
        scored[len(tokens) - len(values) :] = values
    return scored


def most_probable(model: Model, tokens: Sequence[int], last: int, k: int) -> TopK:
    """Return the k most probable tokens at the ``last`` positions of ``tokens``, with log-probs, [last, k]."""
    ids = np.zeros((last, k), np.int32)
    logprobs = np.full((last, k), -99999.0, np.float32)  # the protocol's mark of a position without
    rows = _row(tokens, last)
    if rows is not None:
        objective = _MostProbable(k)
        compute(model.learner, rows, objective)
        found = torch.cat([values for values, _ in objective.found]).cpu().numpy()
        logprobs[last - len(found) :] = found
        ids[last - len(found) :] = torch.cat([names for _, names in objective.found]).cpu().numpy()
    return TopK(ids, logprobs)


def _row(tokens: Sequence[int], last: int) -> Rows | None:
    """Return a row whose labels are the ``last`` tokens but the first of all; None if there is none."""
    ids = np.asarray(tokens, np.int32)
    labels = ids.copy()
    labels[: max(1, len(ids) - last)] = -100
    if (labels == -100).all():
        return None
    return Rows([ids], [labels], [(len(ids),)], {"rows": 1}, {})


class _MostProbable(Objective):
    """Records the most probable tokens of every label's position; its value is 0."""

    over_vocabulary = True

    def __init__(self, k: int) -> None:
        super().__init__()
        self._k = k
        self.found: list[tuple[Tensor, Tensor]] = []

    def terms(self, nll: Tensor, columns: Any, sequence: Tensor) -> Any:
        raise NotImplementedError

    def compare(self, logits: Tensor, other: Any, gradient: bool) -> Any:
        """Record the tokens of a chunk."""
        best = logits.float().log_softmax(dim=-1).topk(min(self._k, logits.shape[-1]))
        self.found.append((best.values, best.indices))
        return torch.zeros(len(logits), device=logits.device), None


def _check_adam(settings: AdamParams) -> None:
    """Refuse settings with which AdamW cannot do a step."""
    ranges = {
        "beta1": (0.0, 1.0),
        "beta2": (0.0, 1.0),
        "eps": (0.0, 1.0),
        "weight_decay": (0.0, 1e6),
    }
    ranges |= {"learning_rate": (0.0, 1e6), "grad_clip_norm": (0.0, 1e30)}
    for name, (least, most) in ranges.items():
        value = getattr(settings, name)
        if not least <= value <= most or (name.startswith("beta") and value == 1):
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
