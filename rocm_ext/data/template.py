"""Models' chat templates: find them in a checkpoint's folder and render conversations with them, without torch."""

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

from rocm_ext.base.errors import UserError, explain_errors, one_line
from rocm_ext.base.files import json_object
from rocm_ext.base.types import Json, Message
from rocm_ext.data.messages import REASONING_KEYS, Turn

TEMPLATE = "chat_template.jinja"
OF_PROCESSORS = "chat_template.json"  # older folders of multimodal models have it
_CONFIG = "tokenizer_config.json"
Turns = Sequence[Turn]
Tools = Sequence[Mapping] | None  # JSON schemas of the functions that the assistant may call
Spans = list[tuple[int, int]]  # start and end of parts of a text, in characters
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# marks around the output of a generation block; no user's text can contain them
_BEGIN, _END = (f"\0{mark}-{uuid4().hex}\0" for mark in ("begin", "end"))


class ChatTemplate:
    """A chat template in Jinja, rendered as transformers does.

    Args:
        text: the template.
        variables: further variables of the template, such as ``bos_token`` or ``enable_thinking``.
        today: date of the template's ``strftime_now``.
        origin: origin of the template, for messages.
        for_tools: template of conversations with tools; by default the same template.

    Attributes:
        marked: whether generation blocks in the template mark the assistant's text.
        names: all names and texts in the template's code; it can read no other keys of a message.

    Raises:
        UserError: the template is not valid Jinja.
    """

    def __init__(
        self,
        text: str,
        variables: Json,
        today: date,
        origin: str,
        for_tools: "ChatTemplate | None" = None,
    ) -> None:
        self.text = text
        self.origin = origin
        self._for_tools = for_tools
        self._variables = dict(variables)
        # transformers' settings: trimmed blocks, loop controls, JSON without HTML escapes (apply_chat_template)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": today.strftime}
        try:
            tree = environment.parse(text)
            self._template = environment.from_string(text)
            # each rendering copies them; a ChainMap is slow
            self._template.globals = dict(self._template.globals)
        except TemplateError as error:
            raise UserError(
                f"chat template {origin} is not valid Jinja: {one_line(error)}"
            ) from error
        self.marked = any(
            isinstance(call.node, nodes.ExtensionAttribute) for call in tree.find_all(nodes.Call)
        )
        self.names = _names_in(tree)
        if for_tools is not None:
            self.names |= for_tools.names
        self._reasoning = [key for key in REASONING_KEYS if key in self.names]
        self._listed = not self._shows_content() and self._shows_content(listed=True)

    @property
    def switches_reasoning(self) -> bool:
        """Whether the template reads ``enable_thinking``, as Qwen3's does."""
        return "enable_thinking" in self.names

    @property
    def code(self) -> str:
        """The template, and the one of conversations with tools."""
        return self.text + (self._for_tools.text if self._for_tools else "")

    def _shows_content(self, listed: bool = False) -> bool:
        """Return whether a message's text appears. Templates of some multimodal models take only lists of parts."""
        self._listed = listed
        try:
            turn = Turn("user", _BEGIN, False)
            return _BEGIN in self._render([turn], None, prompt=False)
        except UserError:
            return False

    def render(self, turns: Turns, tools: Tools, prompt: bool = False) -> str:
        """Render a conversation; UserError: the template refuses it.

        Args:
            turns: the conversation.
            tools: JSON schemas of the functions that the assistant may call.
            prompt: whether to add the header of the assistant's next turn.
        """
        marked = self._render(turns, tools, prompt)
        return marked.replace(_BEGIN, "").replace(_END, "")

    def render_marked(self, turns: Turns, tools: Tools) -> tuple[str, Spans]:
        """Render a conversation; also return start and end of the generation blocks, in characters."""
        text = ""
        start = 0
        spans = []
        marked = self._render(turns, tools, prompt=False)
        for part in re.split(f"({_BEGIN}|{_END})", marked):
            if part == _BEGIN:
                start = len(text)
            elif part == _END:
                spans.append((start, len(text)))
            else:
                text += part
        return text, spans

    def _render(self, turns: Turns, tools: Tools, prompt: bool) -> str:
        messages = [self._with_reasoning(turn.message()) for turn in turns]
        chosen = self._for_tools if tools and self._for_tools else self
        if chosen._listed:
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
        try:
            return chosen._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self._variables,
            )
        except (TemplateError, TypeError, ValueError, OverflowError) as error:
            raise UserError(
                f"chat template {self.origin} refuses the conversation: {one_line(error)}"
            ) from error

    def _with_reasoning(self, message: Message) -> Message:
        """Give a message its reasoning under each name that the template reads, which may not be the row's."""
        reasoning = message.get("reasoning_content")
        if reasoning is None:
            return message
        return {**dict.fromkeys(self._reasoning, reasoning), **message}


class _GenerationBlock(Extension):
    """``{% generation %}…{% endgeneration %}``, transformers' marks around the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_mark"), [], [], body)
        return block.set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _names_in(tree: nodes.Template) -> frozenset[str]:
    """Return all names and texts in a template."""
    fields = {nodes.Getattr: "attr", nodes.Name: "name", nodes.Const: "value"}
    found = tree.find_all(tuple(fields))
    return frozenset(str(getattr(node, fields[type(node)])) for node in found)


def read_template(setting: str, folder: Path, args: Json, today: date) -> ChatTemplate | None:
    """Read a chat template.

    Args:
        setting: ``auto``, the template in ``folder``; the name of a template there; a template; or the path of a file.
        folder: the checkpoint's folder, whose ``tokenizer_config.json`` also names the special tokens.
        args: further variables of the template; they take precedence.
        today: see :class:`ChatTemplate`.

    Returns:
        The template; None if ``setting`` is ``auto`` and the folder has none.

    Raises:
        UserError: a file cannot be read, or the template is not valid Jinja.
    """
    config = _json(folder / _CONFIG)
    variables = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)  # text, or an object with ``content``
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            variables[name] = text
    variables |= args
    named, origin = _named_templates(folder, config)
    if setting == "auto":
        if not named:
            return None
        if "default" not in named:
            raise UserError(
                f"{origin} has the chat templates {', '.join(named)}; set chat_template to one of them"
            )
        for_tools = None
        if "tool_use" in named:
            for_tools = ChatTemplate(named["tool_use"], variables, today, origin)
        return ChatTemplate(named["default"], variables, today, origin, for_tools)
    if setting in named:
        return ChatTemplate(named[setting], variables, today, f"{origin} ({setting})")
    if "{{" in setting or "{%" in setting:
        return ChatTemplate(setting, variables, today, "in the config")
    path = Path(setting).expanduser()
    if not path.is_file():
        known = ", ".join(
            ["auto", "torchtune", "none", *named, "the path of a template", "or its text"]
        )
        raise UserError(
            f"chat_template is {setting!r}, and no file has this name; expected {known}"
        )
    return ChatTemplate(_read(path), variables, today, setting)


def _json(path: Path) -> Json:
    if not path.is_file():
        return {}
    config = json_object(_read(path).encode())
    if config is None:
        raise UserError(f"{path} is not a JSON object; download the file again")
    return config


def _named_templates(folder: Path, config: Json) -> tuple[dict[str, str], str]:
    """Return the templates in a folder by name, and their file, in transformers' order of preference.

    A single template is called ``default``, and one for tools ``tool_use``.
    """
    file = folder / TEMPLATE
    if file.is_file():
        named = {"default": _read(file)}
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            named[path.stem] = _read(path)
        return named, str(file)
    file = folder / _CONFIG
    templates = config.get("chat_template")
    if templates is None and (folder / OF_PROCESSORS).is_file():
        file = folder / OF_PROCESSORS
        templates = _json(file).get("chat_template")
    if templates is None:
        return {}, str(file)
    if isinstance(templates, str):
        return {"default": templates}, str(file)
    named = {}
    for entry in templates if isinstance(templates, list) else [templates]:
        fields = entry if isinstance(entry, Mapping) else {}
        name = fields.get("name")
        text = fields.get("template")
        if not isinstance(name, str) or not isinstance(text, str) or name in named:
            raise UserError(f"{file}: chat_template must be text, or a list of name and template")
        named[name] = text
    return named, str(file)


def _read(path: Path) -> str:
    with explain_errors(f"cannot read {path}"):
        return path.read_text(encoding="utf-8")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)
