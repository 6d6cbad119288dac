"""Experts' products: grouped ones equal the loop, padding changes nothing, and what crashes or is wrong is not used."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from rocm_ext.machine import trials
from rocm_ext.model.hf import grouped_product
from rocm_ext.model.hf.experts import _Products, sorted_experts
from rocm_ext.model.hf.grouped_product import Rows
from tests.kit.parity import our_model

EXPERTS = 6
some = pytest.mark.skipif(
    grouped_product._grouped_mm is None, reason="this torch has no grouped product"
)


def layer(
    choices: list[list[int]], dtype: torch.dtype, grouped: bool, bias: bool
) -> list[torch.Tensor]:
    """Compute one product with LoRA and its gradients; experts without tokens are among them."""
    rng = torch.Generator().manual_seed(0)
    rows = replace(Rows.of(torch.tensor(choices), EXPERTS, dtype), grouped=grouped)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(dtype)

    x, a, b = some(len(rows.back), 32), some(EXPERTS, 16, 32), some(EXPERTS, 24, 16)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 1))[rows.order]
    wanted = [t.requires_grad_() for t in (padded, a, b)]
    out = _Products.apply(
        padded, some(EXPERTS, 24, 32).mT, some(EXPERTS, 24) if bias else None, a, b, rows
    )
    seen = torch.nn.functional.pad(some(len(rows.back), 24), (0, 0, 0, 1))[rows.order]
    grads = torch.autograd.grad(out, wanted, seen)
    return [out[rows.back], grads[0][rows.back], *grads[1:]]


@some
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "choices", [[[4, 1]] * 3 + [[1, 2]] * 57, [[3, 5]]], ids=["sixty tokens", "one token"]
)
def test_grouped_products_are_those_of_the_loop(choices, dtype, bias):
    expected = layer(choices, dtype, False, bias)
    for found, want in zip(layer(choices, dtype, True, bias), expected, strict=True):
        near = 1e-5 if dtype == torch.float32 else 2e-2
        assert (found - want).norm() <= near * want.norm()
    assert (expected[2][0] == 0).all(), "expert 0 has no tokens"


@some
def test_a_layer_is_the_same_with_grouped_products(folder_of, monkeypatch):
    targets = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    ours = our_model(
        folder_of("gpt-oss"), lora_rank=3, **targets
    )  # rows of 3 numbers: the loop computes their products
    experts = next(module for module in ours.modules() if hasattr(module, "is_transposed"))
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.full((7, 2), 0.5, requires_grad=True)
    chosen = torch.tensor([[0, 2], [2, 0], [0, 3], [3, 2], [2, 3], [0, 2], [3, 0]])

    def both() -> list[torch.Tensor]:
        out = sorted_experts(experts, x, chosen, weights)
        return [out, *torch.autograd.grad(out.square().sum(), [x, weights])]

    expected, of = both(), Rows.of
    monkeypatch.setattr(Rows, "of", lambda *args: replace(of(*args), grouped=True))
    torch.testing.assert_close(both(), expected)


# ---- the trial
@pytest.mark.wide
@some
def test_the_trial_finds_wrong_products(monkeypatch):
    right = grouped_product._grouped_mm
    said = grouped_product.trial(torch.device("cpu"))
    assert not said or said.endswith("times as fast")

    def other(x, weight, offs):  # leaves out an expert's last row
        out = right(x, weight, offs=offs)
        return out.index_fill(0, torch.tensor([len(out) - 1]), 5.0) if weight.ndim == 3 else out

    monkeypatch.setattr(grouped_product, "_grouped_mm", other)
    assert "is wrong by" in grouped_product.trial(torch.device("cpu"))

    def unsteady(*args, **kwargs):
        return right(*args, **kwargs) * (1 + 1e-2 * torch.rand(1))

    monkeypatch.setattr(grouped_product, "_grouped_mm", unsteady)
    assert "differs from call to call" in grouped_product.trial(torch.device("cpu"))


def ask_again():
    grouped_product.grouped_products.cache_clear()
    trials.works.cache_clear()


@some
def test_a_cache_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "torchtune-rocm").touch()  # where a folder should be
    monkeypatch.setattr(trials, "_tried", lambda *_: ("", True))
    ask_again()
    assert grouped_product.grouped_products()
    ask_again()


@some
def test_a_trial_that_hangs_is_ended(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trials, "_TIMEOUT", 0.01)
    ask_again()
    with caplog.at_level("INFO"):
        assert not grouped_product.grouped_products()
    ask_again()
    assert "because the grouped product took longer than 0.01 s" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("program", "said", "tries"),
    [
        ("import os; os.abort()", "ended with status -6", 1),
        ('print(\'noise\'); print(\'{"failure": "", "final": true}\')', "", 1),
        (
            'print(\'{"failure": "the GPU\\\'s memory is full", "final": false}\')',
            "memory is full",
            2,
        ),
        ("raise ImportError", "ended with status 1", 2),
        (
            "import os; os.kill(os.getpid(), 9)",
            "ended with status -9",
            2,
        ),  # the kernel's, when memory is full
    ],
    ids=["crash", "right", "no memory", "error", "killed"],
)
@some
def test_what_crashes_is_not_used_and_not_tried_again(
    tmp_path, monkeypatch, caplog, program, said, tries
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    started, commands = subprocess.Popen, []

    def instead(command, **kwargs):
        commands.append(command)
        return started([sys.executable, "-c", program], **kwargs)

    monkeypatch.setattr(trials.subprocess, "Popen", instead)
    for _ in range(2):
        ask_again()
        with caplog.at_level("INFO"):
            assert grouped_product.grouped_products() == (not said)
    ask_again()
    assert commands == [[sys.executable, "-m", "rocm_ext.model.hf.grouped_product", "0"]] * tries
    assert said in caplog.text
    assert ("one grouped product for all" in caplog.text) == (not said)
    file = tmp_path / "torchtune-rocm" / "grouped_mm.json"
    assert file.exists() == (tries == 1)
    if file.exists():
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"machine": {"torch": "another"}})
        )
        grouped_product.grouped_products()
        ask_again()
        assert len(commands) == tries + 1
