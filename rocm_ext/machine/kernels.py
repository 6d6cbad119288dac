"""What a profile says in words: where the time of the recorded steps went.

The input are events of torch's profiler in Chrome's trace format: ``cat`` is ``cpu_op`` for an operator on the host,
``cuda_runtime`` or ``cuda_driver`` for a call of the GPU's runtime (ROCm's, too), ``kernel``, ``gpu_memcpy`` or
``gpu_memset`` for work of the GPU. ``ts`` and ``dur`` are microseconds.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]
Span = tuple[float, float]  # begin and end, microseconds

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_HOST = ("cpu_op", "cuda_runtime", "cuda_driver")
_WAITING = re.compile(r"Synchronize|^hipMemcpyWithStream$|^(cuda|hip)Memcpy$")  # the last two return when they are done
_SLOWEST = 5

# The first pattern that fits the operator decides; if none does, the first that fits the kernel.
_WORDS: tuple[tuple[str, str], ...] = (
    (r"triton_(red|per)_", "compiled reductions"),
    (r"triton_poi_", "compiled elementwise operations"),
    (r"nccl|rccl|c10d|gloo|all_?reduce|all_?gather|reduce_scatter", "exchange between ranks"),
    (r"(attention|attn|fmha|flash).*(backward|bwd)|bwd.*(fmha|attn)", "attention backward"),
    (r"attention|attn|fmha|flash", "attention"),
    (r"dequant|nf4|4bit", "unpacking of 4-bit weights"),
    (r"softmax.*backward", "softmax backward"),
    (r"softmax", "softmax"),
    (r"multi_tensor|_foreach_|_fused_adam", "many small tensors at once (optimiser, clipping)"),
    (r"(rms|layer)_?norm.*(backward|bwd|grad)", "norm backward"),
    (r"(rms|layer)_?norm", "norm"),
    (
        r"cijk_|gemm|gemv|nvjet|cutlass|splitk|matmul|triton_(tem|mm)|(^|::)(add)?[bm]?m[mv](_|$)|baddbmm|linear|_(scaled|grouped|int)_mm",
        "matrix product",
    ),
    (r"embedding", "embedding"),
    (r"memcpy dtoh|memcpy htod", "copy between host and GPU"),
    (r"memset|fill|zero_|::(zeros|empty|ones)|resize", "allocation and filling"),
    (r"memcpy|copy|::(cat|stack|clone|contiguous|repeat)|catarray|_to_copy", "copy or conversion"),
    (r"index|gather|scatter|take|masked_select|nonzero", "indexing"),
    (r"sort|topk|radix", "sorting"),
    (
        r"reduce_|::(sum|mean|amax|amin|max|min|argmax|norm|linalg_vector_norm|cumsum|logsumexp|all|any|var)(_|$)|"
        r"_local_scalar_dense|scan",
        "sum, maximum or other reduction",
    ),
    (
        r"elementwise|::(mul|add|sub|div|neg|exp|log|pow|rsqrt|sqrt|silu|sigmoid|tanh|gelu|where|masked_fill|addcmul|"
        r"addcdiv|lerp|clamp|reciprocal|eq|ne|lt|le|gt|ge|bitwise_\w+|__\w+__|silu_backward|logical_\w+|abs|isfinite)_?$",
        "elementwise operation",
    ),
)
_VIEW = re.compile(
    r"::(view|reshape|_unsafe_view|_reshape_alias|as_strided|(un)?flatten|(un)?squeeze|transpose|t|permute|expand|slice|"
    r"select|narrow|split|split_with_sizes|chunk|unbind|detach|alias|to)_?$"
)
_BACKWARD = re.compile(r"^autograd::|Backward\d*$")  # the gradient of an operator or of a Python function
_COMPILED = tuple((re.compile(pattern), words) for pattern, words in _WORDS)
_TYPES = {
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "float": "fp32",
    "double": "fp64",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
}
# in names of kernels; in those of Tensile, AMD's matrix products, the letter of the input follows the operands
_TYPES_IN_NAMES = (
    (re.compile(r"bf16|bfloat16|cijk_[a-z]+_[a-z]+_b", re.I), "bf16"),
    (re.compile(r"f16|half|cijk_[a-z]+_[a-z]+_h", re.I), "fp16"),
    (re.compile(r"f32|float|sgemm|cijk_[a-z]+_[a-z]+_s", re.I), "fp32"),
)


@dataclass(frozen=True)
class _Work:
    """Something that took time: a kernel, or an operator without the operators inside it.

    Attributes:
        words: what it is.
        dtype: dtype of its input; "" if unknown.
        name: its name in the trace.
        begin, microseconds: when, and for how long, both in microseconds.
    """

    words: str
    dtype: str
    name: str
    begin: float
    microseconds: float


def in_words(name: str, operator: str = "") -> str:
    """Return what a kernel is, from its name and that of the operator that launched it; ``other`` if unknown."""
    for each in (operator, name):
        lower = each.lower()
        found = next((words for pattern, words in _COMPILED if each and pattern.search(lower)), None)
        if found is not None:
            return found
    return "other"


def summarize(parts: Sequence[Sequence[Event]], label: str) -> dict[str, Any]:
    """Say where the time of recorded steps went.

    Args:
        parts: the events of each step, in which an annotation whose name begins with ``label`` spans the step.
        label: see ``parts``.

    Returns:
        ``seconds`` of all steps; ``kernels``: whether the GPU's kernels are recorded; ``slowest``: the kernels that
        took the most time, or without kernels the host's operators, with ``what`` they are, ``name``, ``share`` of
        ``seconds``, ``calls`` and ``seconds``; ``kinds``: share by what they are; ``idle``: share in which no kernel
        ran, None without kernels; ``host``: shares in which the host was inside ``operators``, of it ``waiting`` for
        the GPU, and outside of them, in ``python``.
    """
    total = operators = waiting = busy = 0.0
    works: list[_Work] = []
    kernels = any(event.get("cat") == "kernel" for events in parts for event in events)
    for events in parts:
        span = _span(events, label)
        total += span[1] - span[0]
        inside = [event for event in events if event.get("ph") == "X" and "dur" in event]
        host = [event for event in inside if event.get("cat") in _ON_HOST]
        operators += _covered(host, span)
        waiting += _covered((event for event in host if _WAITING.search(event["name"])), span)
        busy += _covered((event for event in inside if event.get("cat") in _ON_GPU), span)
        works += _kernels(inside) if kernels else _operators(inside)
    total = max(total, 1e-9)
    return {
        "seconds": total / 1e6,
        "kernels": kernels,
        "slowest": _slowest(works, total),
        "kinds": _kinds(works, total),
        "idle": 1 - busy / total if kernels else None,
        "host": {"operators": operators / total, "waiting": waiting / total, "python": 1 - operators / total},
    }


def _span(events: Iterable[Event], label: str) -> Span:
    for event in events:
        if event.get("cat") == "user_annotation" and event.get("name", "").startswith(label):
            return event["ts"], event["ts"] + event["dur"]
    return 0.0, 0.0


def _covered(events: Iterable[Event], within: Span) -> float:
    """Return how long at least one of ``events`` went on during ``within``."""
    covered, reached = 0.0, within[0]
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        begin, end = max(begin, reached), min(end, within[1])
        if end > begin:
            covered += end - begin
            reached = end
    return covered


def _kernels(events: Iterable[Event]) -> list[_Work]:
    """Return the work of the GPU; the operator that launched a kernel has its ``External id``."""
    events = list(events)
    launched = {event["args"].get("External id"): event for event in events if event.get("cat") == "cpu_op"}
    found = []
    for event in events:
        if event.get("cat") in _ON_GPU:
            operator = launched.get(event.get("args", {}).get("External id"), {})
            words = in_words(event["name"], operator.get("name", ""))
            dtype = _dtype(operator) or _dtype_in(event["name"])
            found.append(_Work(words, dtype, event["name"], event["ts"], event["dur"]))
    return found


def _operators(events: Iterable[Event]) -> list[_Work]:
    """Return the host's operators, each without the time of the operators inside it."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event["tid"]].append(event)
    found = []
    for thread in threads.values():
        thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        own = [event["dur"] for event in thread]
        outer: list[int] = []
        for i, event in enumerate(thread):
            while outer and thread[outer[-1]]["ts"] + thread[outer[-1]]["dur"] <= event["ts"]:
                outer.pop()
            if outer:
                own[outer[-1]] -= event["dur"]
            outer.append(i)
        for event, seconds in zip(thread, own, strict=True):
            name = event["name"]
            found.append(_Work(_host_words(name), _dtype(event), name, event["ts"], max(0.0, seconds)))
    return found


def _host_words(operator: str) -> str:
    """Return what the host does in ``operator`` outside of the operators inside it."""
    if (words := in_words(operator)) != "other":
        return words
    return (
        "view" if _VIEW.search(operator) else "backward outside of operators" if _BACKWARD.search(operator) else words
    )


def _dtype(operator: Event) -> str:
    types = operator.get("args", {}).get("Input type", ())
    return next((_TYPES[each] for each in types if each in _TYPES), "")


def _dtype_in(name: str) -> str:
    return next((dtype for pattern, dtype in _TYPES_IN_NAMES if pattern.search(name)), "")


def _slowest(works: Iterable[_Work], total: float) -> list[dict[str, Any]]:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for work in works:
        what = f"{work.words} ({work.dtype})" if work.dtype else work.words
        times[what, work.name].append(work.microseconds)
    first = sorted(times.items(), key=lambda item: (-sum(item[1]), item[0]))[:_SLOWEST]
    return [
        {"what": what, "name": name, "share": sum(each) / total, "calls": len(each), "seconds": sum(each) / 1e6}
        for (what, name), each in first
    ]


def _kinds(works: Iterable[_Work], total: float) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for work in works:
        found[work.words] += work.microseconds / total
    return dict(sorted(found.items(), key=lambda item: -item[1]))
