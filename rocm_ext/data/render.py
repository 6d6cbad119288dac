"""Render conversations to tokens and labels.

Only this module turns messages into tokens, so a training row starts with exactly the sampler's prompt, and its labels
start right behind it.

Labels follow torchtune: ``labels[t]`` is the token at ``t`` itself, or -100 for no loss.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby, pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from rocm_ext.base.errors import UserError
from rocm_ext.data.encoder import TextEncoder, to_text
from rocm_ext.data.messages import Turn, to_turns
from rocm_ext.data.template import ChatTemplate, Spans, Tools, Turns

IGNORE = -100
Labelled = tuple[list[int], list[int]]  # tokens [s] and labels [s]
Reply = tuple[list[int], bool]  # see `render_reply`
_CALL = {"type": "function", "function": {"name": "a", "arguments": {}}}
_QUESTION = Turn("user", "a", True)
_EACH_ROLE = (
    Turn("system", "a", True),
    _QUESTION,
    Turn("assistant", "", False, {"tool_calls": [_CALL], "reasoning_content": "a"}),
    Turn("tool", "a", True),
)


class Conversation(NamedTuple):
    """A conversation to train on.

    Attributes:
        turns: the messages.
        tools, train_on_input, last_turn: see :func:`render_conversation`.
    """

    turns: Turns
    tools: Tools = None
    train_on_input: bool = False
    last_turn: bool = False

    def trained(self) -> "Conversation":
        """Return the conversation up to its last turn with labels; UserError: no turn has labels."""
        trained = [i for i, turn in enumerate(self.turns) if not turn.masked]
        if not trained:
            raise UserError("no assistant turn to train on")
        *before, last = self.turns[: trained[-1] + 1]
        if self.last_turn or self.train_on_input:
            before = [turn._replace(masked=True) for turn in before]
        return self._replace(turns=[*before, last])


Conversations = Sequence[Conversation | Exception]
Rendered = list[Labelled | Exception]  # an entry per conversation, see `each`


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


def render_history(tokenizer: Any, turns: Turns, tools: Tools = None) -> list[int]:
    """Render turns as :func:`render_prompt` renders messages; assistant turns may be empty."""
    return renderer_of(tokenizer).prompt(turns, tools)


def render_conversation(
    tokenizer: Any,
    messages: Sequence[Mapping],
    train_on_input: bool = False,
    tools: Tools = None,
    last_turn: bool = False,
) -> Labelled:
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
    conversation = Conversation(to_turns(messages), tools, train_on_input, last_turn)
    (rendered,) = render_conversations(tokenizer, [conversation])
    return returned(rendered)


def render_conversations(tokenizer: Any, conversations: Sequence[Conversation]) -> Rendered:
    """Render conversations to train on; a chat template's texts are tokenised in one batch, which takes less time.

    Returns:
        For each conversation what :func:`render_conversation` returns, or the exception that it raises.
    """
    trained = each(Conversation.trained, conversations)
    rendered = renderer_of(tokenizer).conversations(trained)
    return each(_with_input, conversations, rendered)


def _with_input(conversation: Conversation, rendered: Labelled) -> Labelled:
    if not conversation.train_on_input:
        return rendered
    tokens, _ = rendered
    return tokens, list(tokens)


def each(function: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """Apply a function to the values of each row.

    Args:
        function: takes one value of each column.
        columns: values by row.

    Returns:
        By row the function's result, or an exception: the one that the function raises, or the first among the values.
        So one bad row does not stop the others.
    """
    results = []
    for values in zip(*columns, strict=True):
        errors = [value for value in values if isinstance(value, Exception)]
        try:
            results.append(errors[0] if errors else function(*values))
        except Exception as error:  # a tokenizer of the user's may raise anything
            results.append(error)
    return results


def returned(result: Any) -> Any:
    """Return a result of :func:`each`, or raise it if it is an exception."""
    if isinstance(result, Exception):
        raise result
    return result


def render_reply(
    tokenizer: Any,
    before: Turns,
    answer: Turn,
    sampled: str,
    reply: Turns,
    tools: Tools = None,
) -> Reply:
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
    return renderer_of(tokenizer).reply(before, answer, sampled, reply, tools)


def renderer_of(tokenizer: Any) -> "Renderer":
    """Return the tokenizer's renderer; torchtune's tokenizers render themselves."""
    return getattr(tokenizer, "renderer", None) or TorchtuneRenderer(tokenizer)


class _Text(NamedTuple):
    """A conversation as a chat template writes it."""

    conversation: Conversation
    text: str
    spans: Spans


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
        self.template = template
        self._encoder = encoder
        self._stops = frozenset(stops)

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

    def prompt(self, turns: Turns, tools: Tools) -> list[int]:
        """Implement :func:`render_prompt` with the template."""
        text = self.template.render(turns, tools, prompt=True)
        return self._encoder.encode(text)

    def conversations(self, conversations: Conversations) -> Rendered:
        """Implement :func:`render_conversations` with the template."""
        texts = each(self._text_of, conversations)
        tokens = self._encode_all(texts)
        return each(self._labelled, texts, tokens)

    def _text_of(self, conversation: Conversation) -> _Text:
        # nothing prompts a turn that begins a conversation
        if all(turn.masked for turn in conversation.turns[1:]):
            raise UserError("no assistant turn to train on: the only one begins the conversation")
        find_spans = self._marked if self.template.marked else self._nested
        text, spans = find_spans(conversation.turns, conversation.tools)
        return _Text(conversation, text, spans)

    def _encode_all(self, texts: Sequence[_Text | Exception]) -> list[list[int] | None]:
        """Tokenise the texts in one batch; None instead of tokens if an exception is there, or the batch fails."""
        batch = [text.text for text in texts if isinstance(text, _Text)]
        try:
            encoded = iter(self._encoder.encode_all(batch))
        except Exception:
            # any tokenizer's; the faulty text raises it again when it is tokenised alone
            return [None] * len(texts)
        return [next(encoded) if isinstance(text, _Text) else None for text in texts]

    def _labelled(self, text: _Text, encoded: list[int] | None) -> Labelled:
        """Return the tokens and labels of a text; ``encoded`` are its tokens, if they are known."""
        edges = [edge for span in text.spans for edge in span]
        tokens, cuts = self._encoder.encode_apart(text.text, edges, encoded)
        if text.spans and not self._has_stop(tokens[cuts[-2] :]):
            tokens += self._next_marker(text)
        labels = [IGNORE] * len(tokens)
        stopped = []
        for start, end in zip(cuts[::2], cuts[1::2], strict=True):
            if not self._has_stop(tokens[start:end]):
                end += len(self._up_to_stop(tokens[end:]))
            stopped.append(self._has_stop(tokens[start:end]))
            _label(labels, tokens, range(start, end), self._stops)
        # gpt-oss: <|return|> is <|end|> once there are later turns
        if any(stopped) and not all(stopped):
            raise UserError(
                f"chat template {self.template.origin} ends trained assistant turn {stopped.index(False) + 1} with no "
                "stop token, which would teach the model to run on; train on the last turn alone (assistant_turns: "
                "last in the dataset, or weight: 0 in the message)"
            )
        return tokens, labels

    def _has_stop(self, tokens: Sequence[int]) -> bool:
        return not self._stops.isdisjoint(tokens)

    def _next_marker(self, text: _Text) -> list[int]:
        """Return the next turn's marker if it ends the last turn, like GLM's ``<|user|>``; else nothing."""
        turns, tools, *_ = text.conversation
        try:
            longer = self.template.render([*turns, _QUESTION], tools)
        except UserError:
            return []
        if not longer.startswith(text.text):
            return []
        following = longer.removeprefix(text.text)
        return self._up_to_stop(self._encoder.encode(following))

    def _up_to_stop(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens up to a stop token with only white space before it, or []."""
        for count, token in enumerate(tokens, 1):
            if token in self._stops:
                return list(tokens[:count])
            if not self.text([token]).isspace():
                break
        return []

    def reply(self, before: Turns, answer: Turn, sampled: str, reply: Turns, tools: Tools) -> Reply:
        """Implement :func:`render_reply` with the template."""
        prompt = self.template.render(before, tools, prompt=True)
        replied = self.template.render([*before, answer, *reply], tools, prompt=True)
        begun = prompt + sampled
        if replied.startswith(begun):
            return self._behind(replied, len(begun)), False
        answered = self.template.render([*before, answer], tools)
        if answered.startswith(prompt) and replied.startswith(answered):
            return self._behind(replied, len(prompt)), False
        return self._encoder.encode(replied), True

    def _behind(self, text: str, cut: int) -> list[int]:
        """Tokenise a text, and return its tokens behind the first stop token after character ``cut``."""
        tokens, (start,) = self._encoder.encode_apart(text, [cut])
        return tokens[_behind_stop(tokens, start, self._stops) :]

    def _nested(self, turns: Turns, tools: Tools) -> tuple[str, Spans]:
        """Return the text and the spans of trained turns, by rendering the conversation up to them."""
        text = self.template.render(turns, tools)
        spans = []
        for i, turn in enumerate(turns):
            if turn.masked or i == 0:
                continue
            last = i == len(turns) - 1
            before = self.template.render(turns[:i], tools, prompt=True)
            after = text if last else self.template.render(turns[: i + 1], tools)
            if not (after.startswith(before) and text.startswith(after)):
                raise UserError(
                    f"message {i}: chat template {self.template.origin} renders this assistant turn differently "
                    "when it is generated and inside the conversation, so training would teach text that is never "
                    f"generated; {self._cure(turn, last)}"
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
        switch = ""
        if self.template.switches_reasoning:
            switch = " or set chat_template_args: {enable_thinking: True},"
        return f"the prompt leaves no room for its reasoning: remove it from the row,{switch} or use another template"

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether a prompt ends inside the assistant's reasoning, behind ``<think>``."""
        try:
            prompt = self.template.render([_QUESTION], None, prompt=True)
        except UserError:  # templates that need more than a question
            return False
        return prompt.rstrip().endswith("<think>")

    def _marked(self, turns: Turns, tools: Tools) -> tuple[str, Spans]:
        """Return the text and the spans of trained turns, from the template's generation blocks."""
        text, blocks = self.template.render_marked(turns, tools)
        answers = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
        if len(answers) != len(blocks):
            raise UserError(
                f"chat template {self.template.origin} marked {len(blocks)} parts of a conversation with "
                f"{len(answers)} assistant turns; expected one generation block per turn"
            )
        spans = []
        for i, (start, end) in zip(answers, blocks, strict=True):
            if turns[i].masked or i == 0:
                continue
            prompted = self._prompted(text, turns[:i], tools)
            # a block may include the header, which the prompt contains
            spans.append((max(start, prompted), end))
        return text, spans

    def _prompted(self, text: str, before: Turns, tools: Tools) -> int:
        """Return the number of first characters of ``text`` that the prompt of the turns ``before`` has."""
        prompt = self.template.render(before, tools, prompt=True)
        shared = commonprefix([prompt, text])  # noqa: RUF071 - by characters
        if shared == prompt:
            return len(shared)
        # DeepSeek's prompt adds <think>, so the texts part somewhere: go back to the end of a line or of a token
        ends = [0]
        for mark in ("\n", *self.added_tokens):
            if mark in shared:
                ends.append(shared.rindex(mark) + len(mark))
        return max(ends)


class TokenizerRenderer(ABC):
    """Renders with a torchtune model tokenizer, which takes one text or conversation at a time.

    Attributes:
        template, marks, opens_reasoning: as in :class:`TemplateRenderer`; there is no template.
    """

    template: ChatTemplate | None = None
    marks: frozenset[str] = frozenset()
    opens_reasoning = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = unlimited(tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` as the tokenizer decodes it."""
        return to_text(self._tokenizer, tokens)

    def conversations(self, conversations: Conversations) -> Rendered:
        """Implement :func:`render_conversations`."""
        return each(self._conversation, conversations)

    def reply(self, before: Turns, answer: Turn, sampled: str, reply: Turns, tools: Tools) -> Reply:
        """Implement :func:`render_reply` with the tokenizer."""
        prompt = self.prompt(before, tools)
        replied = self.prompt([*before, answer, *reply], tools)
        if replied[: len(prompt)] != prompt:
            return replied, True
        stops = frozenset(self._tokenizer.stop_tokens)
        return replied[_behind_stop(replied, len(prompt), stops) :], False

    @abstractmethod
    def prompt(self, turns: Turns, tools: Tools) -> list[int]:
        """Implement :func:`render_prompt`."""

    @abstractmethod
    def _conversation(self, conversation: Conversation) -> Labelled:
        """Return the tokens and labels of a conversation."""


class PlainRenderer(TokenizerRenderer):
    """Renders a prompt and its completion without a template, for base models.

    A torchtune model tokenizer adds a BOS if the model has one; the token with id ``end`` ends a completion.
    """

    def __init__(self, tokenizer: Any, end: int) -> None:
        super().__init__(tokenizer)
        self._end = end

    def prompt(self, turns: Turns, tools: Tools) -> list[int]:
        """Tokenise the only turn, a user's."""
        if tools or len(turns) != 1 or turns[0].role != "user":
            roles = ", ".join(turn.role for turn in turns)
            raise UserError(
                f"chat_template none takes a prompt alone, found {'tools and ' * bool(tools)}{roles or 'nothing'}; "
                "a conversation needs a chat template"
            )
        return self._tokenizer.encode(turns[0].content, add_bos=True, add_eos=False)

    def _conversation(self, conversation: Conversation) -> Labelled:
        *asked, completion = conversation.turns
        prompt = self.prompt(asked, conversation.tools)
        answer = self._tokenizer.encode(completion.content, add_bos=False, add_eos=False)
        answer = [*answer, *end_of(answer, self._tokenizer, self._end)]
        masked = [IGNORE] * len(prompt)
        return [*prompt, *answer], [*masked, *answer]


class TorchtuneRenderer(TokenizerRenderer):
    """Renders with a torchtune model tokenizer, as torchtune's recipes do."""

    def prompt(self, turns: Turns, tools: Tools) -> list[int]:
        """Implement :func:`render_prompt` with the tokenizer."""
        _refuse_tools(turns, tools)
        begun = [*turns, Turn("assistant", "", False)]
        tokens, mask = self._render(begun, unmasked=[len(turns)])
        start = mask.index(False) if False in mask else len(mask)
        return tokens[: start + self._header_length()]

    def _conversation(self, conversation: Conversation) -> Labelled:
        turns = conversation.turns
        _refuse_tools(turns, conversation.tools)
        trained = [i for i, turn in enumerate(turns) if not turn.masked]
        groups = [trained]
        if any(following - i == 1 for i, following in pairwise(trained)):
            # A run of unmasked tokens must be one turn, so adjacent turns need two renderings.
            groups = [trained[::2], trained[1::2]]
        header = self._header_length()
        stops = frozenset(getattr(self._tokenizer, "stop_tokens", ()))
        labels: list[int] = []
        for group in groups:
            tokens, mask = self._render(turns, unmasked=group)
            labels = labels or [IGNORE] * len(tokens)
            for masked, run in groupby(range(len(mask)), key=mask.__getitem__):
                if not masked:
                    _label(labels, tokens, list(run)[header:], stops)
        return tokens, labels

    def _render(self, turns: Turns, unmasked: Sequence[int]) -> tuple[list[int], list[bool]]:
        """Return tokens and mask; only the turns at these indices are unmasked."""
        # this import takes seconds, and most models bring a chat template
        from torchtune.data import Message

        messages = []
        for i, turn in enumerate(turns):
            role = "ipython" if turn.role == "tool" else turn.role
            messages.append(Message(role, turn.content, masked=i not in unmasked))
        out = self._tokenizer({"messages": messages})
        return out["tokens"], out["mask"]

    def _header_length(self) -> int:
        """Count the tokens of an assistant's turn before its content.

        An empty turn and another one differ from the first token of the content on.
        ``inference=True`` does not help: torchtune's Qwen, Mistral and Gemma tokenizers ignore it and end the empty
        turn, and Phi 4's tokenizer does not accept it.
        """

        def turn(content: str) -> list[int]:
            answer = Turn("assistant", content, False)
            tokens, mask = self._render([_QUESTION, answer], unmasked=[1])
            return [token for i, token in enumerate(tokens) if not mask[i]]

        return len(commonprefix([turn(""), turn("a")]))  # noqa: RUF071 - of tokens


Renderer = TemplateRenderer | PlainRenderer | TorchtuneRenderer


def _refuse_tools(turns: Turns, tools: Tools) -> None:
    if tools or any("tool_calls" in turn.more for turn in turns):
        raise UserError("tools and tool_calls need the model's chat template (chat_template: auto)")


def end_of(tokens: Sequence[int], tokenizer: Any, end: int) -> list[int]:
    """Return [``end``] to append to a text's tokens, or [] if they already end with a stop token and white space."""
    stops = {end, *getattr(tokenizer, "stop_tokens", ())}
    for token in reversed(tokens):
        if not tokenizer.decode([token]).isspace():
            return [] if token in stops else [end]
    return [end]


def _behind_stop(tokens: Sequence[int], start: int, stops: frozenset[int]) -> int:
    """Return the index behind the first stop token from ``start`` on, or ``start``."""
    for i in range(start, len(tokens)):
        if tokens[i] in stops:
            return i + 1
    return start


def _label(
    labels: list[int], tokens: Sequence[int], indices: Sequence[int], stops: frozenset[int]
) -> None:
    """Label the tokens at ``indices``, one turn, up to its last stop token.

    The model does not generate the ``"\\n"`` that a template may put behind it.
    """
    end = len(indices)
    while end and tokens[indices[end - 1]] not in stops:
        end -= 1
    for i in indices[: end or len(indices)]:
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
    tokens = list(tokens)
    if tokens and tokens[-1] in tokenizer.stop_tokens:
        tokens.pop()
    return renderer_of(tokenizer).text(tokens)
