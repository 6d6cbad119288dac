"""transformers: ``… sample_transformers MODEL DTYPE MOST generate|continuous|judge``.

generate: one left-padded batch with ``num_return_sequences``. A ``StoppingCriteria`` ends rows, like the one for EOS.
transformers decodes all rows until the last one has ended.
continuous: the same as ``generate_batch`` with ``num_return_sequences``, which computes a prompt once for its samples,
but it keeps the manager, and every sample has a limit. All requests run at once; fewer were slower on a CPU.
judge: computes the probabilities of given answers.
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
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.utils import WorkloadHints

from tools.benchmarks.sides.sample import DEVICE, DTYPES, PAD, Answers, padded, serve
from tools.benchmarks.sides.talk import hear, pipe

MODEL = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=DTYPES[sys.argv[2]], attn_implementation="sdpa"
)
MODEL.to(DEVICE).eval()
MODEL.generation_config.eos_token_id = None
MOST = int(sys.argv[3])


class Traced(StoppingCriteria):
    """Ends each row at the trace's length."""

    def __init__(self, ends: torch.Tensor) -> None:
        self._ends = ends

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self._ends


def how(greedy: bool) -> dict:
    """Return the arguments of GenerationConfig."""
    return {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}


def generate(prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
    """Sample with ``model.generate``."""
    tokens = padded(prompts)
    width = tokens.shape[1]
    out = MODEL.generate(
        tokens, attention_mask=(tokens != PAD).long(), max_new_tokens=MOST, pad_token_id=PAD,
        num_return_sequences=len(trace) // len(prompts), **how(greedy),
        stopping_criteria=StoppingCriteriaList([Traced(torch.tensor(trace, device=DEVICE) + width)]),
    )  # fmt: skip
    return [row[width : width + length] for row, length in zip(out.tolist(), trace, strict=True)]


def continuous(prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
    """Sample with continuous batching; it keeps one manager per setting."""
    samples = len(trace) // len(prompts)
    if (greedy, samples) not in MANAGERS:
        while MANAGERS:
            MANAGERS.popitem()[1].stop()
        MANAGERS[greedy, samples] = Manager(len(prompts), samples, greedy)
    return MANAGERS[greedy, samples].generate(prompts, trace)


class Manager:
    """Continuous batching of ``prompts`` prompts with ``samples`` answers each."""

    def __init__(self, prompts: int, samples: int, greedy: bool) -> None:
        config = GenerationConfig(
            max_new_tokens=MOST, eos_token_id=-1, pad_token_id=PAD, num_return_sequences=samples,
            **how(greedy),
        )  # fmt: skip
        requests = prompts * samples
        blocks = (
            None if DEVICE.type == "cuda" else 2 * requests
        )  # on a CPU the default takes 60 % of the memory
        options = ContinuousBatchingConfig(num_blocks=blocks)
        self._manager = MODEL.init_continuous_batching(
            generation_config=config, continuous_batching_config=options,
            workload_hints=WorkloadHints(max_prompt_length=256, max_generated_length=MOST, num_requests=requests),
        )  # fmt: skip
        self._manager.warmup()
        self._manager.start()
        self._samples, self._run = samples, 0

    def stop(self) -> None:
        self._manager.stop(block=True)

    def generate(self, prompts: list[list[int]], trace: list[int]) -> Answers:
        """Add all requests, wait for their answers, and return them in order."""
        self._run += 1
        names = []
        for i, prompt in enumerate(prompts):
            name = f"{self._run}-{i}"
            # The request itself is the last sample; the others are its children and would inherit its limit.
            children = [f"{name}__child#{k}" for k in range(self._samples - 1)]
            names += [*children, name]
            LIMITS.update(zip(children, trace[i * self._samples :], strict=False))
            self._manager.add_request(
                prompt, request_id=name, max_new_tokens=trace[(i + 1) * self._samples - 1]
            )
        answers: dict[str, list[int]] = {}
        while len(answers) < len(names):
            if result := self._manager.get_result(timeout=1):
                if result.error:
                    raise RuntimeError(result.error)
                if result.is_finished():
                    answers[result.request_id] = list(result.generated_tokens)
            elif not self._manager.is_running():
                raise RuntimeError("the manager stopped")
        return [answers[name] for name in names]


def fork(self: RequestState, name: str) -> RequestState:
    """Fork a child and give it its limit."""
    child = FORK(self, name)
    child.max_new_tokens = child._new_tokens_limit = LIMITS[name]
    return child


FORK, RequestState.fork = RequestState.fork, fork
LIMITS: dict[str, int] = {}
MANAGERS: dict[tuple[bool, int], Manager] = {}


def judge() -> None:
    """Score given answers endlessly.

    For every token it sends log p and log p - E[log p]; for all tokens together the largest gap to the best token.
    """
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
            chosen = table.gather(-1, torch.tensor(answer, device=DEVICE)[:, None]).squeeze(-1)
            logprobs += chosen.tolist()
            surprise += (chosen - (table.exp() * table).sum(-1)).tolist()
            behind = max(behind, float((table.amax(-1) - chosen).max()))
        pipe().send({"logprobs": logprobs, "surprise": surprise, "behind": behind})


if __name__ == "__main__":
    way = sys.argv[4]
    judge() if way == "judge" else serve({"generate": generate, "continuous": continuous}[way])
