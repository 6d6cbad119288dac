"""Render conversations to tokens and labels.

Only this module turns messages into tokens, so a training row starts with exactly the sampler's prompt, and its labels
start right behind it.

Labels follow torchtune: ``labels[t]`` is the token at ``t`` itself, or -100 for no loss.
"""

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby, pairwise
from os.path import commonprefix
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.data.encoder import TextEncoder, to_text
from rocm_ext.data.messages import Turn, to_turns
from rocm_ext.data.template import ChatTemplate

IGNORE = -100
Tools = Sequence[Mapping] | None
Steps = Generator[str, list[int] | None, Any]  # yields texts to tokenise, and receives their tokens or None
Rendering = Generator[str, list[int] | None, tuple[list[int], list[int]]]
_CALL = {"type": "function", "function": {"name": "a", "arguments": {}}}
_EACH_ROLE = (
    Turn("system", "a", True),
    Turn("user", "a", True),
    Turn("assistant", "", False, {"tool_calls": [_CALL], "reasoning_content": "a"}),
    Turn("tool", "a", True),
)


def render_prompt(tokenizer: Any, messages: Sequence[Mapping], tools: Tools = None) -> list[int]:
    """Render a prompt to sample from: the conversation so far and the header of the assistant's turn.

    Text that looks like a special token (``<|im_end|>``) becomes that token, as in transformers. Only torchtune's
    Llama 3 tokenizer keeps it as text. ``tokenizer.max_seq_len`` does not apply.

    Args:
        tokenizer: from :func:`rocm_ext.data.tokenizer.open_tokenizer`, or a torchtune model tokenizer.
        messages: messages ``{"role", "content"}``, or ShareGPT's ``{"from", "value"}``.
        tools: JSON schemas of the functions that the assistant may call.

    Returns:
        Token ids ``[s]``.

    Raises:
        UserError: the chat template refuses the conversation.
        ValueError: a message is malformed.
    """
    return render_history(tokenizer, to_turns(messages), tools)


def render_history(tokenizer: Any, turns: Sequence[Turn], tools: Tools = None) -> list[int]:
    """Render turns as :func:`render_prompt` renders messages; assistant turns may be empty."""
    return _renderer(tokenizer).prompt(turns, tools)


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping],
    train_on_input: bool = False,
    tools: Tools = None,
    last_turn: bool = False,
) -> tuple[list[int], list[int]]:
    """Render a conversation to train on.

    Labels cover the content and the end-of-turn token of every assistant turn, except turns with ``weight: 0``. They
    exclude the turn's header, which a generation prompt contains. Turns after the last labelled one are cut. With a
    chat template, an assistant turn that begins the conversation has no labels: nothing prompts it.

    Args:
        tokenizer, messages, tools: as in :func:`render_prompt`.
        train_on_input: whether to label every token.
        last_turn: whether to label only the last assistant turn.

    Returns:
        Tokens ``[s]`` and labels ``[s]``.

    Raises:
        UserError: the conversation has no assistant turn to train on, or the chat template does not show which tokens
            to train on.
        ValueError: a message is malformed.
    """
    return alone(render_turns(tokenizer, to_turns(messages), train_on_input, tools, last_turn))


def render_turns(
    tokenizer: Any, turns: Sequence[Turn], train_on_input: bool = False, tools: Tools = None, last_turn: bool = False
) -> Rendering:
    """Render turns as :func:`render_conversation` does, as steps for :func:`together`."""
    last = max((i for i, turn in enumerate(turns) if not turn.masked), default=None)
    if last is None:
        raise UserError("no assistant turn to train on")
    turns = turns[: last + 1]
    if last_turn or train_on_input:
        turns = [*(turn._replace(masked=True) for turn in turns[:-1]), turns[-1]]
    tokens, labels = yield from _renderer(tokenizer).conversation(turns, tools)
    return tokens, list(tokens) if train_on_input else labels


def together(steps: Sequence[Steps], encode: Callable[[list[str]], Sequence] | None = None) -> list:
    """Run steps to their ends, and return their results or exceptions.

    With ``encode``, the texts that they yield are tokenised at once, which takes less time and gives the same tokens.
    Without it, every step tokenises its text.
    """
    results: list = [None] * len(steps)
    sent = dict.fromkeys(range(len(steps)))
    while sent:
        texts = {}
        for i, tokens in sent.items():
            try:
                texts[i] = steps[i].send(tokens)
            except StopIteration as end:
                results[i] = end.value
            except Exception as error:  # a tokenizer of the user's may raise anything
                results[i] = error
        sent = dict(zip(texts, encode(list(texts.values())), strict=True)) if encode else dict.fromkeys(texts)
    return results


def alone(step: Steps) -> Any:
    """Run one step to its end, and return its result or raise its exception."""
    (result,) = together([step])
    return returned(result)


def returned(result: Any) -> Any:
    """Return a result of :func:`together`, or raise it if it is an exception."""
    if isinstance(result, Exception):
        raise result
    return result


def render_reply(
    tokenizer: Any, before: Sequence[Turn], answer: Turn, sampled: str, reply: Sequence[Turn], tools: Tools = None
) -> tuple[list[int], bool]:
    """Render the continuation of an answer: the end of its turn, the reply, and the header of the next answer.

    Up to the answer, a conversation keeps the prompt's tokens and the sampled ones. The continuation is the template's
    text behind the sampled answer; if the template writes the answer differently, such as a tool's call, it is the text
    behind the template's answer. Some templates rewrite earlier turns once there are later ones: Qwen3's drops their
    reasoning. Then the conversation does not begin with the sampled tokens, and is rendered anew.

    Args:
        tokenizer, tools: as in :func:`render_prompt`.
        before: the conversation up to the answer.
        answer: the assistant's turn.
        sampled: text of the answer as it was sampled, with special tokens, but without the stop token.
        reply: the turns behind the answer.

    Returns:
        Token ids and whether they render the full conversation anew. If not, they follow the sampled answer and its
        stop token.
    """
    return _renderer(tokenizer).reply(before, answer, sampled, reply, tools)


def _renderer(tokenizer: Any) -> "Renderer":
    return getattr(tokenizer, "renderer", None) or TorchtuneRenderer(tokenizer)


class TemplateRenderer:
    """Renders with a chat template, to the ids that ``apply_chat_template`` gives.

    A prompt and the answer behind it are tokenised apart where a token would span both, because a server tokenises
    the prompt alone.

    Args:
        template: the chat template.
        encoder: tokenises the template's text.
        stops: ids of the tokens that end an answer.
    """

    def __init__(self, template: ChatTemplate, encoder: TextEncoder, stops: Sequence[int]) -> None:
        self.template, self._encoder, self._stops = template, encoder, frozenset(stops)

    def encode_all(self, texts: Sequence[str]) -> Sequence[list[int] | None]:
        """Tokenise the texts of several conversations for :func:`together`."""
        try:
            return self._encoder.encode_all(texts)
        except Exception:  # any tokenizer's; the faulty conversation raises it again
            return [None] * len(texts)

    @property
    def added_tokens(self) -> frozenset[str]:
        """Texts of the vocabulary's added tokens, special or not."""
        return frozenset(self._encoder.ids)

    @cached_property
    def marks(self) -> frozenset[str]:
        """Texts of the added tokens that the template writes around messages, but for white space."""
        written = self.template.code
        for last in range(1, len(_EACH_ROLE) + 1):
            with suppress(UserError):  # the template refuses tools, or such an order
                written += self.template.render(_EACH_ROLE[:last], None, prompt=True)
        return frozenset(text for text in self.added_tokens if text.strip() and text in written)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` with special tokens."""
        return self._encoder.decode(tokens, special=True)

    def prompt(self, turns: Sequence[Turn], tools: Tools) -> list[int]:
        """Implement :func:`render_prompt` with the template."""
        return self._encoder.encode(self.template.render(turns, tools, prompt=True))

    def conversation(self, turns: Sequence[Turn], tools: Tools) -> Rendering:
        """Implement :func:`render_conversation` with the template."""
        if all(turn.masked for turn in turns[1:]):  # nothing prompts a turn that begins a conversation
            raise UserError("no assistant turn to train on: the only one begins the conversation")
        text, spans = self._marked(turns, tools) if self.template.marked else self._nested(turns, tools)
        tokens, cuts = self._encoder.encode_apart(text, [cut for span in spans for cut in span], (yield text))
        if spans and not self._stops.intersection(tokens[cuts[-2] :]):
            tokens += self._next_marker(text, turns, tools)
        labels, stopped = [IGNORE] * len(tokens), []
        for start, end in zip(cuts[::2], cuts[1::2], strict=True):
            if not self._stops.intersection(tokens[start:end]):
                end += len(self._up_to_stop(tokens[end:]))
            stopped.append(bool(self._stops.intersection(tokens[start:end])))
            _label(labels, tokens, range(start, end), self._stops)
        if any(stopped) and not all(stopped):  # gpt-oss: <|return|> is <|end|> once there are later turns
            raise UserError(
                f"chat template {self.template.origin} ends trained assistant turn {stopped.index(False) + 1} with no "
                "stop token, which would teach the model to run on; train on the last turn alone (assistant_turns: "
                "last in the dataset, or weight: 0 in the message)"
            )
        return tokens, labels

    def _next_marker(self, text: str, turns: Sequence[Turn], tools: Tools) -> list[int]:
        """Return the next turn's marker if it ends the last turn, like GLM's ``<|user|>``; else nothing."""
        try:
            longer = self.template.render([*turns, Turn("user", "a", True)], tools)
        except UserError:
            return []
        return self._up_to_stop(self._encoder.encode(longer[len(text) :])) if longer.startswith(text) else []

    def _up_to_stop(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens up to a stop token with only white space before it, or []."""
        for count, token in enumerate(tokens, 1):
            if token in self._stops:
                return list(tokens[:count])
            if not self.text([token]).isspace():
                break
        return []

    def reply(
        self, before: Sequence[Turn], answer: Turn, sampled: str, reply: Sequence[Turn], tools: Tools
    ) -> tuple[list[int], bool]:
        """Implement :func:`render_reply` with the template."""
        prompt = self.template.render(before, tools, prompt=True)
        replied = self.template.render([*before, answer, *reply], tools, prompt=True)
        if replied.startswith(prompt + sampled):
            tokens, (end,) = self._encoder.encode_apart(replied, [len(prompt + sampled)])
            return tokens[_behind_stop(tokens, end, self._stops) :], False
        answered = self.template.render([*before, answer], tools)
        if answered.startswith(prompt) and replied.startswith(answered):
            tokens, (start,) = self._encoder.encode_apart(replied, [len(prompt)])
            return tokens[_behind_stop(tokens, start, self._stops) :], False
        return self._encoder.encode(replied), True

    def _nested(self, turns: Sequence[Turn], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the spans of trained turns, by rendering the conversation up to them."""
        text, spans = self.template.render(turns, tools), []
        for i, turn in enumerate(turns):
            if turn.masked or i == 0:
                continue
            before = self.template.render(turns[:i], tools, prompt=True)
            after = text if i == len(turns) - 1 else self.template.render(turns[: i + 1], tools)
            if not (after.startswith(before) and text.startswith(after)):
                raise UserError(
                    f"message {i}: chat template {self.template.origin} renders this assistant turn differently "
                    "when it is generated and inside the conversation, so training would teach text that is never "
                    f"generated; {self._cure(turn, last=after is text)}"
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _cure(self, turn: Turn, last: bool) -> str:
        """Return what to do about a turn that is rendered differently when it is generated."""
        if not last:
            return (
                "train only on the last turn (assistant_turns: last in the dataset, or weight: 0 in the message), or "
                "use a template that keeps earlier turns as they are"
            )
        if not turn.reasons:
            return "use a template whose prompt begins the turn, or chat_template: torchtune with torchtune's tokenizer"
        switch = " or set chat_template_args: {enable_thinking: True}," if self.template.switches_reasoning else ""
        return f"the prompt leaves no room for its reasoning: remove it from the row,{switch} or use another template"

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether a prompt ends inside the assistant's reasoning, behind ``<think>``."""
        try:
            prompt = self.template.render([Turn("user", "a", True)], None, prompt=True)
        except UserError:  # templates that need more than a question
            return False
        return prompt.rstrip().endswith("<think>")

    def _marked(self, turns: Sequence[Turn], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the spans of trained turns, from the template's generation blocks."""
        text, spans = self.template.render_marked(turns, tools)
        answered = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
        if len(answered) != len(spans):
            raise UserError(
                f"chat template {self.template.origin} marked {len(spans)} parts of a conversation with "
                f"{len(answered)} assistant turns; expected one generation block per turn"
            )
        trained = []
        for i, (start, end) in zip(answered, spans, strict=True):
            if turns[i].masked or i == 0:
                continue
            before = self.template.render(turns[:i], tools, prompt=True)  # a block may include the header
            shared = commonprefix([before, text])  # noqa: RUF071 - by characters
            if shared != before:  # DeepSeek's prompt adds <think>: cut the shared text behind a line or a token
                marks = [mark for mark in ("\n", *self.added_tokens) if mark in shared]
                shared = shared[: max((shared.rindex(mark) + len(mark) for mark in marks), default=0)]
            trained.append((max(start, len(shared)), end))
        return text, trained


class PlainRenderer:
    """Renders a prompt and its completion without a template, for base models.

    A torchtune model tokenizer adds a BOS if the model has one; the token with id ``end`` ends a completion.
    """

    def __init__(self, tokenizer: Any, end: int) -> None:
        self._tokenizer, self._end = tokenizer, end

    def prompt(self, turns: Sequence[Turn], tools: Tools) -> list[int]:
        """Tokenise the only turn, a user's."""
        if tools or len(turns) != 1 or turns[0].role != "user":
            roles = ", ".join(turn.role for turn in turns)
            raise UserError(
                f"chat_template none takes a prompt alone, found {'tools and ' * bool(tools)}{roles or 'nothing'}; "
                "a conversation needs a chat template"
            )
        return self._tokenizer.encode(turns[0].content, add_bos=True, add_eos=False)

    def reply(
        self, before: Sequence[Turn], answer: Turn, sampled: str, reply: Sequence[Turn], tools: Tools
    ) -> tuple[list[int], bool]:
        """Refuse: there are no turns."""
        return self.prompt([*before, answer, *reply], tools), True

    def conversation(self, turns: Sequence[Turn], tools: Tools) -> Rendering:
        """Return prompt and completion; only the completion has labels."""
        yield from ()  # the tokenizer takes one text at a time
        prompt = self.prompt(turns[:-1], tools)
        answer = self._tokenizer.encode(turns[-1].content, add_bos=False, add_eos=False)
        answer = [*answer, *end_of(answer, self._tokenizer, self._end)]
        return [*prompt, *answer], [*[IGNORE] * len(prompt), *answer]


class TorchtuneRenderer:
    """Renders with a torchtune model tokenizer, as torchtune's recipes do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = unlimited(tokenizer)

    def prompt(self, turns: Sequence[Turn], tools: Tools) -> list[int]:
        """Implement :func:`render_prompt` with the tokenizer."""
        _refuse_tools(turns, tools)
        conversation = [*turns, Turn("assistant", "", False)]
        tokens, mask = self._render(conversation, unmasked=[len(turns)])
        start = mask.index(False) if False in mask else len(mask)
        return tokens[: start + self._header_length()]

    def conversation(self, turns: Sequence[Turn], tools: Tools) -> Rendering:
        """Implement :func:`render_conversation` with the tokenizer."""
        yield from ()  # the tokenizer takes one conversation at a time
        _refuse_tools(turns, tools)
        trained = [i for i, turn in enumerate(turns) if not turn.masked]
        labels: list[int] = []
        header, stops = self._header_length(), frozenset(getattr(self._tokenizer, "stop_tokens", ()))
        # A run of unmasked tokens must be one turn. If assistant turns are adjacent, render twice, with every second
        # one unmasked.
        adjacent = any(b - a == 1 for a, b in pairwise(trained))
        for group in (trained[::2], trained[1::2]) if adjacent else (trained,):
            tokens, mask = self._render(turns, unmasked=group)
            labels = labels or [IGNORE] * len(tokens)
            for masked, run in groupby(range(len(mask)), key=mask.__getitem__):
                if not masked:
                    _label(labels, tokens, list(run)[header:], stops)
        return tokens, labels

    def reply(
        self, before: Sequence[Turn], answer: Turn, sampled: str, reply: Sequence[Turn], tools: Tools
    ) -> tuple[list[int], bool]:
        """Implement :func:`render_reply` with the tokenizer."""
        prompt, replied = self.prompt(before, tools), self.prompt([*before, answer, *reply], tools)
        if replied[: len(prompt)] != prompt:
            return replied, True
        return replied[_behind_stop(replied, len(prompt), frozenset(self._tokenizer.stop_tokens)) :], False

    def _render(self, turns: Sequence[Turn], unmasked: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Return tokens and mask; only the turns at these indices are unmasked."""
        from torchtune.data import Message  # here, because it takes seconds, and most models bring a chat template

        roles = ("ipython" if turn.role == "tool" else turn.role for turn in turns)
        parts = enumerate(zip(roles, turns, strict=True))
        messages = [Message(role, turn.content, masked=i not in unmasked) for i, (role, turn) in parts]
        out = self._tokenizer({"messages": messages})
        return out["tokens"], out["mask"]

    def _header_length(self) -> int:
        """Count the tokens of an assistant's turn before its content.

        An empty turn and another one differ from the first token of the content on.
        ``inference=True`` does not help: torchtune's Qwen, Mistral and Gemma tokenizers ignore it and end the empty
        turn, and Phi 4's tokenizer does not accept it.
        """

        def turn(content: str) -> list[int]:
            tokens, mask = self._render([Turn("user", "a", True), Turn("assistant", content, False)], unmasked=[1])
            return [token for token, masked in zip(tokens, mask, strict=True) if not masked]

        empty, other = turn(""), turn("a")
        return next((i for i, (a, b) in enumerate(zip(empty, other, strict=False)) if a != b), len(empty))


Renderer = TemplateRenderer | PlainRenderer | TorchtuneRenderer


def _refuse_tools(turns: Sequence[Turn], tools: Tools) -> None:
    if tools or any("tool_calls" in turn.more for turn in turns):
        raise UserError("tools and tool_calls need the model's chat template (chat_template: auto)")


def end_of(tokens: Sequence[int], tokenizer: Any, end: int) -> list[int]:
    """Return [``end``] to append to a text's tokens, or [] if they already end with a stop token and white space."""
    last = next((token for token in reversed(tokens) if not tokenizer.decode([token]).isspace()), None)
    return [] if {last} & {end, *getattr(tokenizer, "stop_tokens", ())} else [end]


def _behind_stop(tokens: Sequence[int], start: int, stops: frozenset[int]) -> int:
    """Return the index behind the first stop token from ``start`` on, or ``start``."""
    return next((i + 1 for i in range(start, len(tokens)) if tokens[i] in stops), start)


def _label(labels: list[int], tokens: Sequence[int], indices: Sequence[int], stops: frozenset[int]) -> None:
    """Label the tokens at ``indices``, one turn, up to its stop token: the model does not generate the ``"\\n"`` that
    a template may put behind it."""
    end = next((n for n in range(len(indices), 0, -1) if tokens[indices[n - 1]] in stops), len(indices))
    for i in indices[:end]:
        labels[i] = tokens[i]


def unlimited(tokenizer: Any) -> Any:
    """Return the tokenizer without ``max_seq_len``.

    With ``max_seq_len`` torchtune's tokenizers silently cut rows and end them with an EOS, which teaches the model to
    stop in mid-sentence. The config's ``too_long`` handles long rows instead, and counts them.
    """
    if getattr(tokenizer, "max_seq_len", None) is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.max_seq_len = None
    return tokenizer


def marked_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decode an answer with special tokens, which mark calls of tools, but without the final stop token."""
    renderer, stops = getattr(tokenizer, "renderer", None), frozenset(tokenizer.stop_tokens)
    tokens = list(tokens[:-1] if tokens and tokens[-1] in stops else tokens)
    return renderer.text(tokens) if isinstance(renderer, TemplateRenderer) else to_text(tokenizer, tokens)
