"""Chat templates of models: find them in a checkpoint's folder and render conversations with them, without torch."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any
from uuid import uuid4

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rocm_ext.data.messages import Turn
from rocm_ext.errors import UserError, one_line
from rocm_ext.files import json_object

TEMPLATE = "chat_template.jinja"
_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# what a generation block has rendered stands between these marks; no text of a user's can contain them
_BEGIN, _END = (f"\0{mark}-{uuid4().hex}\0" for mark in ("begin", "end"))


class ChatTemplate:
    """A chat template in Jinja, rendered as transformers does.

    Args:
        text: the template.
        variables: what the template sees beside the conversation, such as ``bos_token`` or ``enable_thinking``.
        today: the date that ``strftime_now`` gives to the template.
        origin: where the template comes from, for messages.

    Attributes:
        marked: whether generation blocks in the template mark what the assistant says.

    Raises:
        UserError: the template is not valid Jinja.
    """

    def __init__(self, text: str, variables: Mapping[str, Any], today: date, origin: str) -> None:
        self.text, self.origin = text, origin
        self._variables = dict(variables)
        # transformers' settings: trimmed blocks, loop controls, JSON without HTML escapes (apply_chat_template)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": today.strftime}
        try:
            self.marked = any(
                isinstance(call.node, nodes.ExtensionAttribute) for call in environment.parse(text).find_all(nodes.Call)
            )
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise UserError(f"chat template {origin} is not valid Jinja: {one_line(error)}") from error

    def render(self, turns: Sequence[Turn], tools: Sequence[Mapping] | None, prompt: bool = False) -> str:
        """Render a conversation.

        Args:
            turns: the conversation.
            tools: JSON schemas of the functions that the assistant may call.
            prompt: whether to add the header of the assistant's next turn.

        Raises:
            UserError: the template refuses the conversation.
        """
        return self._render(turns, tools, prompt).replace(_BEGIN, "").replace(_END, "")

    def render_marked(
        self, turns: Sequence[Turn], tools: Sequence[Mapping] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation; also return start and end of each generation block, in characters.

        Raises:
            UserError: the template refuses the conversation.
        """
        text, spans, start = "", [], 0
        for part in re.split(f"({_BEGIN}|{_END})", self._render(turns, tools, prompt=False)):
            if part == _BEGIN:
                start = len(text)
            elif part == _END:
                spans.append((start, len(text)))
            else:
                text += part
        return text, spans

    def _render(self, turns: Sequence[Turn], tools: Sequence[Mapping] | None, prompt: bool) -> str:
        messages = [turn.message() for turn in turns]
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._variables
            )
        except (TemplateError, TypeError, ValueError, OverflowError) as error:
            raise UserError(f"chat template {self.origin} refuses the conversation: {one_line(error)}") from error


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}``, transformers' marks around what the assistant says."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def read_template(setting: str, folder: Path, args: Mapping[str, Any], today: date) -> ChatTemplate | None:
    """Read a chat template.

    Args:
        setting: ``auto``, the template in ``folder``; the template itself; or the path of a file.
        folder: the checkpoint's folder, whose ``tokenizer_config.json`` also names the special tokens.
        args: further variables for the template; they take precedence.
        today: see :class:`ChatTemplate`.

    Returns:
        The template; None if ``setting`` is ``auto`` and the folder has none.

    Raises:
        UserError: a file cannot be read, or the template is not valid Jinja.
    """
    config = _tokenizer_config(folder / _CONFIG)
    if setting == "auto":
        text, origin = _folder_template(folder, config)
    elif "{{" in setting or "{%" in setting:
        text, origin = setting, "in the config"
    else:
        if not (path := Path(setting).expanduser()).is_file():
            known = "auto, torchtune, none, the path of a template, or its text"
            raise UserError(f"chat_template is {setting!r}, and no file has this name; expected {known}")
        text, origin = _read(path), setting
    if text is None:
        return None
    return ChatTemplate(text, {**_special_tokens(config), **args}, today, origin)


def _tokenizer_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    if (config := json_object(_read(path).encode())) is None:
        raise UserError(f"{path} is not a JSON object; download the file again")
    return config


def _folder_template(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return the text and the origin of a folder's template; None without one."""
    if (folder / TEMPLATE).is_file():
        return _read(folder / TEMPLATE), str(folder / TEMPLATE)
    origin, found = str(folder / _CONFIG), config.get("chat_template")
    if isinstance(found, list):  # several by name, as in Hermes and Command R
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, Mapping)}
        found = named.get("default")
        if found is None:
            raise UserError(f"{origin} has the chat templates {', '.join(map(str, named))}; set chat_template to one")
    if found is not None and not isinstance(found, str):
        raise UserError(f"{origin}: chat_template must be text, found {type(found).__name__}")
    return found, origin


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens in ``tokenizer_config.json``, as text or as objects with ``content``."""
    found = {name: config.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, Mapping) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}") from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)
