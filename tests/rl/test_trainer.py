"""The updates of a step of GRPO."""

import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf
from torch import nn

from rocm_ext.data.batches import Layout
from rocm_ext.data.rows import Rows
from rocm_ext.rl.trainer import PolicyTrainer
from rocm_ext.train.loop import StepStats


class Trainer(PolicyTrainer):
    """Records updates instead of doing them."""

    def __init__(self, **changes):
        cfg = {"seed": 0, "updates_per_step": 1, "groups_per_update": None, "num_workers": 0, "pin_memory": False}
        self.cfg, self.step, self.seen, self.skipped = OmegaConf.create(cfg | changes), 0, [], 0
        self.lines, self.answers = [], []
        self.processes = set(multiprocessing.active_children())
        self.learner = SimpleNamespace(model=nn.Module(), layout=Layout(0, 1, 64, True, pad_id=0))

    def train_step(self, update):
        assert set(multiprocessing.active_children()) <= self.processes
        self.seen.append(set(update.rows))
        self.answers.append(update.sequences)
        return StepStats(0.0, 0.0, 1e-4, 1, 0.0, False, {"token_gradient": 0.25, "ratio_max": float(len(self.seen))})

    def skip_updates(self, count):
        self.skipped += count

    def train(self, groups, each=2, **counts):
        names = [f"prompt {i // each}" for i in range(groups * each)]
        tokens = [np.arange(3)] * len(names)
        return self.train_on(Rows(tokens, tokens, [(3,)] * len(names), counts), names)


@pytest.mark.parametrize("groups", [1, 3, 4, 5, 7, 8, 11, 16])
def test_an_update_keeps_its_groups_as_others_go_flat(groups):
    # train_step holds that no process is forked for rows in memory: threads of a process with a GPU may hold locks
    trainer = Trainer(prompts_per_step=16, groups_per_update=4, updates_per_step=2, num_workers=4)
    trainer.train(groups)
    assert len(trainer.seen) == 2 * max(1, groups // 4)
    assert all(len(rows) % 2 == 0 and len(rows) // 2 in range(min(4, groups), 8) for rows in trainer.seen)
    assert max(map(len, trainer.seen)) - min(map(len, trainer.seen)) <= 2, "spread evenly"
    for rows in (trainer.seen[: len(trainer.seen) // 2], trainer.seen[len(trainer.seen) // 2 :]):
        assert sorted(row for update in rows for row in update) == list(range(groups * 2)), "a pass"
    assert len(trainer.seen) + trainer.skipped == 8, "the schedule advances by the full number"
    trainer = Trainer(prompts_per_step=16)  # without a number of groups, an update has all
    trainer.train(groups)
    assert trainer.seen == [set(range(2 * groups))]


def test_an_update_says_what_it_learns_from():
    trainer = Trainer(prompts_per_step=16, groups_per_update=4)
    trainer.lines = [{"lr_sum": 0.5}, {"eval": {}}, {"updates": 0}]
    found = trainer.train(8)  # two updates, of eight answers with two labels each
    assert found["informative_answers"] == 8
    assert found["effective_tokens"] == 0.25 * 16
    assert found["lr_sum"] == pytest.approx(0.5 + 2e-4)
    assert found["ratio_max"] == 2
    assert "token_gradient" not in found


@pytest.mark.parametrize(
    ("counts", "answers"), [({"answers": 40, "trained": 16}, 20), ({"answers": 8, "trained": 8}, 8), ({}, 8)]
)
def test_a_mean_over_answers_counts_those_that_are_not_trained_on(counts, answers):
    """Two updates of 8 sequences each: of 40 answers, of 8 of two sequences each, of all that there are."""
    trainer = Trainer(prompts_per_step=16, groups_per_update=4)
    assert trainer.train(8, **counts)["informative_answers"] == 8
    assert trainer.answers == [answers, answers]
