"""A decoding step of the config's model with random weights, by answers decoded at once."""

from statistics import median
from types import SimpleNamespace
from typing import Any

from rocm_ext import model
from rocm_ext.bench.context import Bench
from rocm_ext.bench.training import RandomWeights
from rocm_ext.generation import Request, Sampling
from rocm_ext.generation.decoder import copied_bytes, merged
from rocm_ext.generation.local import LocalSession, slot_memory
from rocm_ext.memory import frozen_bytes
from rocm_ext.ranks import Ranks

_PROMPT = 64  # tokens
_WARM, _LONG = 4, 36  # tokens of two runs, whose difference is steps alone


def measure(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Answer tokens per second with all slots full."""
    slots = values["slots"]
    decoder = _random_decoder(bench)
    vocabulary = decoder.tok_embeddings.num_embeddings
    requests = [
        Request(str(i), 0, i, tuple((i * 7 + j) % vocabulary for j in range(_PROMPT)), ()) for i in range(slots)
    ]
    never = SimpleNamespace(stop_tokens=[-1], decode=lambda ids, **_: "")
    graphs = bench.device.type == "cuda"
    with merged(decoder) as made:
        memory = slot_memory(made, [_PROMPT] * slots, _PROMPT + _LONG, Sampling(_LONG), graphs)
        bench.require(frozen_bytes(decoder) + copied_bytes(decoder) + memory.bytes(slots))

        def seconds(tokens: int) -> float:
            session = LocalSession(made, never, lambda: bench.spec.budget, slots, graphs)
            list(session.generate(requests, Sampling(tokens)))
            stats = session.stats()
            return stats["tokens"] / stats["tokens_per_second"]

        seconds(_WARM)
        steps = [(seconds(_LONG) - seconds(_WARM)) / (_LONG - _WARM) for _ in range(5)]
    times = sorted(max(step, 1e-9) for step in steps)
    return {"value": slots / median(times), "low": slots / times[-2], "high": slots / times[1], "unit": "tokens/s",
            "seconds": median(times), "context": _PROMPT + (_WARM + _LONG) / 2}  # fmt: skip


def _random_decoder(bench: Bench) -> Any:
    if not hasattr(bench, "decoder"):
        bench.require(frozen_bytes(bench.shape) + copied_bytes(bench.shape))
        decoder = model.build(bench.cfg.model, bench.dtype, 0, bench.device)
        weights = model.Weights(RandomWeights(decoder, bench.device), "random")
        model.load_weights(decoder, weights, Ranks(bench.device))
        bench.decoder = decoder  # type: ignore[attr-defined]
    return bench.decoder  # type: ignore[attr-defined]
