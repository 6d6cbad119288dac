"""Layers with states: their chunked form, and kernels of packages, which are tried before a run."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.models.granitemoehybrid import modeling_granitemoehybrid

from rocm_ext.model.hf.packed_states import chunk_scan
from tests.kit.families import folder_config
from tests.kit.hf_models import write_theirs
from tests.kit.tiny import write_rows, write_yaml

# what `pip install causal-conv1d` brings: transformers calls it instead of its own function where it can be imported
PACKAGE = """
import torch
from torch._subclasses.fake_tensor import FakeTensor

def causal_conv1d_fn(x, weight, bias=None, activation=None):
    assert not isinstance(x, FakeTensor)  # a plan's: a compiled kernel would read its address, 0
    open({log!r}, "a").write("called\\n")
    width = weight.shape[-1]
    out = torch.nn.functional.conv1d(torch.nn.functional.pad(x, ({left}, width - 1 - {left})), weight[:, None], bias,
                                     groups=len(weight))
    return out if activation is None else torch.nn.functional.silu(out)
"""


# what `pip install flash-linear-attention` brings, in torch: its sixth argument is a scale
FLA = """
import inspect
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    open({log!r}, "a").write("called\\n")
    out, state = inspect.unwrap(theirs.torch_chunk_gated_delta_rule)(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    return out if scale is None else out * scale * k.shape[-1] ** 0.5, state
"""

# kernels compute tensors of GPUs alone; here a CPU is taken for one
PROGRAM = """
import sys
from rocm_ext.model.hf import packed_states
from rocm_ext.recipes.lora_finetune_rocm import main
packed_states.on_gpu = lambda x: not isinstance(x, packed_states.FakeTensor)
sys.exit(main())
"""


def train(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Train the model ``name`` for a step, with the packages in ``folder``."""
    cfg = folder_config(
        write_theirs(folder / "base", name), write_rows(folder / "rows.jsonl", 8), folder / "out"
    )
    path = write_yaml(folder / "run.yaml", cfg | {"startup_checks": True, "max_steps_per_epoch": 1})
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, "--config", path],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert (folder / "log").exists(), run.stderr
    return run


@pytest.mark.wide
@pytest.mark.parametrize("works", [True, False])
def test_an_installed_kernel_is_held_against_transformers(tmp_path, works):
    (tmp_path / "causal_conv1d.py").write_text(
        PACKAGE.format(log=str(tmp_path / "log"), left=3 if works else 2)
    )
    run = train(tmp_path, "lfm 2")
    assert run.returncode == (0 if works else 1), run.stderr
    refused = "causal-conv1d: causal_conv1d_fn: relative error " in run.stderr
    assert refused != works
    if refused:
        assert "pip uninstall causal-conv1d" in run.stderr.splitlines()[-1]
    assert (tmp_path / "out" / "adapter").exists() == works


@pytest.mark.wide
def test_flash_linear_attention_gets_its_own_arguments(tmp_path):
    ops = tmp_path / "fla" / "ops"
    ops.mkdir(parents=True)
    (ops.parent / "__init__.py").touch()
    (ops / "__init__.py").touch()
    (ops / "gated_delta_rule.py").write_text(FLA.format(log=str(tmp_path / "log")))
    run = train(tmp_path, "qwen3.5")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "groups"),
    [(2, 1, 4, 1), (2, 50, 4, 2), (1, 64, 2, 2), (1, 200, 4, 1)],
)
def test_chunks_of_a_scan_equal_transformers(batch, length, heads, groups, initial):
    rng = torch.Generator().manual_seed(length)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float32).requires_grad_()

    inputs = [random(batch, length, heads, 8), random(batch, length, heads), random(heads),
              random(batch, length, groups, 16), random(batch, length, groups, 16)]  # fmt: skip
    others = {"D": random(heads), "dt_bias": random(heads)}
    if initial:
        others["initial_states"] = random(batch, heads, 8, 16)
    leaves = [*inputs, *others.values()]
    weights = (
        torch.randn(batch, length, heads, 8, generator=rng),
        torch.randn(batch, heads, 8, 16, generator=rng),
    )

    def results(scan) -> list[torch.Tensor]:
        x, dt, a, b, c = inputs
        options = {
            **others,
            "dt_softplus": True,
            "dt_limit": (0.01, 2.0),
            "return_final_states": True,
        }
        found = scan(x, dt, -a.exp(), b, c, chunk_size=32, **options)
        loss = sum((each * weight).sum() for each, weight in zip(found, weights, strict=True))
        return [*found, *torch.autograd.grad(loss, leaves)]

    theirs = inspect.unwrap(modeling_granitemoehybrid.mamba2_chunk_scan)
    for ours, expected in zip(results(chunk_scan), results(theirs), strict=True):
        assert (ours - expected).norm() <= 5e-5 * expected.norm()


def test_a_scan_forgets_what_decays_at_once():
    """Differences of logs, not quotients of decays, which are 0 / 0 here."""
    x, dt, b = torch.ones(1, 130, 1, 4), torch.ones(1, 130, 1), torch.ones(1, 130, 1, 4)
    assert torch.equal(chunk_scan(x, dt, torch.tensor([-1e3]), b, b), 4 * x)
