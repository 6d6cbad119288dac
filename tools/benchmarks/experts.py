"""A layer of experts against transformers' and PEFT's: ``python -m tools.benchmarks.experts``.

Times one forward and backward pass of a Qwen3-MoE layer's experts in three ways: this library's, transformers'
``grouped_mm`` (its default) and ``eager``. LoRA on experts is PEFT's ``target_parameters`` beside the latter two. The
ways take turns in one process, on other choices of experts in each round, as in training. The log-normal popularity of
experts follows routers' softmax over normal logits. First the ways must give the same outputs and gradients in fp32.
"""

import argparse
import time
import warnings
from functools import partial
from statistics import median

import peft
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from rocm_ext.model.hf.experts import SORTED
from rocm_ext.model.lora import ExpertLora
from tools.benchmarks.protocol import Failed, Ratio, take_turns

RANK, WEIGHTS = 16, ("gate_up_proj", "down_proj")
WAYS = (SORTED, "grouped_mm", "eager")
SIZES = [  # experts, chosen ones, width, width of an expert, tokens
    (8, 2, 256, 512, 512),
    (8, 2, 256, 512, 4096),
    (64, 4, 256, 512, 512),
    (64, 8, 256, 512, 4096),
    (128, 8, 256, 512, 512),
    (128, 8, 256, 512, 4096),
]


class Layer(nn.Module):
    """Experts below a module, as PEFT expects them."""

    def __init__(self, experts: int, width: int, inner: int, way: str, lora: bool) -> None:
        super().__init__()
        config = Qwen3MoeConfig(num_experts=experts, hidden_size=width, moe_intermediate_size=inner)
        config._experts_implementation = way
        self.experts = Qwen3MoeExperts(config).requires_grad_(False)
        for key in WEIGHTS if lora and way == SORTED else ():
            shape = getattr(self.experts, key).shape
            self.experts.add_module(key + ExpertLora.SUFFIX, ExpertLora(shape, False, RANK, RANK))

    def forward(self, *args: Tensor) -> Tensor:
        return self.experts(*args)


def build(
    way: str, lora: bool, dtype: torch.dtype, size: tuple[int, ...], device: str
) -> nn.Module:
    """Build the layer with the same weights in each way; LoRA stays in fp32."""
    experts, _, width, inner, _ = size
    layer: nn.Module = Layer(experts, width, inner, way, lora).to(device)
    rng = torch.Generator(device).manual_seed(0)
    for key in WEIGHTS:
        weight = layer.experts.get_parameter(key)
        weight.data = torch.randn(weight.shape, generator=rng, device=device).mul_(0.02).to(dtype)
    if lora and way != SORTED:
        config = peft.LoraConfig(
            r=RANK, lora_alpha=RANK, target_parameters=[f"experts.{key}" for key in WEIGHTS]
        )
        with warnings.catch_warnings(action="ignore"):
            layer = peft.get_peft_model(layer, config)
    return layer


def inputs(seed: int, dtype: torch.dtype, size: tuple[int, ...], device: str) -> tuple[Tensor, ...]:
    """Draw hidden states, chosen experts, their weights, and the output's gradient."""
    experts, chosen, width, _, tokens = size
    rng = torch.Generator(device).manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    weights, index = (some(tokens, experts) + some(experts) / 2).softmax(-1).topk(chosen)
    return (
        some(tokens, width).to(dtype).requires_grad_(),
        index,
        weights.to(dtype),
        some(tokens, width).to(dtype),
    )


def seconds(layer: nn.Module, data: tuple[Tensor, ...]) -> float:
    """Time a forward and backward pass."""
    began = time.perf_counter()
    layer(*data[:3]).backward(data[3])
    if data[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def check(size: tuple[int, ...], device: str) -> None:
    """Stop if frozen experts' outputs or gradients differ in fp32."""
    results = []
    for way in WAYS:
        data = inputs(0, torch.float32, size, device)
        out = build(way, False, torch.float32, size, device)(*data[:3])
        out.backward(data[3])
        results.append(torch.stack([out.detach(), data[0].grad]))  # type: ignore[list-item]
    ours = results[0].flatten(1).norm(dim=1)
    for way, other in zip(WAYS[1:], results[1:], strict=True):
        apart = float(((other - results[0]).flatten(1).norm(dim=1) / ours).max())
        if apart > 1e-5:
            raise Failed(
                f"{way} differs from ours by {apart:.1e} in outputs or gradients; nothing was timed"
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.experts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:], help="eager with LoRA is slow"
    )
    parser.add_argument(
        "--size", nargs=5, type=int, metavar=("EXPERTS", "CHOSEN", "WIDTH", "INNER", "TOKENS")
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16")
    )
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(
        f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}, {args.rounds} rounds\n"
    )
    print(
        "| experts | chosen | width | inner | tokens | dtype | LoRA on experts | ours |",
        " | ".join(args.ways),
        "|",
    )
    for size in [tuple(args.size)] if args.size else SIZES:
        check(size, device)
        for dtype in (getattr(torch, name) for name in args.dtype):
            for lora in (False, True):
                layers = {
                    way: build(way, lora, dtype, size, device) for way in (SORTED, *args.ways)
                }
                draw = partial(inputs, dtype=dtype, size=size, device=device)
                sides = {
                    way: (layer, iter(range(args.rounds + 1))) for way, layer in layers.items()
                }
                turns = take_turns(
                    sides, args.rounds + 1, lambda it, draw=draw: seconds(it[0], draw(next(it[1])))
                )
                times = {way: each[1:] for way, each in turns.items()}  # the first warms up
                cells = [f"{1e3 * median(times[SORTED]):.0f} ms"]
                cells += [Ratio.of(times[way], times[SORTED]).cell(" ×") for way in args.ways]
                line = [*map(str, size), str(dtype)[6:], "yes" if lora else "no", *cells]
                print("|", " | ".join(line), "|", flush=True)


if __name__ == "__main__":
    main()
