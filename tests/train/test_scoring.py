"""Scores are the log-probs of whole logits, however rows are cut, and leave the learner as it was."""

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.train.scoring import reference, score
from tests.kit.forks import several_ranks, succeed_on_ranks
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml


def write_run(folder: Path, **changes) -> Path:
    cfg = run_config(
        folder / "base", folder / "rows.jsonl", folder / "out", overwrite_output_dir=True, **changes
    )
    cfg["model"]["lora_dropout"] = 0.3  # must not be drawn
    return write_yaml(folder / "run.yaml", cfg)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("scoring")
    write_model(top / "base", initializer_range=0.1)
    write_rows(top / "rows.jsonl", 8)
    write_run(top, tokens_per_micro_batch=100)
    return top


def set_up(path: Path) -> LoRAFinetune:
    """Return a recipe after its set-up, with an adapter that changes the model."""
    recipe = LoRAFinetune(config.load("lora_finetune_rocm", str(path)))
    recipe.setup()
    recipe.learner.load_adapter(some_adapter(recipe.learner, 0), "test")
    return recipe


def some_adapter(learner, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: 0.2 * torch.randn(p.shape) for name, p in learner.adapter.items()}


@pytest.fixture(scope="module")
def learner(folder):
    recipe = set_up(folder / "run.yaml")
    yield recipe.learner
    recipe.cleanup()


def some_rows() -> Rows:
    """Return rows of one to three sequences; one is longer than a micro-batch, and one has no label."""
    rng = np.random.default_rng(0)
    lengths = [(5,), (3, 1, 8), (150,), (2, 20), (40,), (40, 33, 2), (9,), (1, 1)]
    tokens = [rng.integers(1, 300, sum(each)).astype(np.int32) for each in lengths]
    labels = [np.where(rng.random(len(ids)) < 0.3, IGNORE, ids).astype(np.int32) for ids in tokens]
    return Rows(
        tokens,
        labels,
        lengths,
        {},
        {"advantages": [np.ones(len(ids), np.float32) for ids in tokens]},
    )


@torch.no_grad()
def expected(learner, rows: Rows, temperature: float = 1.0) -> list[np.ndarray]:
    """Return the log-probs from whole logits, one sequence at a time."""
    learner.decoder.eval()
    found = []
    for ids, labels, lengths in zip(rows.tokens, rows.labels, rows.lengths, strict=True):
        of_row = [np.zeros(0, np.float32)]
        bounds = np.cumsum(lengths)[:-1]
        for each, wanted in zip(np.split(ids, bounds), np.split(labels, bounds), strict=True):
            logits = learner.decoder(torch.from_numpy(each)[None].long())[0] / temperature
            logprobs = logits.log_softmax(-1)
            own = [logprobs[i - 1, each[i]] for i in range(1, len(each)) if wanted[i] != IGNORE]
            of_row.append(np.array(own, np.float32))
        found.append(np.concatenate(of_row))
    learner.decoder.train()
    return found


def assert_close(found, expected):
    assert [len(row) for row in found] == [len(row) for row in expected]
    assert all(row.dtype == np.float32 for row in found)
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(expected), atol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_whole_logits(learner, monkeypatch, packed, temperature):
    monkeypatch.setattr(learner, "packed", packed)
    rows = some_rows()
    learner.model.train()
    objective = learner.model.objective
    found = score(learner, rows, temperature)
    assert_close(found, expected(learner, rows, temperature))
    assert learner.model.training
    assert learner.model.objective is objective
    assert score(learner, Rows([], [], [], {})) == []


def test_reference_weights_and_none(learner):
    rows, other = some_rows(), some_adapter(learner, 1)
    before, now = learner.adapter_state(), score(learner, rows)
    with reference(learner):
        without = score(learner, rows)
    with reference(learner, {name: torch.zeros_like(value) for name, value in other.items()}):
        assert_close(score(learner, rows), without)
    with reference(learner, other):
        theirs = score(learner, rows)
        assert_close(theirs, expected(learner, rows))
    assert np.abs(np.concatenate(theirs) - np.concatenate(now)).max() > 0.1
    assert np.abs(np.concatenate(without) - np.concatenate(now)).max() > 0.1
    for name, value in learner.adapter_state().items():
        assert torch.equal(value, before[name])
    for found, was in zip(score(learner, rows), now, strict=True):
        assert np.array_equal(found, was)


def test_a_failure_leaves_the_learner_as_it_was(learner, monkeypatch):
    before, objective = learner.adapter_state(), learner.model.objective
    learner.model.train()
    monkeypatch.setattr(learner.model, "forward", lambda batch: 1 / 0)
    for state in (None, some_adapter(learner, 1)):
        with pytest.raises(ZeroDivisionError), reference(learner, state):
            score(learner, some_rows())
    with pytest.raises(UserError, match="from elsewhere"), reference(learner, {}, "from elsewhere"):
        pass
    assert learner.model.training
    assert learner.model.objective is objective
    assert not any(getattr(layer, "disabled", False) for layer in learner.decoder.modules())
    for name, value in learner.adapter_state().items():
        assert torch.equal(value, before[name])


@several_ranks
def test_two_ranks_equal_one(folder, learner):
    def main():
        recipe = set_up(folder / "run.yaml")
        scores = {"now": score(recipe.learner, some_rows())}
        with reference(recipe.learner, some_adapter(recipe.learner, 1)):
            scores["reference"] = score(recipe.learner, some_rows())
        (folder / f"rank{recipe.runtime.ranks.rank}.pickle").write_bytes(pickle.dumps(scores))
        recipe.cleanup()
        sys.exit(0)

    succeed_on_ranks(main, folder / "run.yaml")
    one = {"now": score(learner, some_rows())}
    with reference(learner, some_adapter(learner, 1)):
        one["reference"] = score(learner, some_rows())
    for rank in (0, 1):
        two = pickle.loads((folder / f"rank{rank}.pickle").read_bytes())
        for what in ("now", "reference"):
            assert_close(two[what], one[what])
