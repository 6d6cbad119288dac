"""Chooses the dtype to compute in, and tests that the device computes correctly in it."""

import difflib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv1d, pad, scaled_dot_product_attention

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.machine.detect import Machine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# relative errors: well above rounding (2^-9, 2^-12, and fp32 computed as TF32), well below wrong results
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 2e-3}
_NATS = 5e-2  # error of a log-prob from fp32 logits: TF32 stays below, bf16 products do not
SDPA_KERNELS = {  # keys are values of the key `attention`
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def pick_dtype(requested: str, machine: Machine) -> tuple[torch.dtype, str]:
    """Choose the dtype of weights and activations.

    Args:
        requested: bf16, fp16, fp32, or auto for the best that ``machine`` computes natively.
        machine: machine that computes.

    Returns:
        The dtype and the reason.

    Raises:
        UserError: the name is unknown, or the GPU only emulates bf16.
    """
    where = machine.arch or "this CPU"
    if requested == "auto":
        if machine.bf16:
            return torch.bfloat16, f"{where} computes bf16 natively"
        return (
            torch.float32,
            f"{where} has no native bf16; fp16 needs loss scaling, so it is never automatic",
        )
    if requested not in DTYPES:
        near = difflib.get_close_matches(str(requested), [*DTYPES, "auto"], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"dtype={requested} is unknown; use bf16, fp16, fp32 or auto{hint}")
    if requested == "bf16" and not machine.bf16:
        if machine.backend != "cpu":
            raise UserError(
                f"dtype=bf16: {where} has no bf16 arithmetic, and emulation is slow. "
                "Use dtype=fp32, or dtype=fp16, which trains with loss scaling"
            )
        return torch.bfloat16, "as configured; this CPU emulates bf16, slowly"
    if requested == "fp16":
        return (
            torch.float16,
            "as configured; trains with loss scaling, as gradients under 6e-8 vanish in fp16",
        )
    return DTYPES[requested], "as configured"


@dataclass(frozen=True)
class Check:
    """The outcome of one canary."""

    name: str
    ok: bool
    found: str
    fix: str
    fatal: bool = True  # False: results are right but slow


@dataclass(frozen=True)
class Kernel:
    """A function of a package that a model calls.

    Attributes:
        package: the package's name in pip.
        name: the function's name.
        compute, reference: the function and its reference; both take tensors and return one.
        inputs: function that draws these tensors on the CPU for a dtype.
    """

    package: str
    name: str
    compute: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    inputs: Callable[[torch.Generator, torch.dtype], list[Tensor]]


def canaries(
    machine: Machine,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int = 128,
    num_heads: int = 2,
    *,
    attention: str = "auto",
    convolution: bool = False,
    compiled: bool = False,
    kernels: Sequence[Kernel] = (),
) -> list[Check]:
    """Run small computations whose results are known.

    They are: a copy, a conversion, a matmul, log-probs of a large vocabulary, attention forward and backward, buffers
    that live while the allocator frees others, and on a GPU whether attention has a fused kernel. Some ROCm releases
    compute wrong results without an error, as in ROCm#6603. On a GPU the canaries take 0.4 GiB for a moment. They leave
    torch's random state unchanged.

    Args:
        machine: machine that computes.
        device: device of ``machine``.
        dtype: dtype to compute in.
        head_dim, num_heads: shape of the model's attention.
        attention: the run's attention kernel, as in the key ``attention``.
        convolution: whether to test a convolution, forward and backward.
        compiled: whether to test a kernel that Inductor writes with Triton, on a GPU.
        kernels: kernels of packages that the model calls.

    Returns:
        One check per computation. An error on the device is a failed check, not an exception.
    """
    other_torch = (
        "use another torch or ROCm release; on AMD, unset PYTORCH_HIP_ALLOC_CONF and try again"
    )
    allocator = "unset PYTORCH_HIP_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF"
    libraries = "try ROCBLAS_USE_HIPBLASLT=0 TORCH_BLAS_PREFER_HIPBLASLT=0; " + other_torch
    tf32 = (
        "unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and keep torch's matmul precision at highest; "
        + other_torch
    )
    slow_path = "set attention=math; " + other_torch
    short = dtype_name(dtype)
    canary = _Canary(device, dtype, head_dim, num_heads)
    checks = [
        _check("copy", "try HSA_ENABLE_SDMA=0; " + other_torch, canary.copy),
        _check(f"{short} round trip", other_torch, canary.round_trip),
        _check(f"{short} matmul", libraries, canary.matmul),
        _check("fp32 logits", tf32, canary.logits),
        _check(f"{short} attention, head_dim {head_dim}", slow_path, canary.attention, attention),
        _check("allocator", allocator, _allocator, device),
    ]
    if convolution:
        # MIOpen's direct ones ended LoRA runs (ROCm#6034); with expandable segments they gave NaN (pytorch#195202)
        fix = "try MIOPEN_DEBUG_CONV_DIRECT=0; " + other_torch
        checks.append(_check(f"{short} convolution", fix, canary.convolution))
    for kernel in kernels:
        fix = f"pip uninstall {kernel.package}, and transformers' code takes its place"
        checks.append(_check(f"{kernel.package}: {kernel.name}", fix, canary.package, kernel))
    if device.type != "cuda":
        return checks
    if compiled:
        # some wrote nothing without an error, and their caches kept them (unsloth#11614)
        fix = "set AMDGCN_USE_BUFFER_OPS=0, empty TRITON_CACHE_DIR and TORCHINDUCTOR_CACHE_DIR, or set compile=False"
        checks.append(_check("compiled kernel", fix, _compiled, device))
    fix = "install torch 2.12 or newer"
    if machine.backend == "rocm":
        fix += ", or set TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1 before Python starts"
    # GPUs without bf16 (gfx906 and older) have no fused kernels
    expected = machine.bf16 and dtype != torch.float32
    checks.append(_check("fused attention", fix, canary.fused_attention, expected, fatal=False))
    return checks


def require(checks: list[Check]) -> list[str]:
    """Raise an error if a fatal check failed; return a line for each of the other failures.

    Raises:
        UserError: the message lists the fatal failures with their fixes.
    """
    fatal: list[str] = []
    slow: list[str] = []
    for check in checks:
        if not check.ok:
            line = f"{check.name}: {check.found} (fix: {check.fix})"
            lines = fatal if check.fatal else slow
            lines.append(line)
    if fatal:
        raise UserError(
            f"this device computes wrong results. {'; '.join(fatal)}. To train regardless: startup_checks=False"
        )
    return slow


@contextmanager
def dtype_leaks(model: nn.Module, dtype: torch.dtype) -> Iterator[list[str]]:
    """Context that lists modules which compute in another dtype than ``dtype``, such as fp32, which is slow.

    Yields:
        A list. Forward passes add "name: dtype" once for a module that returns floating-point tensors of another dtype.
    """
    leaks = []

    def hook(name: str, module: nn.Module, args: object, output: object) -> None:
        for tensor in _tensors(output):
            line = f"{name}: {dtype_name(tensor.dtype)}"
            if tensor.is_floating_point() and tensor.dtype != dtype and line not in leaks:
                leaks.append(line)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(hook, name or "model")))
        yield leaks


@contextmanager
def first_non_finite(model: nn.Module) -> Iterator[list[tuple[str, bool]]]:
    """Context that locates the first NaN or infinity of forward passes. It waits for the device after every module.

    Yields:
        A list. The first module that computes NaN or infinity from finite inputs adds one pair: its name, class and
        dtype as one text, and whether it computes attention.
    """
    origins: list[tuple[str, bool]] = []
    modules = {}
    for name, module in model.named_modules():
        modules[name.replace("._checkpoint_wrapped_module", "")] = module

    def hook(name: str, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        bad = [tensor for tensor in _tensors(output) if _overflows(tensor)]
        if origins or not bad:
            return
        # the module around this one has computed its inputs
        if any(map(_overflows, _tensors([args, kwargs]))):
            name = name.rpartition(".")[0]
        kind = type(modules[name]).__name__
        attention = "att" in f"{name.rpartition('.')[2]} {kind}".lower()
        origins.append((f"{name or 'the model'} ({kind}, {dtype_name(bad[0].dtype)})", attention))

    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(hook, name), with_kwargs=True))
        yield origins


def _overflows(tensor: Tensor) -> bool:
    """Whether a tensor has NaN or infinity; masks have -inf."""
    if not tensor.is_floating_point():
        return False
    overflown = tensor.isnan() | (tensor == torch.inf)
    return bool(overflown.any())


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors(item)
    elif isinstance(output, dict):
        yield from _tensors(list(output.values()))


# ------------------------------------------------------------------------------------------------------ canaries
Outcome = tuple[bool, str]  # whether results are right, and the finding


def _check(
    name: str, fix: str, probe: Callable[..., Outcome], *arguments: Any, fatal: bool = True
) -> Check:
    try:
        ok, found = probe(*arguments)
    except torch.OutOfMemoryError:  # says nothing about results
        raise
    except (RuntimeError, NotImplementedError) as error:
        # "HIP error: invalid device function" is one
        first_line, _, _ = str(error).strip().partition("\n")
        return Check(name, False, first_line, fix)
    return Check(name, ok, found, fix, fatal)


@dataclass
class _Canary:
    """Small computations on a device; a method returns whether the results are right, and the finding."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    rng: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def draw(self, *shape: int) -> Tensor:
        """Draw a tensor on the host."""
        return torch.randn(shape, generator=self.rng).to(self.dtype)

    def compare(self, actual: Tensor, expected: Tensor, times: float = 1.0) -> Outcome:
        """Whether a result is as near to the expected one as ``times`` the dtype's tolerance."""
        bad = int((~actual.isfinite()).sum())
        if bad:
            return False, f"{bad} of {actual.numel()} values are NaN or infinite"
        difference = actual.float() - expected
        error = float(difference.norm() / expected.norm())
        allowed = times * _TOLERANCE[self.dtype]
        return error <= allowed, f"relative error {error:.1e}, {allowed:.0e} allowed"

    def copy(self) -> Outcome:
        # 4 MiB, as small copies do not go through the copy engines; all words differ, and all bits change
        sent = torch.arange(-(2**19), 2**19, dtype=torch.int32) * 4095
        received = sent.to(self.device).clone().cpu()
        wrong = int((received != sent).sum())
        return (
            wrong == 0,
            f"{wrong} of {sent.numel()} words changed on the way to {self.device} and back",
        )

    def round_trip(self) -> Outcome:
        x = torch.randn(2**14, generator=self.rng)
        # the host rounds to nearest even, as every GPU here does
        expected = x.to(self.dtype).float()
        converted = x.to(self.device).to(self.dtype)
        actual = converted.float().cpu()
        wrong = int((actual != expected).sum())
        zeros = int(((actual == 0) & (expected != 0)).sum())
        return (
            wrong == 0,
            f"{wrong} of {x.numel()} values differ from the host's, {zeros} became zero",
        )

    def matmul(self) -> Outcome:
        a = self.draw(256, 256)
        b = self.draw(256, 256)
        actual = a.to(self.device) @ b.to(self.device)
        return self.compare(actual.cpu(), a.float() @ b.float())

    def logits(self) -> Outcome:
        hidden = torch.randn(16, 128, generator=self.rng)
        rows = torch.randn(2**10, 128, generator=self.rng)
        times = 32  # a vocabulary that repeats these rows: to draw a large one, and compute in fp64, takes long
        weight = rows.repeat(times, 1)
        actual = hidden.to(self.device) @ weight.to(self.device).T
        log_probs = actual.log_softmax(-1).cpu().unflatten(-1, (times, -1))
        once = (hidden.double() @ rows.double().T).log_softmax(-1)
        expected = once.unsqueeze(1) - math.log(times)
        error = float((log_probs - expected).abs().max())
        return error <= _NATS, f"log-probs differ from fp64's by {error:.1e}, {_NATS:.0e} allowed"

    def convolution(self) -> Outcome:
        """A causal convolution per channel, as in hybrid models, and the gradient of its input."""
        # input, and gradient of the output; batch, channels, length
        x_and_grad = self.draw(2, 2, 64, 128)
        weight = self.draw(64, 1, 4)

        def convolve(x_and_grad: Tensor, weight: Tensor) -> Tensor:
            def causal(x: Tensor) -> Tensor:
                return conv1d(pad(x, (3, 0)), weight, groups=64)

            x, grad = x_and_grad.unbind()
            return _with_gradients(causal, [x], grad)

        actual = convolve(x_and_grad.to(self.device), weight.to(self.device))
        expected = convolve(x_and_grad.float(), weight.float())
        return self.compare(actual.cpu(), expected)

    def attention(self, kernel: str) -> Outcome:
        # q, k, v and the gradient of the output; batch, heads, sequence, head_dim
        qkvg = self.draw(4, 1, self.num_heads, 128, self.head_dim)

        def attend(qkvg: Tensor) -> Tensor:
            *qkv, grad = qkvg.unbind()
            return _with_gradients(partial(scaled_dot_product_attention, is_causal=True), qkv, grad)

        # A fused kernel that cannot start raises its error in a later one (pytorch#194498, TheRock#7992): in `stack`.
        chosen = "math" if kernel == "eager" else kernel
        kernels = sdpa_kernel(SDPA_KERNELS[chosen]) if chosen in SDPA_KERNELS else nullcontext()
        with kernels:
            actual = attend(qkvg.to(self.device)).cpu()
        with sdpa_kernel(SDPBackend.MATH):
            expected = attend(qkvg.float())
        return self.compare(actual, expected)

    def package(self, kernel: Kernel) -> Outcome:
        """The kernel of a package and the gradients of its inputs. Recurrences round at every step."""
        inputs = kernel.inputs(self.rng, self.dtype)
        seeds = torch.Generator()

        def compute(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
            leaves = [t.detach().requires_grad_() for t in inputs]
            out = function(*leaves)
            seeds.manual_seed(0)
            grad = torch.randn(out.shape, generator=seeds).to(out)
            gradients = torch.autograd.grad(out, leaves, grad)
            return [t.float().cpu() for t in (out.detach(), *gradients)]

        with torch.enable_grad():
            expected = compute(kernel.reference, [t.float() for t in inputs])
            try:
                actual = compute(kernel.compute, [t.to(self.device) for t in inputs])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # packages may raise anything, also while they compile
                return False, one_line(error)
        output = self.compare(actual[0], expected[0])
        for gradient, right_one in zip(actual[1:], expected[1:], strict=True):
            result = self.compare(gradient, right_one, times=5.0)
            if output[0] and not result[0]:
                return result
        return output

    def fused_attention(self, expected: bool) -> Outcome:
        """Whether attention has a fused kernel; it is right without one if none is ``expected``."""
        shape = (1, self.num_heads, 128, self.head_dim)
        q = torch.zeros(shape, device=self.device, dtype=self.dtype)
        usable = []
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            with sdpa_kernel(backend), warnings.catch_warnings():
                # torch warns about every reason that a backend cannot run
                warnings.simplefilter("ignore")
                try:
                    (scaled_dot_product_attention(q, q, q, is_causal=True) + 1).cpu()
                except RuntimeError:  # "No available kernel", or one that cannot start
                    continue
            usable.append(backend.name.split("_")[0].lower())
        if usable:
            return True, f"attention kernels: {', '.join(usable)}"
        return not expected, "attention runs on the slow math path"


def _with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> Tensor:
    """The output of ``function`` and the gradients of its ``inputs``, which have the output's shape, as one tensor."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        out = function(*leaves)
        gradients = torch.autograd.grad(out, leaves, grad)
        return torch.stack([out.detach(), *gradients])


def _compiled(device: torch.device) -> Outcome:
    x = torch.arange(2**14, dtype=torch.float32)
    function = torch.compile(lambda x: 2 * x + 1)
    actual = function(x.to(device)).cpu()
    wrong = int((actual != 2 * x + 1).sum())
    return wrong == 0, f"{wrong} of {x.numel()} values of a compiled kernel are wrong"


def _allocator(device: torch.device) -> Outcome:
    """Whether buffers keep their content while the allocator frees, unmaps and reuses memory around them.

    Where this fails, weights turn to zeros during a run (ROCm#6603). In that report the device was full; returning
    free memory to the driver also makes the allocator unmap, and is quick.
    """
    unit = 2**18 if device.type == "cuda" else 2**13  # int32: 1 MiB, 32 KiB
    filled = partial(torch.full, dtype=torch.int32, device=device)
    live: list[Tensor] = []
    for _ in range(3):
        passing = []
        # these lie in the allocator's small blocks, in its large blocks and in separate segments
        for size in (1, 24, 64):
            live.append(filled((size * unit,), len(live) + 1))
            passing.append(filled((size * unit // 2,), -1))
        del passing
        if device.type == "cuda":
            torch.cuda.empty_cache()
    wrong = zeros = total = 0
    for number, buffer in enumerate(live, start=1):
        wrong += int((buffer != number).sum())
        zeros += int((buffer == 0).sum())
        total += buffer.numel()
    live.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return wrong == 0, f"{wrong} of {total} words in live buffers changed, {zeros} became zero"


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name in configs: bf16; torch's name of any other dtype: float64."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    return str(dtype).removeprefix("torch.")
