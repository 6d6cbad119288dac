"""Speeds beside other libraries, one side at a time, so that it has the complete device.

The sides' programs are those of :mod:`tools.benchmarks`. A part runs one side and compares it with ours, which an
earlier part has run. All packages are those of this environment.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit.families import CLASSES
from tests.kit.tiny import SHAPE, write_tokenizer
from tools.benchmarks import dpo, sampling, sft
from tools.benchmarks.protocol import Failed, difference
from tools.benchmarks.training import GATE, OURS, Work
from tools.benchmarks.work import SHAPES, Task, is_qwen3, write_adapter
from tools.gpu.here import GIB, Here, Row, check, speed

WORKS: dict[str, Work] = {"sft": sft.WORK, "dpo": dpo.WORK}
VOCAB = {"tiny": 512, "0.5b": 152064, "7b": 152064, "qwen3-4b": 151936, "qwen3-8b": 151936}
# GiB of a model in bf16
DISK = {"tiny": 0.1, "0.5b": 1.3, "7b": 15.5, "qwen3-4b": 8.5, "qwen3-8b": 16.5}
FP32 = 1e-3  # relative difference of a step's loss; the CPU's benchmarks hold 1e-5
BF16 = 0.05
# prompts, answers to a prompt, median and most tokens of an answer
TRACES = {"tiny": sampling.Trace(4, 2, 8, 24), "0.5b": sampling.Trace(64, 8, 200, 1024),
          "7b": sampling.Trace(32, 8, 200, 512)}  # fmt: skip
JUDGED = 8  # prompts whose answers are checked


def shape_of(here: Here, size: str) -> str:
    """Return the key of :data:`tools.benchmarks.work.SHAPES`."""
    return "tiny" if here.tiny else size


def model_of(here: Here, size: str) -> Path:
    """Return the folder of a random model in bf16, which all sides share; tiny ones are in fp32."""
    shape = shape_of(here, size)

    def make(folder: Path) -> None:
        write_sized_model(
            folder / "model", shape, VOCAB[shape], "fp32" if here.tiny else "bf16", here.device
        )

    return here.world(f"model-{shape}", make, DISK[shape])[0] / "model"


def arguments(here: Here, *ours: str) -> argparse.Namespace:
    """Return what :mod:`tools.benchmarks` takes from its command line."""
    return argparse.Namespace(gpu=here.gpu, ours=list(ours), rounds=rounds(here), installed=True)


def rounds(here: Here) -> int:
    """Return the number of timed steps."""
    return 2 if here.tiny else 8


def write_sized_model(folder: Path, shape: str, vocab: int, dtype: str, device: str) -> None:
    """Write a Hugging Face folder of Qwen2.5's or Qwen3's ``shape`` with random weights that are drawn on ``device``.

    A file holds at most 4 GB, and every id has a token, because a sample may draw any.
    """
    import torch
    from torchtune.training import set_default_dtype

    folder.mkdir(parents=True)
    write_tokenizer(folder)
    sizes = {**SHAPE, "max_position_embeddings": 4096, "tie_word_embeddings": True, **SHAPES[shape]}
    config_class, model_class = CLASSES["qwen3" if is_qwen3(shape) else "qwen2"]
    config = config_class(vocab_size=vocab, rope_theta=1e6, **{**sizes, "initializer_range": 0.04})
    torch.manual_seed(0)
    with (
        torch.device(device),
        set_default_dtype(getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype])),
    ):
        model = model_class(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):  # zero from transformers; a side that skips them must differ
            torch.nn.init.normal_(weight, std=0.04)
    model.save_pretrained(folder, max_shard_size="4GB")
    del model, weight
    torch.cuda.empty_cache()  # the sides are other processes, which need the GPU's memory
    fill_vocabulary(folder, vocab)


def fill_vocabulary(folder: Path, vocab: int) -> None:
    """Give a tokenizer of :func:`tests.kit.tiny.write_tokenizer` further tokens, so that it has ``vocab``.

    Special tokens keep the last ids, as tokenizers numbers them when it reads the file.
    """
    content = json.loads((folder / "tokenizer.json").read_text())
    special, tokens = content["added_tokens"], content["model"]["vocab"]
    tokens |= {f"filler{i}": i for i in range(len(tokens), vocab - len(special))}
    for number, token in enumerate(special):
        token["id"] = len(tokens) + number
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "vocab.json").write_text(json.dumps(tokens))
    ends = {token["content"]: token["id"] for token in special}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends["<|im_end|>"]}))


# ---- SFT and DPO


def training_world(here: Here, work: str, size: str) -> tuple[Path, Any]:
    """Return the folder with the model, rows and first adapter of all sides, and the rows' sizes by step."""
    shape = shape_of(here, size)
    way = WORKS[work]
    model = model_of(here, size)

    def make(folder: Path) -> Any:
        (folder / "model").symlink_to(model)
        steps = way.write_steps(
            folder / "rows.jsonl", VOCAB[shape], _gate(here), way.warm_up + rounds(here)
        )
        write_adapter(folder, shape)
        return steps

    return here.world(f"{work}-{shape}", make)


def train(
    here: Here, work: str, size: str, peer: str | None, gate: bool = True, at_once: int = 8
) -> Iterator[Row]:
    """Time a side's optimiser steps, and compare losses and seconds with ours.

    Args:
        here: the device.
        work: sft or dpo.
        size: of the model.
        peer: of that work's PEERS; None: ours.
        gate: first compare losses in fp32.
        at_once: rows of ours in a micro-batch of a GPU.
    """
    shape, name = shape_of(here, size), peer or OURS
    way = WORKS[work]
    base, steps = training_world(here, work, size)
    known = f"{work}-{size}"
    dtypes = ["fp32"] if here.tiny else [*["fp32"] * gate, "bf16"]
    for dtype in dtypes:
        timed = dtype == dtypes[-1]
        task = Task(work, shape, VOCAB[shape], dtype, (peer,) if peer else ())
        # compiled layers are checked in a separate part
        args = arguments(
            here,
            *([f"batch_size={at_once}"] if here.gpu else []),
            *([] if timed else ["compile=False"]),
        )
        result = _steps(here, base, way, name, task, len(steps), args, timed)
        expected = here.of(known, f"losses_{dtype}") if peer else result["losses"]
        if expected is not None and peer:
            apart = difference(result["losses"], expected)
            limit = FP32 if dtype == "fp32" else BF16
            yield check(f"losses of {name} are ours, {work} {shape}, {dtype}", apart <= limit,
                        f"off by {apart:.1e} at most in {len(expected)} steps")  # fmt: skip
        if not timed:
            yield {"what": f"first losses of {name} in {dtype}", "ok": None, "found": f"{result['losses'][0]:.4f} to "
                   f"{result['losses'][-1]:.4f}", f"losses_{dtype}": result["losses"]}  # fmt: skip
            continue
        tokens = sum(row[0] for rows in steps[-rounds(here) :] for row in rows) / rounds(here)
        ours, middle = (
            here.of(known, "seconds") if peer else None,
            statistics.median(result["seconds"]),
        )
        note = "" if ours is None else f"ours is {middle / ours:.2f} x as fast; "
        note += f"{1e3 * middle:.0f} ms a step ({1e3 * min(result['seconds']):.0f}-{1e3 * max(result['seconds']):.0f})"
        note += f", {result['peak'] / GIB:.2f} GiB, warm after {result['until_warm']:.0f} s"
        named = name if peer or not here.gpu else f"{name}, {at_once} rows at once"
        yield speed(f"LoRA {work.upper()} of {shape}, {dtype}, {named}", tokens / middle, "tokens/s", note,
                    seconds=middle, peak=result["peak"], **{f"losses_{dtype}": result["losses"]})  # fmt: skip


def _gate(here: Here) -> int:
    return 4 if here.tiny else GATE


def _steps(
    here: Here,
    base: Path,
    work: Work,
    name: str,
    task: Task,
    steps: int,
    args: argparse.Namespace,
    timed: bool,
) -> dict[str, Any]:
    """Run a side's steps; return the losses of the first ones, seconds of the timed ones, and the peak of memory."""
    with work.start(base, name, task, steps, args) as side:
        first = side.ask(steps=_gate(here))
        result: dict[str, Any] = {"losses": [step[1] for step in first["steps"]]}
        if not timed:
            return result
        side.ask(steps=work.warm_up)
        result["until_warm"] = time.perf_counter() - side.began
        begin = _gate(here) + work.warm_up
        turns = [work.step(side, number) for number in range(begin, begin + rounds(here))]
        seconds = [scoring + answer["steps"][0][0] for scoring, answer in turns]
        return {**result, "seconds": seconds, "peak": turns[-1][1]["peak_memory"]}


# ---- sampling


def sample(here: Here, size: str, peer: str | None, gate: bool = True) -> Iterator[Row]:
    """Time a side's answers to the same prompts with the same lengths.

    Greedy tokens must be about as probable under the model in fp32 as the best ones, and sampled ones must have the
    model's probabilities.

    Args:
        here: the device.
        size: of the model.
        peer: of :data:`tools.benchmarks.sampling.PEERS`; None: ours.
        gate: check the tokens.
    """
    shape, name = shape_of(here, size), peer or OURS
    trace, dtype, args = TRACES[shape], "fp32" if here.tiny else "bf16", arguments(here)
    base, _ = here.world(f"sampling-{shape}", lambda folder: None)
    model, (prompts, lengths) = model_of(here, size), trace.make(VOCAB[shape])
    judged = lengths[: JUDGED * trace.samples]
    with sampling.start(base, model, name, dtype, trace, args) as side:
        greedy = sampling.sample(
            side, prompts[:JUDGED], [min(24, trace.most)] * len(prompts[:JUDGED]), greedy=True
        )
        warm_up = (
            lengths if sampling.PEERS.get(name) is None else [min(length, 64) for length in lengths]
        )
        sampling.sample(side, prompts, warm_up)
        until_warm = time.perf_counter() - side.began
        result = [sampling.sample(side, prompts, lengths) for _ in range(1 if here.tiny else 2)]
    if [len(tokens) for tokens in result[-1]["answers"]] != lengths:
        raise Failed(f"{name} gave answers of other lengths")
    seconds = [answer["seconds"][0] for answer in result]
    ours = here.of(f"sampling-{size}", "seconds") if peer else None
    faster = "" if ours is None else f"ours is {min(seconds) / ours:.2f} x as fast; "
    yield speed(f"sampling of {shape}, {dtype}, {name}", sum(lengths) / min(seconds), "tokens/s",
                f"{faster}{len(lengths)} answers of {min(lengths)} to {max(lengths)} tokens, "
                f"{result[-1]['peak_memory'] / GIB:.2f} GiB, warm after {until_warm:.0f} s",
                seconds=min(seconds), all_seconds=seconds)  # fmt: skip
    if not gate:
        return
    with sampling.judge(base, model, trace, args) as knows:
        known = knows.ask(prompts=prompts[:JUDGED], answers=greedy["answers"])
        sampling.check_greedy(name, greedy["answers"], greedy["answers"], known, dtype)
        yield check(f"greedy tokens of {name} are the model's, {shape}", True,
                    f"at most {known['behind']:.1e} below the best log-prob")  # fmt: skip
        last = {**result[-1], "answers": result[-1]["answers"][: len(judged)]}
        if "logprobs" in last:
            last["logprobs"] = last["logprobs"][: sum(judged)]
        known = knows.ask(prompts=prompts[:JUDGED], answers=last["answers"])
        sampling.check_sampled(name, last, known, dtype)
        yield check(f"samples of {name} have the model's probabilities, {shape}", True,
                    f"{len(known['logprobs'])} tokens")  # fmt: skip
