"""The conversation: its history, the context's limit, and answers with and without the adapter."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import DictConfig

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import json_object
from rocm_ext.base.types import Message
from rocm_ext.chat.stream import Reasoning, TextStream, harmless
from rocm_ext.config.chosen_model import sample_here, sampling_config
from rocm_ext.data.encoder import to_text
from rocm_ext.data.render import PlainRenderer, marked_text, render_prompt
from rocm_ext.data.tokenizer import defused
from rocm_ext.environments import Call, Tools, call_id, calls_in, shortened
from rocm_ext.rl.loop import RLRecipe
from rocm_ext.sampling import Completion, Request, Sampling, sample_seed
from rocm_ext.train.scoring import without_adapter

_TEMPERATURE = 0.7  # for models that name none
_LEAST_ROOM = 256  # tokens left for an answer before old turns are dropped
_MOST_CALLS = 8  # answers with calls of tools to one question
_MOST_SHOWN = 500  # characters of a call that the user sees
_LEAST_RESULT = 500  # characters: a tool's result is cut to this before old turns are dropped


@dataclass
class Reply:
    """An answer, complete or stopped.

    Attributes:
        text: the text with its reasoning.
        visible: the text without its reasoning.
        marked: the text with special tokens, which mark calls of tools in some templates.
        tokens: number of sampled tokens.
        first: seconds to the first token, which the prompt takes.
        seconds: time from the first token to the last.
        finish_reason: ``stop``, ``length`` or ``interrupted``.
    """

    text: str = ""
    visible: str = ""
    marked: str = ""
    tokens: int = 0
    first: float = 0.0
    seconds: float = 0.0
    finish_reason: str = "interrupted"

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token."""
        return (self.tokens - 1) / self.seconds if self.seconds else 0.0


@dataclass
class Chat:
    """A conversation with an opened model.

    Attributes:
        recipe: the opened model with its engines.
        session: session of the engine.
        sampling: how to draw.
        seed: with the number of the question, the seed of an answer.
        system: system message, or an empty text.
        history: the turns ``{role, content}`` so far, without the system message.
        answer: the last answer of :meth:`ask` or :meth:`base`.
        tell: shows the user a notice.
        tools: functions that the model may call, if any.
    """

    recipe: RLRecipe
    session: Any
    sampling: Sampling
    seed: int
    system: str = ""
    history: list[Message] = field(default_factory=list)
    answer: Reply = field(default_factory=Reply)
    tell: Callable[[str], None] = lambda text: None
    tools: Tools | None = None
    _asked: int = 0
    _last: list[Message] = field(default_factory=list)

    @property
    def has_template(self) -> bool:
        """Whether there are turns; without, the model continues a text."""
        return not isinstance(getattr(self._tokenizer, "renderer", None), PlainRenderer)

    @property
    def _tokenizer(self) -> Any:
        return self.recipe.learner.tokenizer

    def ask(self, question: str) -> Iterator[tuple[str, bool]]:
        """Ask, and yield the answer in pieces: the text, and whether it is reasoning.

        If the answer calls tools, they run, and the model answers again with their results. The answer joins the
        history, also if the caller stops reading, unless it is only reasoning.

        Raises:
            UserError: the question exceeds the model's context, or the template refuses it.
        """
        self._asked += 1
        self._last = self._fitting([*self.history, {"role": "user", "content": question}])
        try:
            yield from self._stream()
            for _ in range(_MOST_CALLS):
                content, calls = self._calls()
                if not calls:
                    break
                self._last = self._fitting([*self._last, *self._called(content, calls)])
                yield "\n", False
                yield from self._stream()
            else:
                if self._calls()[1]:
                    self.tell(f"[no further calls: {_MOST_CALLS} a question]")
        finally:
            if self.answer.visible.strip() and self.has_template:
                self.history = [*self._last, {"role": "assistant", "content": self.answer.text}]

    def base(self) -> Iterator[tuple[str, bool]]:
        """Ask the model without its adapter the last question again, with the same history.

        The history stays as it is.

        Raises:
            UserError: nothing was asked, or the model has no adapter.
        """
        if not self._last:
            raise UserError("ask something first")
        if not self.recipe.cfg.checkpointer.get("adapter_checkpoint"):
            raise UserError(
                "there is no adapter to leave out; start with --adapter, or name a run's folder"
            )
        try:
            with without_adapter(self.recipe.learner):
                self.session.refresh()
                yield from self._stream()
        finally:
            self.session.refresh()

    def check_tools(self) -> None:
        """Check that the chat template shows the tools to the model.

        Raises:
            UserError: there is no template, or it leaves them out.
        """
        hello = [{"role": "user", "content": "Hello"}]
        if not self.has_template or self._prompt(hello) == render_prompt(self._tokenizer, hello):
            raise UserError(
                "the model's chat template has no place for tools; leave out --tool, or use another model"
            )

    def reset(self) -> None:
        """Forget the history; the system message stays."""
        self.history, self._last = [], []

    def _calls(self) -> tuple[str, list[Call]]:
        """Return the last answer without its calls of tools, and the calls."""
        if self.tools is None or self.answer.finish_reason != "stop":
            return "", []
        return calls_in(self.answer.marked, self.tools.schemas)

    def _called(self, content: str, calls: list[Call]) -> list[Message]:
        """Run the tools that the last answer calls; return its turn and theirs."""
        assert self.tools is not None
        messages = [call.message(number) for number, call in enumerate(calls)]
        turns: list[Message] = [{"role": "assistant", "content": content, "tool_calls": messages}]
        for number, call in enumerate(calls):
            result = defused(self._tokenizer)(self.tools(call))
            given = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
            self.tell(
                harmless(shortened(f"[{call.name or 'a call'}({given}): {result}]", _MOST_SHOWN))
            )
            turns.append(
                {
                    "role": "tool",
                    "name": call.name,
                    "tool_call_id": call_id(number),
                    "content": result,
                }
            )
        return turns

    def _stream(self) -> Iterator[tuple[str, bool]]:
        """Yield an answer to the last question in pieces."""
        self.answer = answer = Reply()
        prompt = self._prompt(self._last)
        seed = sample_seed(self.seed, "chat", str(self._asked), 0)
        new = min(self.sampling.max_new_tokens, self._limit - len(prompt))
        sampling = replace(self.sampling, max_new_tokens=new)
        decoder = TextStream(self._tokenizer)
        reasoning = Reasoning(to_text(self._tokenizer, prompt[-16:]))
        began = time.perf_counter()
        for step in self.session.stream(Request("chat", 0, seed, tuple(prompt)), sampling):
            now = time.perf_counter()
            answer.first = answer.first or now - began
            answer.seconds = now - began - answer.first
            tokens = step.tokens if isinstance(step, Completion) else step
            answer.tokens = len(tokens)
            if isinstance(step, Completion):
                answer.finish_reason = step.finish_reason
                if self.tools is not None:
                    answer.marked = marked_text(self._tokenizer, tokens)
                # the text of a token that ends the answer is no part of it
                text = decoder.add(tokens[-1])
                if step.finish_reason == "stop":
                    text = ""
                pieces = reasoning.add(text + decoder.end()) + reasoning.end()
            else:
                pieces = reasoning.add(decoder.add(tokens[-1]))
            for text, hidden in pieces:
                answer.text += text
                if not hidden:
                    answer.visible += text
                yield text, hidden

    @property
    def _limit(self) -> int:
        """Positions that the model takes."""
        return int(self.recipe.engines.max_seq_len)

    def _prompt(self, messages: list[Message]) -> list[int]:
        if self.system:
            messages = [{"role": "system", "content": self.system}, *messages]
        return render_prompt(self._tokenizer, messages, self.tools.schemas if self.tools else None)

    def _fitting(self, messages: list[Message]) -> list[Message]:
        """Return the messages that leave room for an answer: with long results of tools cut, then without old turns.

        Raises:
            UserError: the last question alone is too long.
        """
        most = self._limit - min(self.sampling.max_new_tokens, _LEAST_ROOM, self._limit // 4)
        length = len(self._prompt(messages))
        results = [message for message in messages if message["role"] == "tool"]
        while length > most and results:
            longest = max(results, key=lambda message: len(message["content"]))
            size = len(longest["content"])
            if size <= _LEAST_RESULT:
                break
            longest["content"] = shortened(longest["content"], size * 2 // 3)
            length = len(self._prompt(messages))
        first = 0  # the message with which the prompt begins: the first one or a later question
        questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for question in questions[1:]:
            if length <= most:
                break
            first = question
            length = len(self._prompt(messages[first:]))
        if length > most:
            raise UserError(
                f"the question has {length:,} tokens, and the model takes {self._limit:,} with its answer; shorten it"
            )
        if first:
            self.tell(
                f"the conversation exceeds the model's {self._limit:,} tokens: {first} messages are left out"
            )
        return messages[first:]


def model_sampling(folder: Path) -> dict[str, float]:
    """Return how a model's ``generation_config.json`` says to sample: ``temperature``, ``top_p``, ``top_k``."""
    path = folder / "generation_config.json"
    settings = json_object(path.read_bytes()) if path.is_file() else None
    sampling = {"temperature": _TEMPERATURE}
    if settings is None:
        return sampling
    if settings.get("do_sample") is False:
        return {"temperature": 0}
    for key in ("temperature", "top_p", "top_k", "min_p"):
        if settings.get(key):
            sampling[key] = settings[key]
    return sampling


@contextmanager
def open_chat(
    cfg: DictConfig,
    seed: int | None = None,
    system: str = "",
    tools: Tools | None = None,
    **sampling: Any,
) -> Iterator[Chat]:
    """Open a config's model for a conversation.

    Args:
        cfg: config of any recipe, from :meth:`rocm_ext.config.chosen_model.ChosenModel.load`.
        seed, system, tools: see :class:`Chat`; without ``seed``, it is a random one.
        sampling: values of :class:`~rocm_ext.sampling.Sampling`; the model's defaults replace None and missing
            values.

    Raises:
        UserError: the config, the weights or the machine do not allow it.
    """
    if "prompts" not in cfg:
        cfg = sampling_config(cfg)
    sample_here(cfg)
    cfg.prompts = cfg.eval_prompts = cfg.metric_logger = None
    cfg.seed = seed  # a run's config names the seed of its training
    given = {key: value for key, value in sampling.items() if value is not None}
    with TemporaryDirectory() as folder:
        cfg.output_dir = cfg.checkpointer.output_dir = folder  # nothing is written
        recipe = RLRecipe(cfg)
        recipe.open_model()
        try:
            settings = model_sampling(Path(cfg.checkpointer.checkpoint_dir)) | given
            with recipe.engines.sample.session(None) as session:
                chat = Chat(recipe, session, Sampling(**settings), cfg.seed, system, tools=tools)
                if tools is not None:
                    chat.check_tools()
                yield chat
        finally:
            recipe.cleanup()
