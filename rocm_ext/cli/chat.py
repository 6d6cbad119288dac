"""``rocm-ext chat``: talk with a model, with or without an adapter.

The model samples in this process, as the recipes do, and the answer appears while it is sampled. With -p, or with a
question from a pipe, it answers once: the answer goes to stdout, and everything else to stderr. In a conversation,
/help lists commands.
"""

import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import import_component
from rocm_ext.base.process import handled
from rocm_ext.cli._common import (
    add_model,
    add_trust,
    count,
    note,
    number,
    options,
    prepare,
    refuse_first,
    take_model,
)
from rocm_ext.config.chosen_model import find_target

if TYPE_CHECKING:
    from rocm_ext.chat import Chat

# Keys that a conversation does not read: it samples in this process, and nothing is judged or trained
_UNUSED = (
    "dataset",
    "dataset_val",
    "prompts",
    "eval_prompts",
    "verifier",
    "environment",
    "engine",
    "loss",
)
_HELP = '''
/base [TEXT]   ask the last question, or TEXT, also of the model without its adapter
/reset         forget the conversation
/system TEXT   set the system message and forget the conversation; without TEXT: none
/help          show this text
/quit          end; so does Ctrl-D
Ctrl-C stops an answer. """ begins a question of several lines, and """ ends it.
'''.strip()


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    option("--adapter DIR", "PEFT folder (default: the run's or the config's)", Path)
    option("--base", "ask the model without its adapter, too")
    option("-p --prompt TEXT", "answer this question and end")
    option("--system TEXT", "system message", default="")
    tool = "Python function that the model may call, such as my_tools.search; it runs as you; may be repeated"
    option("--tool FUNCTION", tool, default=[], action="append")
    option(
        "--temperature T",
        "0: greedy (default: the model's setting, else 0.7)",
        number(float, 0, 100),
    )
    share = number(float, 1e-6, 1)
    option("--top-p P", "draw from the most probable tokens with this share of probability", share)
    option("--top-k K", "draw from the K most probable tokens", count)
    option("--max-new-tokens N", "limit of an answer (default: 2048)", count, 2048)
    option(
        "--seed N",
        "repeat the same answers (default: others every time)",
        number(int, 0, 2**32 - 1),
    )
    add_trust(parser)
    add_model(parser)


def run(args: Namespace) -> int:
    """Answer once, or talk until the user ends it; returns the exit code."""
    target = find_target(take_model(args), args.adapter, args.trust_config, _UNUSED)
    prepare(target, args.overrides)
    question = args.prompt
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
    has_seed = any(override.startswith("seed=") for override in args.overrides)
    refuse_first(
        (question is not None and not question.strip(), "the question is empty"),
        (has_seed, "seed= is the seed of trainings; --seed N repeats the same answers"),
    )
    from rocm_ext.chat import open_chat
    from rocm_ext.environments import Tools

    tools = Tools([import_component(path) for path in args.tool]) if args.tool else None
    sampling = {
        name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "max_new_tokens")
    }
    cfg = target.load([*args.overrides, "output_dir=chat"])
    if args.base and not cfg.checkpointer.get("adapter_checkpoint"):
        raise UserError(
            "--base compares answers with those without the adapter; name a run's folder, or --adapter"
        )
    with open_chat(cfg, args.seed, args.system, tools, **sampling) as chat:
        chat.tell = note
        if question is not None:
            return _ask(chat, question.strip(), args.base)
        _talk(chat, args.base)
    return 0


def _talk(chat: "Chat", with_base: bool) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines and keeps a history
    note(f"\n{_sampling(chat)}. /help lists commands.")
    if not chat.has_template:
        note("There is no chat template: the model continues a text without a history.")
    while True:
        try:
            note("")
            line = _read("> ")
        except KeyboardInterrupt:
            note("\nCtrl-D or /quit ends")
            continue
        except EOFError:
            note("")
            return
        if line.strip() == "/quit":
            return
        try:
            _act(chat, line, with_base)
        except UserError as error:
            note(f"error: {error}")
        except KeyboardInterrupt:  # a second Ctrl-C, which does not wait for the next token
            note("\nstopped")


def _act(chat: "Chat", line: str, with_base: bool) -> None:
    """Carry out a line: a command or a question."""
    command, _, text = line.partition(" ")
    text = text.strip()
    if command == "/base" and text:
        _ask(chat, text, with_base=True)
    elif command == "/base":
        _ask_base(chat)
    elif command == "/reset":
        chat.reset()
        note("the conversation is forgotten")
    elif command == "/system":
        chat.system = text
        chat.reset()
        note(f"system message: {text or 'none'}; the conversation is forgotten")
    elif command == "/help":
        note(_HELP)
    elif command.startswith("/") and command[1:].isalpha():
        raise UserError(f"unknown command {command}; /help lists them")
    elif line.strip():
        _ask(chat, line, with_base)


def _ask(chat: "Chat", question: str, with_base: bool) -> int:
    """Ask a question, and show the answer, and that without the adapter; returns an exit code."""
    if not with_base:
        return _show(chat, chat.ask(question))
    note("with the adapter:")
    return _show(chat, chat.ask(question)) or _ask_base(chat)


def _ask_base(chat: "Chat") -> int:
    note("without the adapter:")
    return _show(chat, chat.base())


def _show(chat: "Chat", pieces: Iterator[tuple[str, bool]]) -> int:
    """Write an answer as it comes, and its speed; returns an exit code."""
    from rocm_ext.chat.stream import Writer

    writer = Writer(sys.stdout)
    with _stopping() as stopped:
        for text, hidden in pieces:
            writer.write(text, hidden)
            if stopped:
                break
        pieces.close()  # type: ignore[attr-defined]
    writer.end()
    answer = chat.answer
    summary = f"{answer.tokens} tokens, {answer.tokens_per_second:.1f} tokens/s, first after {answer.first:.1f} s"
    if answer.finish_reason != "stop":
        cut = f"cut at {answer.tokens} tokens (--max-new-tokens, or the model's limit)"
        summary += "; stopped" if stopped else f"; {cut}"
    if not answer.text.strip():
        summary += "; it is empty"
    elif not answer.visible.strip():
        summary += "; it is only reasoning, so the conversation leaves it out"
    note(f"[{summary}]")
    return 128 + signal.SIGINT if stopped else 0


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """Context in which Ctrl-C fills the list; a second one raises KeyboardInterrupt."""
    seen: list[int] = []

    def remember(signum: int, frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signum)

    with handled(remember, signal.SIGINT):
        yield seen


def _read(prompt: str) -> str:
    """Read a line, or the lines between two ``\"\"\"``."""
    line = _input(prompt)
    if not line.startswith('"""'):
        return line
    lines = [line[3:]]
    while not lines[-1].endswith('"""'):
        lines.append(_input("… "))
    lines[-1] = lines[-1][:-3]
    return "\n".join(lines).strip()


def _input(prompt: str) -> str:
    if sys.stdout.isatty():
        return input(prompt)
    print(prompt, end="", file=sys.stderr, flush=True)
    return input()


def _sampling(chat: "Chat") -> str:
    """Describe how answers are drawn."""
    if not chat.sampling.temperature:
        return "Greedy answers"
    settings = []
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = getattr(chat.sampling, name)
        if value is not None:
            settings.append(f"{name} {value:g}")
    return "Answers drawn with " + ", ".join(settings)
