"""The benchmark harness: its gates can fail, and its arithmetic is right."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.flop_counter import FlopCounterMode

from rocm_ext.losses import CrossEntropy
from rocm_ext.model import lora
from rocm_ext.model.build import build_model
from tools.benchmarks import dpo, sampling, training, work
from tools.benchmarks.protocol import Failed


def test_saved_work_is_counted_as_torch_counts_it(tmp_path):
    """Count the matrix products of one of our steps, up to adapters of rank 1 and short attention."""
    shape, vocab, tokens, trained = "tiny", 512, 96, 40
    folder = work.write_random_model(tmp_path / "model", shape, vocab)
    cfg = OmegaConf.create({**work.model_config(folder, shape), "lora_rank": 1})
    decoder = build_model(cfg, torch.float32, 0, torch.device("cpu"))
    frozen = sum(
        p.numel() for name, p in decoder.named_parameters() if "lora_" not in name and p.ndim == 2
    )
    assert work.parameters(shape, vocab) == frozen
    decoder.to_empty(device="cpu")  # the values do not matter
    lora.init_adapters(decoder, 0, torch.device("cpu"))
    width = work.SHAPES[shape]["hidden_size"]
    head = torch.zeros(width, vocab)
    with FlopCounterMode(display=False) as counter:
        hidden = torch.zeros(
            1, tokens, width, requires_grad=True
        )  # a deeper layer's input needs a gradient
        for layer in decoder.layers:
            hidden = layer(hidden)
        targets = torch.zeros(trained, dtype=torch.int64)
        CrossEntropy()(
            lambda h: h @ head, hidden[0, :trained], targets, {}, torch.zeros_like(targets)
        ).backward()
    assert counter.get_total_flops() == pytest.approx(
        work.flops(shape, vocab, tokens, trained), rel=0.12
    )


@pytest.mark.parametrize(("change", "message"), [
    ({}, None), ({"greedy": [[1, 2]]}, "greedy answers of peer differ"),
    ({"behind": 0.5}, "less probable than the best"), ({"bias": 1.0}, "tokens sampled by ours are off"),
    ({"said": 0.5}, "our log-probabilities have mean"),
])  # fmt: skip
def test_other_answers_close_the_gate(change, message):
    rng = np.random.default_rng(0)
    surprise = (rng.normal(change.get("bias", 0.0), 1.0, 1000)).tolist()
    said = [-1.0 + change.get("said", 0.0)] * 10
    judged = {"behind": change.get("behind", 0.0), "surprise": surprise, "logprobs": [-1.0] * 10}

    with pytest.raises(Failed, match=message) if message else nullcontext():
        sampling.check_greedy("peer", change.get("greedy", [[1, 1]]), [[1, 1]], judged, "fp32")
        sampling.check_sampled("ours", {"logprobs": said}, judged, "fp32")


@pytest.mark.parametrize(("losses", "norms", "told"), [
    ([0.7, 0.500001], [1.0, 2.0001], None), ([0.7, 0.501], [1.0, 2.0], "losses of peer"),
    ([0.7, 0.5], [1.0, 2.01], "gradient norms of peer"), ([0.7, float("nan")], [1.0, 2.0], "losses of peer"),
    ([0.7, 0.5], [1.0, float("nan")], "gradient norms of peer"),
])  # fmt: skip
def test_other_losses_or_gradients_close_the_gate(losses, norms, told):
    found = {training.OURS: ([0.7, 0.5], [1.0, 2.0]), "peer": (losses, norms)}
    with pytest.raises(Failed, match=told) if told else nullcontext():
        assert training.check(found, dpo.WORK.tolerances["fp32"])["peer"] == pytest.approx(2e-6)
