"""Open a config's tokenizer together with its renderer of conversations."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.kinds import NULL, Kind, check, integer
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.data.encoder import EOS, TOKENIZER, HFTokenizer, TextEncoder, any_of, ids_in
from rocm_ext.data.messages import Turn, to_turns
from rocm_ext.data.render import (
    IGNORE,
    Conversation,
    PlainRenderer,
    Renderer,
    TemplateRenderer,
    render_conversation,
    render_prompt,
    renderer_of,
    returned,
)
from rocm_ext.data.template import TEMPLATE, ChatTemplate, read_template

_TEMPLATE = Kind(
    lambda value: isinstance(value, str),
    ("auto", "torchtune", "none", "a template's path", "its text"),
)
_VARIABLES = Kind(
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
    ("variables of the template, like {enable_thinking: False}",),
)
_SAMPLE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


class ChatTokenizer:
    """A torchtune model tokenizer with another renderer of conversations; further attributes are the tokenizer's.

    Args:
        base: a torchtune model tokenizer.
        renderer: renders conversations.
        ends: ids of the model's EOS tokens; the first ends a text without turns.
        reserved: texts that become special tokens; by default :func:`reserved_tokens` of ``base``.
        template: text of a chat template from the config; without it the template is the model's.
        template_args: the config's variables of the template, which a server also needs.

    Attributes:
        stop_tokens: ids that end an answer.
        end_of_text: id of the token that ends a text without turns.
        cuts: whether calls cut rows at ``max_seq_len``, as torchtune's tokenizers do.
        max_seq_len: maximum length of a row in tokens, or None without a limit.
    """

    def __init__(
        self,
        base: Any,
        renderer: Renderer,
        ends: Sequence[int],
        reserved: frozenset[str] | None = None,
        template: str | None = None,
        template_args: Json | None = None,
    ) -> None:
        self.base = base
        self.renderer = renderer
        self.end_of_text = ends[0]
        self.template_args = dict(template_args or {})
        self.reserved = reserved_tokens(base) if reserved is None else reserved
        stops = [*getattr(base, "stop_tokens", ()), *ends]
        self.stop_tokens = list(dict.fromkeys(stops))
        self.max_seq_len = getattr(base, "max_seq_len", None)
        self.cuts = False
        self._template = template

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "base":  # copy and pickle look before __init__ has run
            raise AttributeError(name)
        return getattr(self.base, name)

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        """Render ``sample["messages"]``, torchtune Messages, for torchtune's datasets: adds ``tokens`` and ``mask``."""
        tokens, mask = self.tokenize_messages(sample.pop("messages"))
        return {**sample, "tokens": tokens, "mask": mask}

    def tokenize_messages(self, messages: Sequence[Any]) -> tuple[list[int], list[bool]]:
        """Render torchtune Messages to tokens and mask, for torchtune's datasets of preferences."""
        turns = []
        on_input = False
        for message in messages:
            trained = not message.masked
            answer = message.role == "assistant"
            on_input |= trained and not answer
            turns.append(
                {
                    "role": message.role,
                    "content": message.text_content,
                    "weight": int(trained or not answer),
                }
            )
        tokens, labels = render_conversation(self, turns, on_input)
        limit = self.max_seq_len if self.cuts else None
        mask = [label == IGNORE for label in labels]
        return tokens[:limit], mask[:limit]

    def write_template(self, folder: Path) -> None:
        """Write the config's chat template, if it has one, into a folder with an exported model."""
        if self._template is not None:
            (folder / TEMPLATE).write_text(self._template, encoding="utf-8")


def open_tokenizer(cfg: DictConfig) -> Any:
    """Build the config's tokenizer, which renders by ``chat_template``.

    Args:
        cfg: config of a recipe; its ``checkpointer`` names the folder with the model's template.

    Returns:
        A :class:`ChatTokenizer`, or the torchtune tokenizer if that renders.

    Raises:
        UserError: the tokenizer cannot be built, or the template cannot be read or does not fit the tokenizer.
    """
    base = config.instantiate(cfg.tokenizer, key="tokenizer")
    check_max_seq_len(getattr(base, "max_seq_len", None))
    folder = Path(str(cfg.checkpointer.get("checkpoint_dir", "")))
    args, today = _template_args(cfg)
    check(cfg, {"chat_template": _TEMPLATE})
    setting = cfg.chat_template
    of_hub = isinstance(base, HFTokenizer)
    if setting == "none":
        ends = _ends(folder, base)
        return ChatTokenizer(base, PlainRenderer(base, ends[0]), ends)
    if of_hub and setting == "torchtune":
        raise UserError(
            "chat_template torchtune needs a tokenizer of torchtune's; expected auto, none, or a template"
        )
    if setting == "torchtune" or (setting == "auto" and getattr(base, "prompt_template", None)):
        _warn_if_different(base, folder, args, today)
        return base
    template = read_template(setting, folder, args, today)
    if template is None and of_hub:
        raise UserError(
            f"{folder} has no chat template; set chat_template: none to train a base model on prompts and completions "
            "as they are, or name a template's file"
        )
    if template is None:
        log.info("%s has no chat template; torchtune's tokenizer renders the conversations", folder)
        return base
    log.info("chat template: %s", template.origin)
    encoder = base.encoder if of_hub else _encoder(folder)
    ends = _ends(folder, base)
    if of_hub:
        ends = [*ends, *_turn_end(template, base)]
    renderer = TemplateRenderer(template, encoder, [*getattr(base, "stop_tokens", ()), *ends])
    custom = None if setting == "auto" else template.text
    tokenizer = ChatTokenizer(base, renderer, ends, encoder.special, custom, args)
    _check_end_of_turn(tokenizer, template, renderer.text)
    return tokenizer


def check_max_seq_len(value: Any) -> None:
    """Refuse a tokenizer's ``max_seq_len`` unless it is a whole number or null."""
    check({"max_seq_len": value}, {"max_seq_len": integer(1) | NULL}, "tokenizer.")


def reserved_tokens(tokenizer: Any) -> frozenset[str]:
    """Return the texts that a tokenizer turns into special tokens, such as ``<|im_end|>``."""
    if isinstance(tokenizer, ChatTokenizer | HFTokenizer):
        return tokenizer.reserved
    names = getattr(tokenizer, "special_tokens", {})
    return frozenset(
        name
        for name, number in names.items()
        if name.startswith("<|")
        and tokenizer.encode(name, add_bos=False, add_eos=False) == [number]
    )


def special_tokens_in(tokenizer: Any) -> Callable[[Iterable[str]], str | None]:
    """Return a function that returns a special token in texts, or None; the model does not read it as text."""
    pattern = any_of(reserved_tokens(tokenizer))

    def first_in(texts: Iterable[str]) -> str | None:
        for text in texts:
            match = pattern.search(text)
            if match:
                return match[0]
        return None

    return first_in


def defused(tokenizer: Any) -> Callable[[Any], Any]:
    """Return a function that makes plain text of tokens that structure a conversation, in a text from outside.

    It puts a space after their first letter. Without it, a tool's output could end its turn and begin another one. The
    tokens are the special ones and those that the chat template writes; all other text stays as it is. The function
    takes texts, turns and values of JSON, and changes each text in them.
    """
    pattern = any_of(reserved_tokens(tokenizer) | renderer_of(tokenizer).marks)

    def defuse(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", value)
        if isinstance(value, Turn):
            return value._replace(content=defuse(value.content), more=defuse(value.more))
        if isinstance(value, Mapping):
            return {defuse(key): defuse(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(defuse, value))
        return value

    return defuse


def special_token_lines(what: str, count: int, special: Sequence[tuple[str, str]]) -> list[str]:
    """Return a warning about special tokens in ``count`` texts; [] if there are none.

    ``special`` has a special token and the origin of every text with one.
    """
    if not special:
        return []
    token, origin = special[0]
    return [
        f"{len(special):,} of {count:,} {what} contain special tokens such as {token} in their text, first {origin}; "
        "the model reads them as such"
    ]


def _template_args(cfg: DictConfig) -> tuple[Json, date]:
    """Return the config's variables of the template, and the template's date."""
    content: Any = OmegaConf.to_container(cfg, resolve=True)
    check(content, {"chat_template_args": _VARIABLES})
    day = content["chat_template_date"]
    try:
        return content["chat_template_args"], date.fromisoformat(str(day))
    except ValueError as error:
        raise UserError(
            f"chat_template_date is {day!r}; expected a date like 2024-07-26"
        ) from error


def _encoder(folder: Path) -> TextEncoder:
    if not (folder / TOKENIZER).is_file():
        raise UserError(
            f"the chat template needs {folder / TOKENIZER}, which does not exist; download the model's {TOKENIZER}, "
            "or set chat_template: torchtune"
        )
    return TextEncoder(folder / TOKENIZER)


def _ends(folder: Path, base: Any) -> list[int]:
    """Return the ids of the EOS tokens in ``generation_config.json`` or ``config.json``, else torchtune's.

    torchtune's Qwen tokenizers know only the EOS of the instruct models, which base models do not generate.
    """
    numbers = ids_in(folder, EOS)
    if numbers:
        return numbers
    end = getattr(base, "eos_id", None)
    if type(end) is not int:
        raise UserError(
            f"neither {folder} nor the tokenizer {type(base).__name__} names an EOS token (eos_token_id)"
        )
    return [end]


def _warn_if_different(base: Any, folder: Path, args: Json, today: date) -> None:
    """Warn if torchtune's rendering differs from the model's template, which every server uses."""
    try:
        template = read_template("auto", folder, args, today)
        if template is None or not (folder / TOKENIZER).is_file():
            return
        encoder = TextEncoder(folder / TOKENIZER)
        text = template.render(to_turns(_SAMPLE[:1]), None, prompt=True)
        theirs = encoder.encode(text)
    except UserError as error:
        log.info("the model's chat template is not compared with torchtune's: %s", error)
        return
    if theirs != render_prompt(base, _SAMPLE[:1]):
        log.warning(
            "torchtune renders conversations differently from the model's own chat template (%s), which servers use; "
            "chat_template: auto trains on what is served",
            template.origin,
        )


def _turn_end(template: ChatTemplate, base: HFTokenizer) -> list[int]:
    """Return the special token that ends the assistant's turn, unless an EOS token does.

    Base models name only the end of a text, such as Qwen's ``<|endoftext|>``, but their template has ``<|im_end|>``.
    """
    special = {base.encoder.ids[text] for text in base.encoder.special}
    renderer = TemplateRenderer(template, base.encoder, [*base.stop_tokens, *special])
    (rendered,) = renderer.conversations([Conversation(to_turns(_SAMPLE))])
    try:
        _, labels = returned(rendered)
    except UserError:  # _check_end_of_turn reports it
        return []
    if set(base.stop_tokens).intersection(labels):
        return []
    return [label for label in labels if label in special][-1:]


def _check_end_of_turn(
    tokenizer: ChatTokenizer, template: ChatTemplate, text: Callable[[Sequence[int]], str]
) -> None:
    """Warn if sampling would not stop at the token that ends the assistant's turn in the template."""
    try:
        _, labels = render_conversation(tokenizer, _SAMPLE)
    except UserError as error:  # templates for reasoning; prompts can still be rendered
        log.warning("%s", error)
        return
    trained = [label for label in labels if label != IGNORE]
    if not trained or trained[-1] not in tokenizer.stop_tokens:
        log.warning(
            "chat template %s ends the assistant's turn with %r, which is not among the stop tokens %s, so no row "
            "teaches the model to stop and sampled answers run on; name the token that ends a turn as eos_token_id in "
            "the model's generation_config.json",
            template.origin,
            text(trained[-1:]),
            [text([stop]) for stop in tokenizer.stop_tokens],
        )
