"""Sampling in this process from models that transformers computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import log
from rocm_ext.machine.trace import Trace
from rocm_ext.model.foreign import ForeignDecoder
from rocm_ext.sampling.local import LocalEngine, span_for

_LOCAL, _TRANSFORMERS = (f"rocm_ext.sampling.{name}" for name in ("LocalEngine", "TransformersEngine"))


class TransformersEngine(LocalEngine):
    """Samples from the model under training, by transformers' forward pass and our loop.

    Batching, seeds and log-probs are those of :class:`LocalEngine`. Steps do not run as graphs.

    Args:
        slots: samples decoded at once; None: as many as memory allows, up to the number beyond which more gain
            nothing.
        merge: add the adapter to the weights; None: only to fp32 weights.
        decoder: a model that transformers computes, with or without adapters.
        tokenizer: gives ``stop_tokens``.
        free_memory: returns the free bytes on the device.
        trace: records steps of sampling, see ``profile_steps``.

    Raises:
        UserError: ``slots`` is out of range, or the model has a native decoder.
    """

    def __init__(
        self,
        slots: int | None = None,
        merge: bool | None = None,
        *,
        decoder: Any,
        tokenizer: Any,
        free_memory: Callable[[], int],
        trace: Trace | None = None,
    ) -> None:
        given: dict[str, Any] = {"decoder": decoder, "tokenizer": tokenizer, "free_memory": free_memory}
        super().__init__(slots, False, merge, **given, trace=trace)

    def _check_kind(self, decoder: Any) -> None:
        if not isinstance(decoder, ForeignDecoder):
            raise UserError(
                "engine TransformersEngine samples from models that transformers computes, and this one has a native "
                "decoder; use rocm_ext.sampling.LocalEngine"
            )

    @property
    def max_seq_len(self) -> int:
        """Positions of the longest prompt with its answer; with LongRoPE, those of short rows."""
        return self._decoder.check_sampling()

    def _check_family(self) -> None:
        self._decoder.check_sampling()

    def layout_bytes(self) -> int:
        """Upper bound on the bytes of weights that a session copies."""
        return self._decoder.copied_bytes(self._merge)

    @contextmanager
    def _copied(self) -> Iterator[Any]:
        sampler = sampler_of(self._decoder, self._merge, self._decoder.tok_embeddings.weight.device)
        try:
            yield sampler
        finally:
            sampler.free()


def sampler_of(decoder: ForeignDecoder, merge: bool | None, device: torch.device) -> Any:
    """Return a model's copy for sampling on ``device``; see :meth:`ForeignDecoder.sampler`."""
    return decoder.sampler(merge, partial(span_for, device), device.type != "cpu")


def use_fitting_engine(cfg: DictConfig, decoder: Any) -> None:
    """Replace ``LocalEngine``, which is the default, by ``TransformersEngine`` where transformers computes the model.

    Args:
        cfg: config of ``raft_rocm``; its ``engine`` changes.
        decoder: the model.
    """
    if isinstance(decoder, ForeignDecoder) and cfg.engine[config.COMPONENT] == _LOCAL:
        cfg.engine[config.COMPONENT] = _TRANSFORMERS
        log.info("engine: TransformersEngine, because transformers computes this model")
