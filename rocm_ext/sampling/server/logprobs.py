"""Find out of which distribution a server's log-probs are.

vLLM and llama.cpp return those of temperature 1 without truncation. vLLM with ``--logprobs-mode processed_logprobs``
returns those of the distribution that it samples from. SGLang divides by the temperature but does not truncate, unless
``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set. The log-prob of the most probable token tells them apart.
"""

from collections.abc import Callable

from rocm_ext.base.errors import UserError
from rocm_ext.sampling.engine import Sampling

_CLEAR = 0.1  # nats; bf16 and other batches change a log-prob by about 0.01

PROBES = Sampling(1), Sampling(1, temperature=0.5), Sampling(1, top_p=0.01)


def check_logprobs(url: str, top: Callable[[Sampling], float | None], sampling: Sampling) -> None:
    """Check that a server returns the log-probs that ``sampling`` asks for.

    Args:
        url: of the server, for messages.
        top: asks the server for one token, the same prompt each time, and returns the log-prob of the most probable
            token; None: the answer has none.
        sampling: the settings of the run.

    Raises:
        UserError: the server returns those of another distribution, or does not show which it returns.
    """
    asked, temperature = sampling.logprobs_temperature, sampling.temperature
    truncated = sampling.top_k is not None or sampling.top_p not in (None, 1) or sampling.min_p is not None
    if temperature == asked == 1 and not truncated:
        return
    if asked not in (1, temperature):
        raise UserError(f"{url} cannot return log-probs of temperature {asked:g} for samples of {temperature:g}")
    plain, sharper, cut = map(top, PROBES)
    if plain is None or sharper is None or cut is None or plain > -_CLEAR:
        raise UserError(
            f"{url} does not show of which temperature its log-probs are; set temperature to 1, and top_k, top_p and "
            "min_p to null"
        )
    if truncated and cut - plain > _CLEAR:
        raise UserError(
            f"{url} returns log-probs after truncation, as vLLM does with --logprobs-mode processed_logprobs; set "
            "top_k, top_p and min_p to null"
        )
    scaled = sharper - plain > _CLEAR
    if temperature != 1 and asked == 1 and scaled:
        raise UserError(
            f"{url} returns log-probs of the sampling temperature, and those of temperature 1 are needed; start SGLang "
            "with SGLANG_RETURN_ORIGINAL_LOGPROB=1 and vLLM with --logprobs-mode raw_logprobs, or set temperature to 1"
        )
    if asked != 1 and not scaled:
        raise UserError(
            f"{url} returns log-probs of temperature 1, and those of temperature {asked:g} are needed; start vLLM with "
            "--logprobs-mode processed_logprobs, or set temperature to 1"
        )
