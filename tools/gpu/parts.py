"""The parts, the most telling first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

# sides of tools.benchmarks
STOCK, STOCK_8, STOCK_COMPILED = "torchtune as shipped", "torchtune batch 8", "torchtune compiled"
TRL, TRL_FIRST = "TRL + PEFT", "TRL + PEFT, reference first"
CONTINUOUS, GENERATE = "transformers continuous batching", "transformers generate"
ENGINE, VLLM = "transformers' modules", "vLLM"
BLOCKS = "gguf", "transformers"  # packages that write and unpack them


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        name: on the command line.
        kind: check or speed.
        function: ``module:function`` in :mod:`tools.gpu`; it gets a :class:`~tools.gpu.here.Here`.
        seconds: limit.
        arguments: of the function.
        needs: packages.
        cpu: whether it runs on a CPU, too.
        tiny: whether it differs from other parts where models are small.
    """

    name: str
    kind: str
    function: str
    seconds: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    cpu: bool = True
    tiny: bool = True


def _train(
    name: str, work: str, size: str, peer: str | None, seconds: float, *needs: str, at_once: int = 8, **more: bool
) -> Part:  # fmt: skip
    arguments = {
        "work": work,
        "size": size,
        "peer": peer,
        "gate": size == "0.5b",
        "at_once": at_once,
    }
    return Part(name, "speed", "sides:train", seconds, arguments, ("transformers", *needs), **more)


def _sample(
    name: str, size: str, peer: str | None, seconds: float, *needs: str, **more: bool
) -> Part:
    arguments = {"size": size, "peer": peer, "gate": size == "0.5b"}
    return Part(name, "speed", "sides:sample", seconds, arguments, ("transformers", *needs), **more)


def _run(name: str, recipe: str) -> Part:
    return Part(name, "check", "runs:resumed", 240, {"recipe": recipe})


def _step(name: str, recipe: str, size: str, **more: str) -> Part:
    arguments = {"recipe": recipe, "size": size, **more}
    return Part(name, "speed", "speeds:step", 240, arguments, ("transformers",))


PARTS = (
    Part("machine", "speed", "checks:bandwidths", 60),
    Part("numerics", "check", "checks:numeric", 60),
    Part("decoding", "check", "checks:decoding", 120),
    Part(
        "decoding-transformers",
        "check",
        "checks:decoding_transformers",
        300,
        needs=("transformers",),
    ),
    _train("sft-0.5b", "sft", "0.5b", None, 180),
    _train("sft-0.5b-torchtune", "sft", "0.5b", STOCK, 120),
    _train("sft-0.5b-trl", "sft", "0.5b", TRL, 120, "trl", "peft"),
    _sample("sampling-0.5b", "0.5b", None, 120),
    _sample("sampling-0.5b-continuous", "0.5b", CONTINUOUS, 180),
    _sample("sampling-0.5b-vllm", "0.5b", VLLM, 240, "vllm"),
    Part("memory", "check", "training:memory", 120, {"size": "0.5b"}),
    _train("sft-7b", "sft", "7b", None, 240, tiny=False),
    _train("sft-7b-32", "sft", "7b", None, 240, at_once=32, tiny=False),
    Part(
        "profile-sft-7b",
        "speed",
        "speeds:profile",
        180,
        {"size": "7b", "rows": 32},
        ("transformers",),
    ),
    _train("sft-7b-torchtune", "sft", "7b", STOCK, 240, tiny=False),
    _train("sft-7b-trl", "sft", "7b", TRL, 180, "trl", "peft", tiny=False),
    Part("decode-7b", "speed", "checks:decode_speed", 120, {"size": "7b"}),
    _sample("sampling-7b", "7b", None, 150, tiny=False),
    _sample("sampling-7b-continuous", "7b", CONTINUOUS, 240, tiny=False),
    _sample("sampling-7b-vllm", "7b", VLLM, 300, "vllm", tiny=False),
    Part("attention", "check", "checks:attention", 60),
    Part("dtypes", "check", "training:dtypes", 90),
    Part("compile", "check", "training:compiled", 150, cpu=False),
    _run("run-sft", "lora_finetune_rocm"),
    _run("run-raft", "raft_rocm"),
    _run("run-grpo", "grpo_rocm"),
    _run("run-dpo", "dpo_rocm"),
    _run("run-distil", "distil_rocm"),
    _step("grpo-0.5b", "grpo_rocm", "0.5b"),
    _step("raft-0.5b", "raft_rocm", "0.5b"),
    _step("distil-4b", "distil_rocm", "qwen3-4b", teacher="qwen3-8b"),
    Part("merge-7b", "check", "checks:merging", 120, {"size": "7b"}),
    Part("checkpointing", "check", "training:checkpointing", 90),
    Part("offloading", "check", "training:offloading", 90, cpu=False),
    Part("four-bit", "check", "training:four_bit", 90),
    Part("gguf", "check", "training:blocks", 60, needs=BLOCKS),
    Part("gguf-0.5b", "speed", "training:gguf", 120, {"size": "0.5b"}, BLOCKS),
    Part("gguf-7b", "speed", "training:gguf", 180, {"size": "7b"}, BLOCKS, tiny=False),
    _sample("sampling-0.5b-engine", "0.5b", ENGINE, 150),
    Part("decode-0.5b", "speed", "checks:decode_speed", 60, {"size": "0.5b"}, tiny=False),
    _train("dpo-0.5b", "dpo", "0.5b", None, 150),
    _train("dpo-0.5b-trl", "dpo", "0.5b", TRL_FIRST, 150, "trl", "peft"),
    _train("dpo-0.5b-torchtune", "dpo", "0.5b", STOCK, 150, cpu=False),
    Part("memory-7b", "check", "training:memory", 180, {"size": "7b"}, tiny=False),
    _train("sft-0.5b-torchtune-8", "sft", "0.5b", STOCK_8, 120, tiny=False),
    _train("sft-0.5b-compiled", "sft", "0.5b", STOCK_COMPILED, 180, cpu=False),
    _sample("sampling-0.5b-generate", "0.5b", GENERATE, 240, cpu=False),
)


def chosen(patterns: Sequence[str]) -> list[Part]:
    """Return the parts that ``patterns`` name: names, their beginnings, ``*`` patterns, or ``checks`` and ``speed``.

    Raises:
        KeyError: a pattern names no part.
    """
    names: set[str] = set()
    for pattern in patterns:
        named = {
            part.name
            for part in PARTS
            if part.kind == pattern.removesuffix("s") or _names(pattern, part.name)
        }
        if not named:
            raise KeyError(pattern)
        names |= named
    return [part for part in PARTS if part.name in names or not patterns]


def _names(pattern: str, name: str) -> bool:
    return fnmatch(name, pattern) or name == pattern or name.startswith(f"{pattern}-")
