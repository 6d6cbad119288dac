"""A training of one's own on :class:`Training`: rows come and go, and a step takes several updates."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.data.batches import StepLoader, Steps
from rocm_ext.data.rows import Rows
from rocm_ext.plan import workload
from rocm_ext.train.checkpoint import read_state
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Runtime
from rocm_ext.train.loop import Training
from rocm_ext.train.output_dir import OutputDir
from tests.kit.tiny import metrics, run_config, write_model, write_yaml

UPDATES = 2  # of a step


class Drawn(Training):
    """Trains on new rows at each step; some steps have none, and their score is the step's number modulo 3."""

    def __init__(self, learner, cfg, folder, flat=()):
        super().__init__(learner, cfg, folder)
        self.flat, self.seen = flat, 0
        self.begin(cfg.epochs * UPDATES)

    @property
    def updates(self):
        return self.step * UPDATES

    def identity(self):
        return {**super().identity(), "updates": UPDATES}

    def extra_state(self):
        return {"seen": self.seen}

    def load_extra_state(self, state):
        self.seen = state["seen"]

    def summary(self):
        return {"best_step": self.best["step"], **super().summary()}

    def train(self, until=None):
        if not self.step:
            self.save_checkpoint()
        self.learner.model.train()
        with self.interrupt:
            while self.step < (until or self.cfg.epochs):
                stats = self.train_on(drawn(self.step)) if self.step not in self.flat else []
                if not stats:
                    self.skip_updates(UPDATES)
                self.step += 1
                score = self.step % 3
                if self.best is None or score > self.best["score"]:
                    self.best = {
                        "score": score,
                        "step": self.step,
                        "adapter": self.learner.adapter_state(),
                    }
                self.write_metrics(
                    True, loss=[each.loss for each in stats], lr=[each.lr for each in stats]
                )
                self.save_checkpoint()

    def train_on(self, rows):
        loader = StepLoader(
            rows, Steps(len(rows), len(rows) // UPDATES, shuffle=False), self.learner.layout
        )
        stats = [self.train_step(update) for update in loader.range(0, UPDATES)]
        self.seen += len(rows)
        return stats


def drawn(step: int) -> Rows:
    rng = np.random.default_rng(step)
    tokens = [rng.integers(1, 300, int(n)).astype(np.int32) for n in rng.integers(3, 30, 8)]
    return Rows(tokens, tokens, [(len(ids),) for ids in tokens], {"rows": 8})


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("training") / "base")


@pytest.fixture
def start(base, tmp_path):
    """Make a trainer; ``changes`` go into the config."""

    def start(out: str, flat=(), **changes) -> Drawn:
        cfg = run_config(
            base, tmp_path / "none", tmp_path / out, epochs=4, keep_last_n_checkpoints=9, tokens_per_micro_batch=64,
            lr_scheduler={"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
                          "num_warmup_steps": 2},
        ) | changes  # fmt: skip
        cfg["model"]["lora_dropout"] = 0.1
        cfg = config.load("lora_finetune_rocm", str(write_yaml(tmp_path / "run.yaml", cfg)))
        runtime = Runtime.open(cfg)
        folder = OutputDir.open(cfg, runtime.ranks)
        learner = Learner(cfg, runtime, None)
        Drawn.try_out(cfg, learner, 8)
        learner.setup(workload.describe(drawn(0), 8, "drawn"))
        return Drawn(learner, cfg, folder, flat)

    return start


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("stop", [1, 0, 2])
def test_a_resumed_one_equals_an_undisturbed_one(start, tmp_path, stop):
    whole = start("whole")
    whole.train()
    whole.write_outputs()
    assert [path.name for path in whole.folder.checkpoints.steps()] == [
        f"step_{step:08d}" for step in range(5)
    ]
    part = start("part")
    part.train(until=stop) if stop else part.save_checkpoint()
    part = start("part", resume_from_checkpoint=True)
    assert part.step == stop
    assert part.seen == 8 * stop
    part.train()
    part.write_outputs()
    assert metrics(tmp_path / "part") == metrics(tmp_path / "whole")
    assert metrics(tmp_path / "part", "lr") == metrics(tmp_path / "whole", "lr")
    assert [
        step for step, rates in enumerate(metrics(tmp_path / "whole", "lr")) if 1e-3 in rates
    ] == [1]
    state = read_state(tmp_path / "whole" / "checkpoints" / "step_00000002")
    for trainer in (whole, part):
        assert trainer.best["step"] == 2
        for name, value in trainer.learner.adapter_state().items():  # the outputs are the best ones
            assert torch.equal(value, state["adapter"][name])


def test_fp16_is_scaled_backward_alone_and_resumes_its_scale(start):
    norms = []
    for dtype in ("fp32", "fp16"):
        trainer = start(dtype, dtype=dtype)
        norms.append(trainer.train_on(drawn(0))[0].grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=0.01)
    trainer.scaler.update(128.0)
    trainer.save_checkpoint()
    assert start("fp16", dtype="fp16", resume_from_checkpoint=True).scaler.get_scale() == 128


def test_a_schedule_of_another_length_goes_on_at_its_own_rate(start, tmp_path):
    part, long = start("part"), start("long", epochs=8)
    for trainer in (part, long):
        trainer.train(until=2)
    moments = part.optimizer.state_dict()["state"]
    part = start("part", epochs=8, resume_from_checkpoint=True)
    assert part.optimizer.param_groups[0]["lr"] == long.optimizer.param_groups[0]["lr"]
    for key, state in part.optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], moments[key]["exp_avg"])
    part.train(until=3)
    long.train(until=3)
    assert metrics(tmp_path / "part", "lr")[2] == metrics(tmp_path / "long", "lr")[2]


def test_a_step_without_rows_takes_its_place_in_the_schedule(start, tmp_path, recwarn):
    full, gaps = start("full"), start("gaps", flat=(0, 2))
    full.train()
    gaps.train()
    rates = metrics(tmp_path / "full", "lr")
    assert metrics(tmp_path / "gaps", "lr") == [[], rates[1], [], rates[3]]
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_a_fresh_run_loses_the_lines_of_the_replaced_one(start, tmp_path, caplog):
    with caplog.at_level("INFO", "rocm_ext"):
        first = start("out")
    group = first.optimizer.param_groups[0]
    assert group["lr"] < group["initial_lr"], "in the warm-up"
    (said,) = (text for text in caplog.messages if text.startswith("optimizer: "))
    assert (
        f"AdamW, lr {group['initial_lr']:g}, betas {group['betas']}, eps 1e-08, weight_decay"
        in said
    )
    assert "tensor" not in said
    assert "amsgrad" not in said
    first.write_metrics(True, eval={})
    assert metrics(tmp_path / "out", "step") == [0]
    start("out", overwrite_output_dir=True)
    assert metrics(tmp_path / "out", "step") == []


def test_a_loss_that_is_not_finite_names_the_rows_of_its_update(start, monkeypatch):
    trainer, divisors = start("out"), iter([100.0, float("nan")])
    monkeypatch.setattr(trainer.learner.objective, "denominator", lambda *counts: next(divisors))
    with pytest.raises(
        UserError,
        match=r"step 1: loss nan, .*Rows of this step: 4, 5, 6, 7\. Lower the learning rate",
    ):
        trainer.train_on(drawn(0))
