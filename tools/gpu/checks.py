"""Checks of arithmetic, attention and decoding on the device."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rocm_ext.bench import probes
from rocm_ext.bench.sweep import COPIES
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.machine import numerics
from rocm_ext.machine.detect import detect
from rocm_ext.machine.numerics import dtype_name
from rocm_ext.model.attention import Lengths, attend
from rocm_ext.model.build import Weights, build_model, load_weights
from rocm_ext.model.lora import adapters
from rocm_ext.model.sampler import sampler_of
from rocm_ext.sampling import Request, Sampling
from rocm_ext.sampling.local import LocalSession
from tools.gpu.here import Here, Row, check, speed
from tools.gpu.training import SeededWeights

HEADS = ((64, 14), (128, 28))  # head_dim and heads of Qwen2.5 0.5B and 7B
ABSENT = ("No available kernel", "No viable backend")  # torch's words on a GPU and on a CPU
TOLERANCES = {
    torch.bfloat16: 2e-2,
    torch.float16: 5e-3,
    torch.float32: 2e-3,
}  # relative to the largest value
SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}  # fmt: skip
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    # the last: flash-linear-attention tunes its kernels for minutes at first
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
}
BEHIND = {
    torch.float32: 1e-3,
    torch.bfloat16: 0.5,
}  # a greedy token's log-prob below the best one's


def numeric(here: Here) -> Iterator[Row]:
    """The canaries of ``startup_checks``, for all dtypes and the heads of both models."""
    machine, device = detect(), here.torch_device
    dtypes = [torch.float32, *[torch.bfloat16] * machine.bf16, *[torch.float16] * here.gpu]
    for dtype in dtypes:
        for head_dim, heads in HEADS[: 1 if here.tiny else 2]:
            canaries = numerics.canaries(machine, device, dtype, head_dim, heads)
            wrong = [
                f"{canary.name}: {canary.found}"
                for canary in canaries
                if not canary.ok and canary.fatal
            ]
            slow = [canary.found for canary in canaries if not canary.ok and not canary.fatal]
            yield check(f"canaries, {dtype_name(dtype)}, head_dim {head_dim}", not wrong,
                        "; ".join(wrong or slow) or f"{len(canaries)} hold")  # fmt: skip


def attention(here: Here) -> Iterator[Row]:
    """Torch's attention kernels agree with plain matrix products in fp32, forward and backward; packed rows too."""
    device, native = here.torch_device, detect().bf16
    for head_dim, heads in HEADS:
        for dtype in (torch.bfloat16, torch.float32) if native else (torch.float32,):
            rng = torch.Generator().manual_seed(0)
            shape = (4, 1, 2 if here.tiny else heads, 80 if here.tiny else 333, head_dim)
            qkvg = torch.randn(shape, generator=rng).to(device, dtype)
            expected = _with_gradients(_plain, qkvg.float())
            for name, kernel in numerics.SDPA_KERNELS.items():
                what = f"{name} attention, {dtype_name(dtype)}, head_dim {head_dim}"
                with sdpa_kernel(kernel):
                    try:
                        result = _with_gradients(
                            partial(scaled_dot_product_attention, is_causal=True), qkvg
                        )
                    except RuntimeError as error:
                        if not any(said in str(error) for said in ABSENT):
                            raise
                        yield {"what": what, "ok": None, "found": "no such kernel here"}
                        continue
                yield _close(what, result, expected, dtype)
            yield from _packed(here, dtype, head_dim, heads)


def _packed(here: Here, dtype: torch.dtype, head_dim: int, heads: int) -> Iterator[Row]:
    """Packed rows of which two share their beginning with the one before, as pairs do."""
    lengths = Lengths((60, 17, 33, 50, 21), (0, 43, 0, 0, 29))
    rng = torch.Generator().manual_seed(1)
    kv_heads = 1 if here.tiny else heads // 7
    heads = 2 if here.tiny else heads
    q, k, v = (
        torch.randn(1, sum(lengths.values), count, head_dim, generator=rng).to(
            here.torch_device, dtype
        )
        for count in (heads, kv_heads, kv_heads)
    )
    result = attend(q, k, v, lengths)
    expected, first = [], 0
    wide = [t.float().repeat_interleave(heads // t.shape[2], dim=2) for t in (q, k, v)]
    begun = 0
    for count, shared in zip(lengths.values, lengths.shared, strict=True):
        begun = begun if shared else first
        parts = [
            torch.cat([t[:, begun : begun + shared], t[:, first : first + count]], dim=1).transpose(
                1, 2
            )
            for t in wide
        ]
        expected.append(_plain(*parts)[:, :, shared:].transpose(1, 2))
        first += count
    yield _close(f"packed rows with shared beginnings, {dtype_name(dtype)}, head_dim {head_dim}", [result],
                 [torch.cat(expected, dim=1)], dtype)  # fmt: skip


def _with_gradients(attention: Callable[..., Tensor], qkvg: Tensor) -> list[Tensor]:
    q, k, v, grad = qkvg.unbind(0)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=-1) @ v


def _close(
    what: str, result: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype
) -> Row:
    apart = max(
        float((a.float() - b).abs().max() / b.abs().max())
        for a, b in zip(result, expected, strict=True)
    )
    return check(what, apart <= TOLERANCES[dtype], f"off by {apart:.1e} at most")


def decoding(here: Here) -> Iterator[Row]:
    """Greedy tokens with graphs, without graphs, and by the training forward pass.

    The adapter's weights are random, too. A token may differ where two are about equally probable; then it must be
    about as probable as the best one.
    """
    bench = here.bench("0.5b")
    yield from _decoding(
        here, "", bench.cfg.model, [torch.float32, *[torch.bfloat16] * bench.machine.bf16]
    )


def decoding_transformers(here: Here) -> Iterator[Row]:
    """The same of small models that transformers computes: windows, recurrent states, and experts."""
    from transformers import AutoConfig  # not every machine has it

    for name, values in TRANSFORMERS.items():
        folder = here.folder / name
        AutoConfig.for_model(name, **SMALL, **values).save_pretrained(folder)
        model = OmegaConf.create(
            {"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": str(folder)}
        )
        yield from _decoding(
            here, f" of {name}", model, [torch.float32, *[torch.bfloat16] * detect().bf16]
        )


def _decoding(here: Here, of: str, model: Any, dtypes: Sequence[torch.dtype]) -> Iterator[Row]:
    for dtype in dtypes:
        decoder = random_decoder(model, dtype, here.torch_device)
        prompts = _prompts(decoder.tok_embeddings.num_embeddings, 16, 90)
        answers: dict[str, list[list[int]]] = {}
        for graphs in (False, True) if here.gpu else (False,):
            name = "with graphs" if graphs else "without graphs"
            answers[name], logprobs = _greedy(
                decoder, prompts, 8 if here.tiny else 40, graphs, merge=None
            )
            behind, apart = _judge(decoder, prompts, answers[name], logprobs)
            limit = BEHIND[dtype]
            yield check(f"greedy tokens{of} {name} are the training forward's, {dtype_name(dtype)}", behind <= limit,
                        f"at most {behind:.1e} below the best log-prob")  # fmt: skip
            yield check(f"log-probs{of} {name} are the training forward's, {dtype_name(dtype)}", apart <= limit / 5,
                        f"off by {apart:.1e} on average")  # fmt: skip
        if here.gpu:
            same = _share(answers["with graphs"], answers["without graphs"])
            row = check(
                f"tokens{of} with and without graphs are equal, {dtype_name(dtype)}",
                same >= 0.95,
                f"{same:.1%}",
            )
            yield (
                row if dtype == torch.float32 else {**row, "ok": None}
            )  # in bf16 ties are frequent


def random_decoder(model: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a decoder with random weights and a random adapter."""
    decoder = build_model(model, dtype, 0, device)
    load_weights(decoder, Weights(SeededWeights(decoder, device), "random"), Ranks(device))
    _move_adapter(decoder, 2)
    return decoder.eval()


@torch.no_grad()
def _move_adapter(decoder: Any, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for _, layer in adapters(decoder):
        layer.lora_b.weight.copy_(0.02 * torch.randn(layer.lora_b.weight.shape, generator=rng))


def _prompts(vocabulary: int, count: int, longest: int) -> list[tuple[int, ...]]:
    rng = torch.Generator().manual_seed(3)
    return [
        tuple(torch.randint(vocabulary, (5 + i * (longest - 5) // count,), generator=rng).tolist())
        for i in range(count)
    ]


def _greedy(
    decoder: Any, prompts: Sequence[tuple[int, ...]], length: int, graphs: bool, merge: bool | None
) -> tuple[list[list[int]], list[list[float]]]:
    never = SimpleNamespace(stop_tokens=[-1], decode=lambda ids, **_: "")
    requests = [Request(str(i), 0, i, prompt, ()) for i, prompt in enumerate(prompts)]
    with sampler_of(decoder, merge) as made:
        session = LocalSession(made, never, lambda: 2**32, None, graphs)
        done = list(session.generate(requests, Sampling(length, 0.0)))
    done.sort(key=lambda completion: int(completion.request.prompt_id))
    return [completion.tokens for completion in done], [completion.logprobs for completion in done]


@torch.no_grad()
def _judge(
    decoder: Any,
    prompts: Sequence[tuple[int, ...]],
    answers: Sequence[list[int]],
    logprobs: Sequence[list[float]],
) -> tuple[float, float]:
    """Return how far tokens are below the best log-prob at most, and how far reported log-probs are off on average."""
    behind, apart, device = 0.0, [], next(decoder.parameters()).device
    for prompt, answer, said in zip(prompts, answers, logprobs, strict=True):
        tokens = torch.tensor([[*prompt, *answer[:-1]]], device=device)
        table = decoder(tokens)[0, len(prompt) - 1 :].float().log_softmax(-1)
        chosen = table.gather(-1, torch.tensor(answer, device=device)[:, None]).squeeze(-1)
        behind = max(behind, float((table.amax(-1) - chosen).max()))
        apart += (chosen.cpu() - torch.tensor(said)).abs().tolist()
    return behind, sum(apart) / len(apart)


def _share(result: Sequence[list[int]], expected: Sequence[list[int]]) -> float:
    pairs = [pair for a, b in zip(result, expected, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def merging(here: Here, size: str) -> Iterator[Row]:
    """Merge the adapter into the sampler's layout, refresh it after a change, and leave the model as it was."""
    bench = here.bench(size)
    bench.require(4 * sum(p.numel() for p in bench.shape.parameters()) * bench.dtype.itemsize)
    decoder = random_decoder(bench.cfg.model, bench.dtype, bench.device)
    before = _sums(decoder)
    clock = _Clock(bench.device)
    for merge in (True, False):
        how = "merged" if merge else "separate"
        _move_adapter(decoder, 2)
        with sampler_of(decoder, merge) as made:
            yield speed(
                f"layout of {here.size(size)} for sampling, adapter {how}", clock.lap(), "s"
            )
            _move_adapter(decoder, 4)
            clock.lap()
            made.refresh()
            yield speed(f"refresh of the adapter of {here.size(size)}, {how}", clock.lap(), "s")
            fresh = decoder.sampler(merge)
            pairs = zip(made.decoder.parameters(), fresh.decoder.parameters(), strict=True)
            same = all(torch.equal(a, b) for a, b in pairs)
            yield check(
                f"a refreshed layout equals a new one, adapter {how}",
                same,
                "bit for bit" if same else "not",
            )
            del fresh
        clock.lap()
    _move_adapter(decoder, 2)
    yield check(
        "sampling leaves the model as it was", _sums(decoder) == before, "sums of all parameters"
    )


class _Clock:
    """Seconds since the last lap."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._began = device, 0.0
        self.lap()

    def lap(self) -> float:
        probes.wait(self._device)
        began, self._began = self._began, time.perf_counter()
        return self._began - began


def _sums(decoder: Any) -> list[float]:
    return [float(p.detach().double().sum()) for p in decoder.parameters()]


def bandwidths(here: Here) -> Iterator[Row]:
    """Matrix products, and copies on the device and from and to the host, as ``rocm-ext bench`` measures them."""
    bench = here.bench("7b")
    for dtype in ["fp32", *["bf16"] * bench.machine.bf16, *["fp16"] * here.gpu]:
        product = probes.gemm(bench, {"direction": "forward", "dtype": dtype})
        shape = " x ".join(map(str, product["shape"]))
        yield speed(f"matrix product, {dtype}", product["value"] / 1e12, "TFLOP/s", shape)
    for what in COPIES if here.gpu else ("device copy",):
        if "other" not in COPIES[what]:
            result = probes.bandwidth(bench, {"what": what})["value"]
            yield speed(
                what, result / 1e9, "GB/s", **({"copy": result} if what == "device copy" else {})
            )


def decode_speed(here: Here, size: str) -> Iterator[Row]:
    """Decoding steps with all slots full, and the share of the copy bandwidth at which they read weights and cache."""
    bench = here.bench(size)
    copy = here.of("machine", "copy")
    for slots in (8,) if here.tiny else (8, 64, 256):
        result = probes.decoding(bench, {"slots": slots})
        sampler = bench.shape.sampler()
        read = sampler.weight_bytes + slots * sampler.cache_bytes(result["context"])
        share = (
            "" if copy is None else f", {read / result['seconds'] / copy:.0%} of the copy bandwidth"
        )
        yield speed(f"decode of {here.size(size)}, {slots} slots", result["value"], "tokens/s",
                    f"{1e3 * result['seconds']:.2f} ms a step, {read / result['seconds'] / 1e9:,.0f} GB/s{share}",
                    slots=slots, seconds=result["seconds"])  # fmt: skip
