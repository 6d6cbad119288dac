"""transformers: ``… sample_transformers MODEL DTYPE MOST generate|continuous|judge``.

generate: one batch, left-padded, with ``num_return_sequences``. A ``StoppingCriteria`` tells which rows have ended, as
that for EOS does; all rows are decoded until the last one has ended.
continuous: the manager behind ``generate_batch``, which itself takes one limit for all, fed with each request's own.
judge: how probable given answers are.
"""

import sys

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from tests.benchmarks.sides.sample import DEVICE, DTYPES, PAD, Answers, padded, serve
from tests.benchmarks.sides.talk import hear, pipe

MODEL = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=DTYPES[sys.argv[2]]).to(DEVICE).eval()
MODEL.generation_config.eos_token_id = None
MOST = int(sys.argv[3])


class Traced(StoppingCriteria):
    """Ends each row where the trace says."""

    def __init__(self, ends: torch.Tensor) -> None:
        self._ends = ends

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self._ends


def how(greedy: bool) -> dict:
    """Arguments of GenerationConfig."""
    return {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}


def generate(prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
    tokens = padded(prompts)
    width = tokens.shape[1]
    out = MODEL.generate(
        tokens, attention_mask=(tokens != PAD).long(), max_new_tokens=MOST, pad_token_id=PAD,
        num_return_sequences=len(trace) // len(prompts), **how(greedy),
        stopping_criteria=StoppingCriteriaList([Traced(torch.tensor(trace, device=DEVICE) + width)]),
    )  # fmt: skip
    return [row[width : width + length] for row, length in zip(out.tolist(), trace, strict=True)]


def continuous(prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
    samples = len(trace) // len(prompts)
    config = GenerationConfig(max_new_tokens=MOST, eos_token_id=-1, pad_token_id=PAD, **how(greedy))
    # its cache as large as ours may get, not 60 % of the machine's memory
    blocks = sum(-(-(len(prompts[i // samples]) + length) // 256) for i, length in enumerate(trace))
    options = ContinuousBatchingConfig(num_blocks=blocks + 8, max_batch_tokens=2048)
    found: dict[str, list[int]] = {}
    with MODEL.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=options, block=True, timeout=5, warmup=False
    ) as manager:
        names = [
            manager.add_request(prompts[i // samples], request_id=str(i), max_new_tokens=length)
            for i, length in enumerate(trace)
        ]
        while len(found) < len(names):
            if result := manager.get_result(timeout=1):
                if result.error:
                    raise RuntimeError(result.error)
                if result.is_finished():
                    found[result.request_id] = list(result.generated_tokens)
            elif not manager.is_running():
                raise RuntimeError("the manager stopped")
    return [found[name] for name in names]


def judge() -> None:
    """Of every token of given answers: log p, and by how much it is above its mean; the largest gap to the best."""
    while True:
        order = hear()
        prompts, answers = order["prompts"], order["answers"]
        logprobs, surprise, behind = [], [], 0.0
        samples = len(answers) // len(prompts)
        for index, answer in enumerate(answers):
            prompt = prompts[index // samples]
            with torch.no_grad():
                tokens = torch.tensor([prompt + answer[:-1]], device=DEVICE)
                logits = MODEL(tokens).logits[0, len(prompt) - 1 :].float()
            table = logits.log_softmax(-1)
            found = table.gather(-1, torch.tensor(answer, device=DEVICE)[:, None]).squeeze(-1)
            logprobs += found.tolist()
            surprise += (found - (table.exp() * table).sum(-1)).tolist()
            behind = max(behind, float((table.amax(-1) - found).max()))
        pipe().send({"logprobs": logprobs, "surprise": surprise, "behind": behind})


if __name__ == "__main__":
    way = sys.argv[4]
    judge() if way == "judge" else serve({"generate": generate, "continuous": continuous}[way])
