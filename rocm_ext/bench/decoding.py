"""Decoding steps of the config's model with random weights, by number of slots."""

from statistics import quantiles
from types import SimpleNamespace
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.bench.context import Bench, Skipped
from rocm_ext.bench.training import RandomWeights
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.model.attention import choose_attention, span_for
from rocm_ext.model.build import Weights, build_model, load_weights
from rocm_ext.model.sampler import copied_bytes, sampler_of
from rocm_ext.plan.memory import frozen_bytes
from rocm_ext.sampling import Request, Sampling
from rocm_ext.sampling.local import LocalSession
from rocm_ext.sampling.slots import slot_memory

_PROMPT = 64  # tokens
_WARM_UP, _STEPS = 8, 40  # the first steps also prefill, and capture graphs


class _Clocked(LocalSession):
    """Records the seconds of each step."""

    def _count(self, rows: int, slots: int, read: int, seconds: float) -> None:
        super()._count(rows, slots, read, seconds)
        self.steps = [*getattr(self, "steps", []), seconds]


def measure(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Answer tokens per second with all slots full."""
    slots, new = values["slots"], _WARM_UP + _STEPS
    decoder = _random_decoder(bench)
    vocabulary = decoder.tok_embeddings.num_embeddings
    requests = [
        Request(str(i), 0, i, tuple((i * 7 + j) % vocabulary for j in range(_PROMPT)), ()) for i in range(slots)
    ]
    never = SimpleNamespace(stop_tokens=[-1], decode=lambda ids, **_: "")
    graphs = bench.device.type == "cuda"
    with sampler_of(decoder) as made:
        length = span_for(bench.device, _PROMPT + new)
        memory = slot_memory(made, [_PROMPT] * slots, length, Sampling(new), graphs)
        bench.require(frozen_bytes(decoder) + copied_bytes(decoder) + memory.bytes(slots))
        session = _Clocked(made, never, lambda: bench.spec.budget, slots, graphs)
        list(session.generate(requests, Sampling(new)))
    low, middle, high = quantiles(session.steps[_WARM_UP:], n=4, method="inclusive")
    return {
        "value": slots / middle,
        "low": slots / high,
        "high": slots / low,
        "unit": "tokens/s",
        "seconds": middle,
        "context": _PROMPT + _WARM_UP + _STEPS / 2,
    }


def _random_decoder(bench: Bench) -> Any:
    if not hasattr(bench, "decoder"):
        try:
            bench.shape.check_sampling()
        except UserError as error:
            raise Skipped(str(error)) from error
        bench.require(frozen_bytes(bench.shape) + copied_bytes(bench.shape))
        decoder = build_model(bench.cfg.model, bench.dtype, 0, bench.device)
        choose_attention(decoder, bench.cfg.attention)
        weights = Weights(RandomWeights(decoder, bench.device), "random")
        load_weights(decoder, weights, Ranks(bench.device))
        bench.decoder = decoder  # type: ignore[attr-defined]
    return bench.decoder  # type: ignore[attr-defined]
