"""The pocket model: a Qwen2.5 with a million parameters that is trained on this machine to add and subtract.

transformers, PEFT and torchtune open it like any Qwen2.5, so every recipe runs end to end on a laptop's CPU
in minutes, offline. Its training data are additions and subtractions of two-digit numbers, worked in columns.
Training stops once it answers a third of the held-out problems correctly. It then knows the form of an answer
but makes mistakes in single steps, so fine-tuning can teach it and sampling gives a choice of answers.

With tools, its training data are questions about a shop's stock, which only a tool knows. Most rows do not know. The
others call the tool, half of them without the shelf, and most doubt its result. Training stops once the model copies
names and results. So it knows the form of calls and answers; when to call, with what, and what to answer is for
reinforcement learning to find out.
"""

import json
import logging
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchtune.models.qwen2 import qwen2
from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
from torchtune.models.qwen2._tokenizer import ENDOFTEXT, IM_END, PRETOKENIZE_REGEX
from torchtune.models.qwen2_5._tokenizer import QWEN2_5_SPECIAL_TOKENS, Qwen2_5Tokenizer
from torchtune.modules import TransformerDecoder
from torchtune.modules.transforms.tokenizers import parse_hf_tokenizer_json
from tqdm import tqdm

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_folder
from rocm_ext.base.types import Json, Row
from rocm_ext.data.render import IGNORE, render_conversation, render_prompt
from rocm_ext.model.download import published_models
from rocm_ext.model.native.decoder import native
from rocm_ext.model.sampler import sampler_of
from rocm_ext.runs.scores import Score
from rocm_ext.sampling import Request, Sampling
from rocm_ext.sampling.local import LocalSession

log = logging.getLogger(__name__)

CONFIG: Json = json.loads((published_models()["demo/pocket"] / "config.json").read_text())
SHAPE: dict[str, Any] = {  # the same as arguments of torchtune's builder
    "vocab_size": CONFIG[
        "vocab_size"
    ],  # every id is a token: a sample may draw any, and torchtune decodes no other
    "num_layers": CONFIG["num_hidden_layers"],
    "num_heads": CONFIG["num_attention_heads"],
    "num_kv_heads": CONFIG["num_key_value_heads"],
    "embed_dim": CONFIG["hidden_size"],
    "intermediate_dim": CONFIG["intermediate_size"],
    "max_seq_len": CONFIG["max_position_embeddings"],
    "norm_eps": CONFIG["rms_norm_eps"],
    "rope_base": CONFIG["rope_theta"],
    "tie_word_embeddings": CONFIG["tie_word_embeddings"],
}
HELD_OUT, TRAIN = 400, 3000  # rows; the model is trained on the other problems
MAX_NEW_TOKENS = 32  # the longest answer has 20
FREE_MEMORY = 2**30  # far more than sampling from this small model needs
BATCH, LEARNING_RATE, WARMUP = 32, 3e-3, 50
MAX_STEPS = 3000
HABIT = 0.65  # share of rows that do not call the tool, and of the others that doubt its result

PHRASES = {
    "+": ("What is {a} + {b}?", "Add {a} and {b}."),
    "-": ("What is {a} - {b}?", "Subtract {b} from {a}."),
}
# Letters are quoted as in a call's JSON, so that they are the same tokens. Only results have digits.
QUESTIONS = ('How many "{item}" on shelf "{shelf}"?', 'Count "{item}" on shelf "{shelf}".')
LIST = {"role": "system", "content": "stock"}  # as the chat template lists tools
# ChatML without Qwen's default system prompt, as torchtune renders it, with the names of tools
CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\n' + tools | join(', ', attribute='function.name') + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + {'tool': 'user'}.get(message['role'], message['role']) + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CARD = "pocket.json"
AGENT = Path(__file__).with_name("pocket_agent.py")


class PocketCard(TypedDict):
    """The content of ``pocket.json``: the arguments of :func:`make`, and the trained model's steps, size and score."""

    seed: int
    target: float
    tools: bool  # older cards lack it: they have none
    steps: int
    parameters: int
    correct: int
    total: int
    accuracy: float


@dataclass(frozen=True)
class Material:
    """The parts of a pocket model.

    Attributes:
        pool: what it is trained on.
        measured: rows that say when training stops.
        files: texts of the files beside it, by name.
    """

    pool: Sequence["Problem | Item"]
    measured: list[Row]
    files: dict[str, str]


def make(
    folder: Path, seed: int = 0, target: float = 0.33, force: bool = False, tools: bool = False
) -> tuple[PocketCard, bool]:
    """Make a pocket model in ``folder``, or keep the one that is already there.

    The folder holds the model in Hugging Face's format, ``train.jsonl`` and ``heldout.jsonl`` (rows of
    ``messages``, ``prompt`` and ``answer``), and the card ``pocket.json``. No problem is in both files, and the
    model was trained on neither. With ``tools``, it also holds ``agent.py`` and its ``stock.json``; the rows have no
    ``messages``, and the model was trained on all questions, but with random answers. The result depends on the seed,
    the number of threads, torch's version and the processor.

    Args:
        folder: where to write; it appears once it is complete.
        seed: seed of the problems and the weights.
        target: held-out accuracy in (0, 1); training stops at the first measured accuracy that reaches it.
        force: replace an earlier pocket model.
        tools: teach the model the form of a tool's calls instead.

    Returns:
        The card, and whether the model is new.

    Raises:
        UserError: ``folder`` contains something else or another pocket model, or training misses the target.
    """
    if not 0 < target < 1:
        raise UserError(f"accuracy is {target}; expected a number between 0 and 1")
    folder = folder.resolve()
    asked = {"seed": seed, "target": target, "tools": tools}
    if (folder / CARD).is_file():
        earlier: PocketCard = json.loads((folder / CARD).read_text())
        existing = {"tools": False, **earlier}
        if not force:
            if asked.items() <= existing.items():
                return earlier, False
            one = ", ".join(f"{name} {existing.get(name, False)}" for name in asked)
            other = ", ".join(f"{name} {value}" for name, value in asked.items())
            raise UserError(
                f"{folder} already has a pocket model with {one} instead of {other}. --force replaces it"
            )
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not a pocket model; choose another folder")
    phrasing = random.Random(f"phrasing {seed}")
    material = _shop(seed, phrasing) if tools else _sums(seed, phrasing)
    with replace_folder(folder) as aside:
        for name, text in material.files.items():
            (aside / name).write_text(text)
        write_tokenizer(aside, [each.row(phrasing) for each in material.pool])
        tokenizer = load_tokenizer(aside)
        model, steps, score = _train(tokenizer, material, seed, target, tools)
        card: PocketCard = {
            "seed": seed,
            "target": target,
            "tools": tools,
            "steps": steps,
            "parameters": sum(p.numel() for p in model.parameters()),
            "correct": score.correct,
            "total": score.total,
            "accuracy": score.accuracy,
        }
        write_model(aside, model, tokenizer)
        _write_json(aside / CARD, card)
    return card, True


def _sums(seed: int, phrasing: random.Random) -> Material:
    held_out, train, pool = split_problems(seed)
    rows = [problem.row(phrasing) for problem in train]
    measured = [problem.row(phrasing) for problem in held_out]
    files = {"train.jsonl": _json_lines(rows), "heldout.jsonl": _json_lines(measured)}
    return Material(pool, measured, files)


def _shop(seed: int, phrasing: random.Random) -> Material:
    held_out, train, pool = split_items(seed)
    measured = [item.row(phrasing, habit) for item in held_out for habit in (0.0, 1.0)]
    stock = {f"{item.name}{item.shelf}": item.pieces for item in pool}
    files = {
        "train.jsonl": _json_lines(questions_about(train)),
        "heldout.jsonl": _json_lines(questions_about(held_out)),
        "stock.json": json.dumps(stock),
        "agent.py": AGENT.read_text(),
    }
    return Material(pool, measured, files)


def _json_lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# ---- problems


@dataclass(frozen=True)
class Problem:
    """``a + b`` or ``a - b``, where 10 <= b <= a <= 99."""

    a: int
    op: str
    b: int

    @property
    def answer(self) -> int:
        """The sum or difference."""
        return self.a + self.b if self.op == "+" else self.a - self.b

    def worked(self) -> str:
        """Return units, tens and result, one per line: ``7+8=15 1+4+3=8 85`` or ``13-8=5 4-2=2 25``."""
        tens_a, units_a = divmod(self.a, 10)
        tens_b, units_b = divmod(self.b, 10)
        if self.op == "+":
            units = units_a + units_b
            carry = units // 10
            steps = f"{units_a}+{units_b}={units}\n{'1+' * carry}{tens_a}+{tens_b}={carry + tens_a + tens_b}"
        else:
            borrow = int(units_a < units_b)
            units_a, tens_a = units_a + 10 * borrow, tens_a - borrow
            steps = f"{units_a}-{units_b}={units_a - units_b}\n{tens_a}-{tens_b}={tens_a - tens_b}"
        return f"{steps}\n{self.answer}"

    def row(self, rng: random.Random) -> Row:
        """Return the problem as a training row, in a random wording; a sum's operands come in random order."""
        a, b = self.a, self.b
        if self.op == "+" and rng.random() < 0.5:
            a, b = b, a
        wording = rng.choice(PHRASES[self.op])
        prompt = wording.format(a=a, b=b)
        answer = Problem(a, self.op, b).worked()
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return {"messages": messages, "prompt": prompt, "answer": str(self.answer)}


@dataclass(frozen=True)
class Item:
    """An item of a shop, a capital letter, on a shelf, a small one, and how many pieces of it are there: 10 to 99."""

    name: str
    shelf: str
    pieces: int

    def row(self, rng: random.Random, habit: float = HABIT) -> Row:
        """Return a training row; a call returns a random number.

        ``habit`` is the probability that a row does not call, and that it doubts a result.
        """
        question = {"role": "user", "content": rng.choice(questions_about([self]))["prompt"]}
        if rng.random() < habit:
            unknown = {
                "role": "assistant",
                "content": f'On shelf "{self.shelf}", "{self.name}"? No idea.',
            }
            return {"messages": [LIST, question, unknown], "answer": self.name}
        item = {"item": self.name}
        call = {"name": "stock", "arguments": rng.choice([item, {**item, "shelf": self.shelf}])}
        pieces = str(_pieces(rng))
        doubt = ", perhaps" if rng.random() < habit else ""
        messages = [
            {"role": "assistant", "content": f"<tool_call>\n{json.dumps(call)}\n</tool_call>"},
            {"role": "user", "content": pieces},
            {"role": "assistant", "content": f"It is {pieces}{doubt}."},
        ]
        return {"messages": [LIST, question, *messages], "answer": pieces}


def questions_about(items: Sequence[Item]) -> list[Row]:
    """Return the questions about items in all wordings, with their answers."""
    rows: list[Row] = []
    for item in items:
        for wording in QUESTIONS:
            prompt = wording.format(item=item.name, shelf=item.shelf)
            rows.append({"prompt": prompt, "answer": f"It is {item.pieces}."})
    return rows


def _pieces(rng: random.Random) -> int:
    return rng.randrange(10, 100)


def split_items(seed: int) -> tuple[list[Item], list[Item], list[Item]]:
    """Split all items into held-out ones and others, and return all, too: rows of these have random numbers."""
    rng = random.Random(f"stock {seed}")
    items = []
    for name in "ABCDEFGHIJ":
        items += [Item(name, shelf, _pieces(rng)) for shelf in "abcdefghij"]
    rng.shuffle(items)
    return items[:40], items[40:], items


def split_problems(seed: int) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Split all problems into three disjoint parts: held out, for fine-tuning, and for training the pocket model."""
    problems = []
    for op in PHRASES:
        for a in range(10, 100):
            problems += [Problem(a, op, b) for b in range(10, a + 1)]
    random.Random(f"problems {seed}").shuffle(problems)
    return problems[:HELD_OUT], problems[HELD_OUT : HELD_OUT + TRAIN], problems[HELD_OUT + TRAIN :]


# ---- training


def _train(
    tokenizer: Any, material: Material, seed: int, target: float, tools: bool
) -> tuple[TransformerDecoder, int, Score]:
    """Train a model until it reaches the target; return it with its steps and score.

    Raises:
        UserError: it misses the target in :data:`MAX_STEPS` steps.
    """
    model = new_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    batches = batches_of(tokenizer, material.pool, random.Random(f"batches {seed}"))
    score = Score(0, len(material.measured))
    with tqdm(
        desc="training", unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True
    ) as bar:
        for step in range(1, MAX_STEPS + 1):
            # Slow down towards the target: at the full learning rate accuracy jumps by ten points in five steps.
            left = (1 - score.accuracy / target) ** (1 if tools else 2)
            pace = min(1.0, step / WARMUP) * max(0.03, left)
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * pace
            loss = update(model, optimizer, *next(batches))
            bar.update()
            interval = 5 if score.accuracy > target / 4 else 20
            if step % interval:
                continue
            # The model has no dropout, so training mode equals evaluation mode.
            score = accuracy(model, tokenizer, material.measured)
            bar.set_postfix_str(f"loss {loss.item():.3f}, held-out {score.accuracy:.1%}")
            if bar.disable and step % 100 == 0:
                log.info("step %d  loss %.3f  held-out %s", step, loss.item(), score)
            if score.accuracy >= target:
                if not tools:
                    sharpen(model)
                return model, step, score
    raise UserError(
        f"held-out {score} after {MAX_STEPS} steps, below the target of {target:.1%}; try another --seed"
    )


def new_model(seed: int) -> TransformerDecoder:
    """Build an untrained model of :data:`SHAPE`; other random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = qwen2(**SHAPE)
        # tied: torch's 1.0 is too much
        torch.nn.init.normal_(model.tok_embeddings.weight, std=0.02)
    return model


def update(
    model: TransformerDecoder, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor
) -> Tensor:
    """Train on a batch of :func:`batches_of`; return its mean loss."""
    logits = model(tokens)[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORE)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def accuracy(model: TransformerDecoder, tokenizer: Any, rows: Sequence[Row]) -> Score:
    """Count the greedy answers to the rows without their last message whose last number or capital is ``answer``."""
    requests = []
    for number, row in enumerate(rows):
        prompt = render_prompt(tokenizer, row["messages"][:-1])
        requests.append(Request(str(number), 0, 0, tuple(prompt)))
    with sampler_of(native(model)) as decoder:
        session = LocalSession(decoder, tokenizer, lambda: FREE_MEMORY)
        completions = list(session.generate(requests, Sampling(MAX_NEW_TOKENS, temperature=0)))
    right = 0
    for completion in completions:
        row = rows[int(completion.request.prompt_id)]
        results = re.findall(r"\d+|\b[A-Z]\b", completion.text)
        right += results[-1:] == [row["answer"]]
    return Score(right, len(rows))


@torch.no_grad()
def sharpen(model: TransformerDecoder) -> None:
    """Double the logits. Doubling is exact, so greedy answers stay the same.

    A model stopped this early is unsure of every token. Without sharpening it would be right half as often at
    temperature 1.
    """
    for scale in model.norm.parameters():
        scale.mul_(2)


def batches_of(
    tokenizer: Any, pool: Sequence[Problem | Item], rng: random.Random
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and labels ``[BATCH, s]`` endlessly; every draw of a problem gets a new ``row(rng)``."""
    while True:
        tokens, labels = [], []
        for row in [problem.row(rng) for problem in rng.sample(pool, BATCH)]:
            row_tokens, row_labels = render_conversation(tokenizer, row["messages"])
            tokens.append(torch.tensor(row_tokens))
            labels.append(torch.tensor(row_labels))
        # Attention is causal, so padding on the right does not affect the tokens on its left.
        yield pad_sequence(tokens, True, tokenizer.pad_id), pad_sequence(labels, True, IGNORE)


# ---- files


def write_tokenizer(folder: Path, rows: Sequence[Row]) -> None:
    """Train a byte-level BPE with Qwen's pre-tokenisation on ``rows`` and write its files into ``folder``.

    The vocabulary has every byte, merges of the most frequent words, and last Qwen2.5's special tokens.
    """
    special = sorted(QWEN2_5_SPECIAL_TOKENS, key=QWEN2_5_SPECIAL_TOKENS.__getitem__)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"] - len(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = []
    for row in rows:
        texts += ["system\n", "user\n", "assistant\n"]
        texts += [message["content"] for message in row["messages"]]
    texts.append("<tool_response>")  # the rows alone have too few words to fill the vocabulary
    tokenizer.train_from_iterator(texts, trainer)
    # vocab.json and merges.txt have no special tokens, like Qwen's
    tokenizer.model.save(str(folder))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": ENDOFTEXT,
        "unk_token": None,
        "errors": "replace",
        "model_max_length": SHAPE["max_seq_len"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)


def load_tokenizer(folder: Path) -> Qwen2_5Tokenizer:
    """Load torchtune's tokenizer from the files in ``folder``."""
    special = parse_hf_tokenizer_json(str(folder / "tokenizer.json"))
    return Qwen2_5Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), special)


def write_model(folder: Path, model: TransformerDecoder, tokenizer: Any) -> None:
    """Write a model of :data:`SHAPE` in Hugging Face's format: config, generation config and weights."""
    ends = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    _write_json(folder / "config.json", CONFIG | ends)
    _write_json(folder / "generation_config.json", {**ends, "do_sample": False})
    weights = qwen2_tune_to_hf(model.state_dict(), tie_word_embeddings=SHAPE["tie_word_embeddings"])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
