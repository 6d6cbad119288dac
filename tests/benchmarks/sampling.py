"""Our sampler against ``transformers`` and torchtune: seconds for the same answers to the same prompts.

    python -m tests.benchmarks.sampling --vocab 32768 152064

Work: 16 prompts of GSM8K's lengths, 8 samples each at temperature 1 from the whole vocabulary, at most 256
tokens. How long each answer gets is a trace, drawn once (log-normal, median 67, sigma 0.7), that every side
is given in its own way:

- ours: each sample has the trace's limit in place of ``max_new_tokens``, looked at when it is reached; slots
  are made for 256 tokens.
- transformers: ``generate`` with ``num_return_sequences``, left-padded. A ``StoppingCriteria`` tells which
  rows have ended, as that for EOS does; it decodes all rows until the last one has.
- torchtune: ``generation.generate`` with a local cache, left-padded, as its PPO recipe calls it. It decodes
  all rows until the last has ended, so it is told to make that many tokens, which spares it looking for stop
  tokens. It also gathers the logits of all steps; ``torchtune lean`` keeps it from that, by its own hook.

So each side computes every answer to its own end, and only tokens up to there count. Nobody turns tokens
into text. Rows whose logits do not fit into half of the memory are given to torchtune in several batches.

Each side has a process of its own, on the same weights, with the same number of threads; sides alternate
A B C C B A. Where other work shares the machine, processor time with ``--threads 1`` tells most. No time is
believed before greedy answers agree (bf16: are as probable as the best ones) and sampled ones are as probable
as the model says: the mean of log p - E[log p] is zero within its error.
"""

import argparse
import os
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, MOST = 16, 8, 256
PAD = 0  # in no prompt
PEERS = ("transformers", "torchtune lean", "torchtune")
Answers = list[list[int]]  # of prompt 0: sample 0, 1, ...; of prompt 1: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--repeats", type=int, default=4, help="of every side; an even number balances the order")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=PEERS, default=PEERS[:2])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for vocab in args.vocab:
            compare(Path(folder) / str(vocab), vocab, ("ours", *args.sides), args)


def work(vocab: int) -> tuple[list[list[int]], list[int]]:
    """The prompts' tokens, and the length of every answer."""
    import numpy as np

    rng = np.random.default_rng(1)
    lengths = np.exp(rng.normal(np.log(95), 0.35, PROMPTS)).astype(int).clip(40, 250)
    prompts = [rng.integers(PAD + 1, vocab, n).tolist() for n in lengths]
    trace = np.exp(rng.normal(np.log(67), 0.7, PROMPTS * SAMPLES)).astype(int).clip(2, MOST)
    return prompts, trace.tolist()


def compare(folder: Path, vocab: int, names: tuple[str, ...], args: argparse.Namespace) -> None:
    """Gate, time and print one vocabulary."""
    from tests.tiny import write_model

    heads = args.width // 64
    write_model(
        folder, vocab=vocab, tie_word_embeddings=True, initializer_range=0.06, hidden_size=args.width,
        intermediate_size=args.width * 11 // 4, num_hidden_layers=args.layers, num_attention_heads=heads,
        num_key_value_heads=heads // 3 or 1, max_position_embeddings=2048,
    )  # fmt: skip
    prompts, trace = work(vocab)
    context = get_context("spawn")  # a process each, so that each has its own peak of memory
    sides = {n: ProcessPoolExecutor(1, context, start, (n, folder, args.dtype, args.threads)) for n in names}
    judge = ProcessPoolExecutor(1, context, start, ("judge", folder, "fp32", args.threads))
    gate(sides, judge, prompts, args.dtype)
    judge.shutdown()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    peaks = {}
    for repeat in range(args.repeats):
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            answers, seconds, peaks[name] = sides[name].submit(run, prompts, trace, False).result()
            assert [len(answer) for answer in answers] == trace, name
            times[name].append(seconds)
    for pool in sides.values():
        pool.shutdown()
    tokens, load = sum(trace), " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(
        f"vocabulary {vocab:,}, {args.dtype}, {args.layers} layers of {args.width}, {args.threads} threads, "
        f"load {load}\n{tokens:,} tokens, {max(trace)} in the longest answer: a batch that waits for it computes "
        f"{len(trace) * max(trace) / tokens:.2f}x as many\n"
        f"{'':<15}{'seconds':>9}{'tokens/s':>10}{'peak GiB':>10}   ours is as fast: wall time, processor time (range)"
    )
    for name, runs in times.items():
        wall = statistics.median(wall for wall, _ in runs)
        ratios = "" if name == "ours" else "   " + "   ".join(ratio(runs, times["ours"], clock) for clock in (0, 1))
        print(f"{name:<15}{wall:>9.1f}{tokens / wall:>10.0f}{peaks[name] / 2**30:>10.2f}{ratios}", flush=True)


def ratio(theirs: list[tuple[float, float]], ours: list[tuple[float, float]], clock: int) -> str:
    """Median and range over the repeats of their time by ours."""
    ratios = [a[clock] / b[clock] for a, b in zip(theirs, ours, strict=True)]
    return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}–{max(ratios):.2f})"


def gate(sides: dict[str, Any], judge: Any, prompts: list[list[int]], dtype: str) -> None:
    """Exit unless all sides answer as the model does. Warms them up, too."""
    greedy = {name: pool.submit(run, prompts, [24] * PROMPTS, True).result()[0] for name, pool in sides.items()}
    for name, answers in greedy.items():
        if dtype == "fp32" and answers != greedy["ours"]:
            sys.exit(f"greedy answers of {name} differ from ours")
        behind = judge.submit(judged, prompts, answers).result()[2]
        if behind > (1e-3 if dtype == "fp32" else 0.25):
            sys.exit(f"a greedy token of {name} is less probable than the best one by a factor of e^{behind:.2f}")
    for name, pool in sides.items():
        answers, *_ = pool.submit(run, prompts, [16] * PROMPTS * SAMPLES, False).result()
        logprobs, surprise, _ = judge.submit(judged, prompts, answers).result()
        error = statistics.stdev(surprise) / len(surprise) ** 0.5
        if abs(statistics.fmean(surprise)) > 4 * error:
            sys.exit(f"sampled tokens of {name} are off by {statistics.fmean(surprise):.3f} +- {error:.3f}")
        if name == "ours":
            said = statistics.fmean(pool.submit(logprobs_said).result())
            if abs(said - statistics.fmean(logprobs)) > (1e-4 if dtype == "fp32" else 0.02):
                sys.exit(f"our log-probabilities have the mean {said:.4f}, not {statistics.fmean(logprobs):.4f}")


# ---- in a side's process

SIDE: Any = None


def start(name: str, folder: Path, dtype: str, threads: int) -> None:
    """Load the weights."""
    global SIDE
    import torch

    torch.set_num_threads(threads)
    kind = {"ours": Ours, "torchtune": Torchtune, "torchtune lean": Torchtune}.get(name, Transformers)
    SIDE = kind(folder, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    SIDE.lean = name == "torchtune lean"


def run(prompts: list[list[int]], trace: list[int], greedy: bool) -> tuple[Answers, tuple[float, float], int]:
    """The answers, the wall's and the processors' seconds that they took, the process's peak memory in bytes."""
    began = time.perf_counter(), time.process_time()
    answers = SIDE.generate(prompts, trace, greedy)
    seconds = time.perf_counter() - began[0], time.process_time() - began[1]
    return answers, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def logprobs_said() -> list[float]:
    """Of the tokens of our last answers."""
    return SIDE.logprobs


def judged(prompts: list[list[int]], answers: Answers) -> tuple[list[float], list[float], float]:
    """Of every token: log p, and by how much it is above its mean; the largest gap to the best token."""
    import torch

    logprobs, surprise, behind = [], [], 0.0
    samples = len(answers) // len(prompts)
    for index, answer in enumerate(answers):
        prompt = prompts[index // samples]
        with torch.no_grad():
            logits = SIDE.model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        table = logits.log_softmax(-1)
        found = table.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
        logprobs += found.tolist()
        surprise += (found - (table.exp() * table).sum(-1)).tolist()
        behind = max(behind, float((table.amax(-1) - found).max()))
    return logprobs, surprise, behind


def padded(prompts: list[list[int]]) -> Any:
    """[p, s], filled up on the left."""
    import torch

    width = max(map(len, prompts))
    return torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])


def torchtune_decoder(folder: Path, dtype: Any) -> Any:
    """The weights in torchtune's model."""
    import json

    from safetensors.torch import load_file
    from torchtune.models.qwen2 import qwen2
    from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune

    c = json.loads((folder / "config.json").read_text())
    heads, kv_heads, width = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"]
    decoder = qwen2(
        vocab_size=c["vocab_size"], num_layers=c["num_hidden_layers"], num_heads=heads, num_kv_heads=kv_heads,
        embed_dim=width, intermediate_dim=c["intermediate_size"], max_seq_len=c["max_position_embeddings"],
        norm_eps=c["rms_norm_eps"], rope_base=1e6, tie_word_embeddings=True,
    )  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    decoder.load_state_dict(
        qwen2_hf_to_tune(weights, num_heads=heads, num_kv_heads=kv_heads, dim=width, tie_word_embeddings=True)
    )
    return decoder.to(dtype).eval()


class Ours:
    def __init__(self, folder: Path, dtype: Any) -> None:
        self.decoder = torchtune_decoder(folder, dtype)

    def generate(self, prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
        from rocm_ext.generation import Request, Sampling, sample_seed
        from rocm_ext.generation.decoder import merged
        from rocm_ext.generation.local import LocalSession

        samples = len(trace) // len(prompts)
        temperature = 0.0 if greedy else 1.0
        limits = [Sampling(length, temperature) for length in trace]

        class Traced(LocalSession):
            def _completion(self, running, sampling):
                request = running.request
                return super()._completion(running, limits[int(request.prompt_id) * samples + request.sample])

        class Tokenizer:
            stop_tokens = (-1,)  # none ends an answer

            def decode(self, tokens: list[int]) -> str:
                return ""

        requests = [
            Request(str(i), k, sample_seed(0, 0, str(i), k), tuple(prompt))
            for i, prompt in enumerate(prompts)
            for k in range(samples)
        ]
        with merged(self.decoder) as decoder:
            session = Traced(decoder, Tokenizer(), lambda: 2**32)
            done = list(session.generate(requests, Sampling(MOST, temperature)))
        done.sort(key=lambda completion: (int(completion.request.prompt_id), completion.request.sample))
        self.logprobs = [logprob for completion in done for logprob in completion.logprobs]
        return [completion.tokens for completion in done]


class Transformers:
    def __init__(self, folder: Path, dtype: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        tokens = padded(prompts)
        width, ends = tokens.shape[1], torch.tensor(trace) + tokens.shape[1]

        class Traced(StoppingCriteria):
            def __call__(self, input_ids, scores, **kwargs):
                return input_ids.shape[1] >= ends

        sampling = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0}
        out = self.model.generate(
            tokens, attention_mask=(tokens != PAD).long(), max_new_tokens=MOST, pad_token_id=PAD,
            num_return_sequences=len(trace) // len(prompts), stopping_criteria=StoppingCriteriaList([Traced()]),
            **sampling,
        )  # fmt: skip
        return [row[width : width + length] for row, length in zip(out.tolist(), trace, strict=True)]


class Torchtune:
    lean = False

    def __init__(self, folder: Path, dtype: Any) -> None:
        self.model, self.dtype = torchtune_decoder(folder, dtype), dtype

    def generate(self, prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
        samples, longest = len(trace) // len(prompts), max(map(len, prompts))
        per_row = 4 * self.model.tok_embeddings.num_embeddings * (longest + (0 if self.lean else 2 * max(trace)))
        at_once = max(1, min(len(prompts), memory() // 2 // per_row // samples))
        at_once = -(-len(prompts) // -(-len(prompts) // at_once))  # batches of one size
        answers: Answers = []
        for first in range(0, len(prompts), at_once):
            part = slice(first * samples, (first + at_once) * samples)
            answers += self._batch(prompts[first : first + at_once], trace[part], greedy)
        return answers

    def _batch(self, prompts: list[list[int]], trace: list[int], greedy: bool) -> Answers:
        import torch
        from torchtune.generation import generate, generate_next_token
        from torchtune.modules.common_utils import local_kv_cache

        tokens = padded(prompts).repeat_interleave(len(trace) // len(prompts), 0)
        rows, width = tokens.shape
        length = width + max(trace)

        def without_logits(*args, **kwargs):
            drawn, logits = generate_next_token(*args, **kwargs)
            return drawn, logits[:, :0]

        with local_kv_cache(
            self.model, batch_size=rows, device=torch.device("cpu"), dtype=self.dtype, decoder_max_seq_len=length
        ):  # fmt: skip
            out, _ = generate(
                self.model, tokens, max_generated_tokens=max(trace), pad_id=PAD, temperature=1.0,
                top_k=1 if greedy else None, custom_generate_next_token=without_logits if self.lean else None,
            )  # fmt: skip
        return [row[width : width + n] for row, n in zip(out.tolist(), trace, strict=True)]


def memory() -> int:
    """The machine's, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    main()
