"""The choice of dtype, canaries that detect a device with wrong results, and the fp32 detector."""

import pytest
import torch
from torch import nn

from rocm_ext.base.errors import UserError
from rocm_ext.machine import numerics
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.numerics import Check, canaries, dtype_leaks, pick_dtype, require

STRIX = Machine("rocm", "Linux", "2.12.0+rocm7.2", "rocm", 0, True, "gfx1151", gpu_count=1)
MI50 = Machine("rocm", "Linux", "2.9.1+rocm6.3", "rocm", 0, False, "gfx906", gpu_count=1)
CPU = Machine("cpu", "Linux", "2.13.0+cpu", "cpu", 0, False)
HOST = torch.device("cpu")


@pytest.mark.parametrize(("requested", "machine", "dtype", "reason"), [
    ("auto", STRIX, torch.bfloat16, "gfx1151 computes bf16 natively"),
    ("auto", MI50, torch.float32, "gfx906 has no native bf16"), ("auto", CPU, torch.float32, "this CPU"),
    ("fp16", MI50, torch.float16, "loss scaling"),
])  # fmt: skip
def test_pick_dtype(requested, machine, dtype, reason):
    found, why = pick_dtype(requested, machine)
    assert found == dtype
    assert reason in why


def test_pick_dtype_refuses():
    with pytest.raises(UserError, match=r"gfx906 has no bf16 arithmetic.*dtype=fp16"):
        pick_dtype("bf16", MI50)
    with pytest.raises(UserError, match="use bf16, fp16, fp32 or auto; did you mean bf16"):
        pick_dtype("bfloat16", STRIX)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_canaries_pass_on_a_sound_device(dtype):
    before = torch.get_rng_state()
    checks = canaries(
        CPU, HOST, dtype, head_dim=80, convolution=True, compiled=True
    )  # compiled: on GPUs
    assert len(checks) == 7
    assert require(checks) == []
    assert torch.equal(before, torch.get_rng_state())


def test_canaries_notice_what_has_gone_wrong_on_real_devices(monkeypatch):
    sound = numerics.scaled_dot_product_attention

    def attention(q, k, v, **kwargs):  # the low-precision kernel returns NaN, as on some head_dims
        out = sound(q, k, v, **kwargs)
        return out if q.dtype == torch.float32 else out * float("nan")

    monkeypatch.setattr(numerics, "scaled_dot_product_attention", attention)
    to = torch.Tensor.to
    zeroing = lambda self, arg: to(self, arg) * (0 if arg is HOST else 1)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "to", zeroing)
    failed = {
        check.name: check.found for check in canaries(CPU, HOST, torch.bfloat16) if not check.ok
    }
    assert set(failed) == {
        "copy",
        "bf16 round trip",
        "bf16 matmul",
        "fp32 logits",
        "bf16 attention, head_dim 128",
    }
    assert "words changed" in failed["copy"]
    assert "became zero" in failed["bf16 round trip"]
    assert "relative error 1.0" in failed["bf16 matmul"]
    assert "NaN" in failed["bf16 attention, head_dim 128"]


def test_a_run_that_names_its_kernel_is_tried_with_that(monkeypatch):
    """Fused kernels return NaN, as on gfx1151 with Gemma 3."""
    sound = numerics.scaled_dot_product_attention

    def attention(*args, **kwargs):
        return sound(*args, **kwargs) * (
            float("nan") if torch.backends.cuda.flash_sdp_enabled() else 1
        )

    monkeypatch.setattr(numerics, "scaled_dot_product_attention", attention)
    with pytest.raises(UserError, match=r"fp32 attention.*fix: set attention=math; "):
        require(canaries(CPU, HOST, torch.float32))
    for kernel in ("math", "eager"):
        assert require(canaries(CPU, HOST, torch.float32, attention=kernel)) == []


def test_canaries_notice_convolutions_and_logits_that_are_wrong(monkeypatch):
    monkeypatch.setattr(
        numerics,
        "conv1d",
        lambda x, weight, groups: x[..., 3:] * weight[:, :, 0].view(1, groups, 1),
    )
    to = torch.Tensor.to

    def rounding(self, arg):
        return to(self, torch.bfloat16).to(torch.float32) if arg is HOST else to(self, arg)

    monkeypatch.setattr(torch.Tensor, "to", rounding)
    failed = {
        check.name: check.found
        for check in canaries(CPU, HOST, torch.float32, convolution=True)
        if not check.ok
    }
    assert "log-probs differ from fp64's by " in failed["fp32 logits"]
    assert float(failed["fp32 logits"].split()[5].rstrip(",")) < 1
    assert "relative error" in failed["fp32 convolution"]


def test_a_compiled_kernel_that_writes_nothing(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: torch.zeros_like)
    assert numerics._compiled(HOST) == (
        False,
        "16384 of 16384 values of a compiled kernel are wrong",
    )
    monkeypatch.setattr(torch, "compile", lambda function: function)
    assert numerics._compiled(HOST)[0]


def test_where_the_first_value_that_is_not_finite_comes_from():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, mask):
            return self.out(self.q(x) * self.scale + mask.clamp(min=0))

        scale = 1.0

    torch.manual_seed(0)  # with other weights, the infinity may be negative, as masks are
    model = nn.Sequential()
    model.extend(Attention() for _ in range(3))
    mask = torch.full((4,), -torch.inf)

    def origin(x: torch.Tensor) -> str:
        with numerics.first_non_finite(model) as origins:
            for layer in model:
                x = layer(x, mask=mask)
        assert not any(module._forward_hooks for module in model.modules())
        return ", ".join(f"{origin} {attention}" for origin, attention in origins)

    assert origin(torch.ones(2, 4)) == ""
    model[1].scale = torch.nan  # in the attention itself, between its layers
    assert origin(torch.ones(2, 4)) == "1 (Attention, fp32) True"
    with torch.no_grad():
        model[1].q.weight[0] = torch.inf
    assert origin(torch.ones(2, 4)) == "1.q (Linear, fp32) False"


def test_the_allocators_canary_notices_lost_contents(monkeypatch):
    made, full = [], torch.full

    def unmapping(*args, **kwargs):  # the third buffer loses its first page when the tenth is made
        made.append(full(*args, **kwargs))
        if len(made) == 10:
            made[2][:1024] = 0
        return made[-1]

    monkeypatch.setattr(torch, "full", unmapping)
    (failed,) = [check for check in canaries(CPU, HOST, torch.float32) if not check.ok]
    assert failed.name == "allocator"
    assert failed.found.endswith("1024 became zero")
    assert failed.fix.startswith("unset PYTORCH_HIP_ALLOC_CONF ")


def test_require_names_every_failure_and_lets_slow_ones_pass(monkeypatch):
    slow = Check("fused attention", False, "math", "newer torch", fatal=False)
    assert require([slow, Check("copy", True, "", "")]) == [
        "fused attention: math (fix: newer torch)"
    ]
    with pytest.raises(
        UserError, match=r"copy: 3 wrong \(fix: A\); matmul: NaN \(fix: B\).*startup_checks"
    ):
        require([slow, Check("copy", False, "3 wrong", "A"), Check("matmul", False, "NaN", "B")])

    def broken(*args, **kwargs):
        raise RuntimeError("HIP error: invalid device function\nCompile with TORCH_USE_HIP_DSA")

    monkeypatch.setattr(numerics, "scaled_dot_product_attention", broken)
    with pytest.raises(UserError, match=r"head_dim 64: HIP error: invalid device function \(fix: "):
        require(canaries(CPU, HOST, torch.float32, head_dim=64))


def test_dtype_leaks_names_the_modules_that_left_the_dtype():
    class Upcast(nn.Module):
        def forward(self, x):
            return {"hidden": (x.float(), torch.arange(2)), "same": x}

    model = nn.Sequential(nn.Linear(4, 4), Upcast()).to(torch.bfloat16)
    with dtype_leaks(model, torch.bfloat16) as leaks:
        for _ in range(2):
            model(torch.ones(1, 4, dtype=torch.bfloat16))
    assert leaks == ["1: fp32", "model: fp32"]
    model(torch.ones(1, 4, dtype=torch.bfloat16))
    assert len(leaks) == 2
    assert not any(module._forward_hooks for module in model.modules())
