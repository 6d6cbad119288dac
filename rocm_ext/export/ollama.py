"""Write the ``Modelfile`` that tells Ollama how to run a GGUF file.

Ollama renders conversations with a Go template. This module reads the parts of the model's chat template off rendered
conversations, and uses them only if longer conversations come out the same as with the model's template.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_text
from rocm_ext.data.encoder import TOKENIZER, TextEncoder
from rocm_ext.data.messages import to_turns
from rocm_ext.data.template import ChatTemplate
from rocm_ext.export.source import Source
from rocm_ext.export.vocabulary import end_of_turn
from rocm_ext.model.weights.gguf_files import files_in

_SYSTEM = {"role": "system", "content": "first-3141"}
_TALK = [
    {"role": "user", "content": "second-2718"},
    {"role": "assistant", "content": "third-1618"},
    {"role": "user", "content": "fourth-1414"},
]
_LONGER = [*_TALK, {"role": "assistant", "content": "c: 1"}, {"role": "user", "content": "Why?"}]
Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class TemplateParts:
    """The texts that a chat template writes around messages.

    Attributes:
        start: text before the first user's message if there is no system message.
        system: texts before and after a system message. None if the template takes no system message.
        user: texts before and after a user's message, including the header of the answer.
        answer: texts before and after the assistant's message.
        last: text before a new answer; Qwen3 without reasoning has an empty reasoning there.
    """

    start: str
    system: tuple[str, str] | None
    user: tuple[str, str]
    answer: tuple[str, str]
    last: str

    def render(self, messages: Messages) -> str:
        """Render a conversation that ends with a user's message."""
        around = {"system": self.system or ("", ""), "user": self.user, "assistant": self.answer}
        text = "" if messages[0]["role"] == "system" else self.start
        for message in messages:
            before, after = around[message["role"]]
            text += before + message["content"] + after
        return text + self.last

    def go(self) -> str:
        """Return the template in Ollama's language."""
        start = self.start
        if self.system is not None:
            before, after = self.system
            start = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}{{{{ else }}}}{start}{{{{ end }}}}"
        user = f'{{{{ if eq .Role "user" }}}}{self.user[0]}{{{{ .Content }}}}{self.user[1]}'
        answer = f'{{{{ else if eq .Role "assistant" }}}}{self.answer[0]}{{{{ .Content }}}}{self.answer[1]}'
        return (
            f"{start}{{{{ range .Messages }}}}{user}{answer}{{{{ end }}}}{{{{ end }}}}{self.last}"
        )


def parts(template: ChatTemplate, begin: str = "") -> TemplateParts | None:
    """Read the parts of a template off rendered conversations.

    ``begin`` is the text of the token that Ollama adds before a prompt; its template must leave the token out. The
    result is None if the parts depend on more than a message's role, or cannot be written in a Modelfile.
    """
    talk = _cut(template, _TALK, begin)
    alone = _cut(template, _TALK[:1], begin)
    with_system = _cut(template, [_SYSTEM, *_TALK], begin)
    if talk is None or alone is None:
        return None
    first, behind_user, behind_answer, _ = talk
    headers = [first, behind_answer]  # all end with a user's header
    if with_system:
        headers.append(with_system[1])
    backwards = _common_beginning([text[::-1] for text in headers])
    header = backwards[::-1]
    _, behind_last = alone
    after = _common_beginning([behind_last, behind_user])
    system = None
    if with_system:
        system = with_system[0], _without(with_system[1], header)
    result = TemplateParts(
        start=_without(first, header),
        system=system,
        user=(header, after),
        answer=(behind_user.removeprefix(after), _without(behind_answer, header)),
        last=behind_last.removeprefix(after),
    )
    conversations: list[Messages] = [_TALK[:1], _TALK, _LONGER]
    if system:
        conversations += [[_SYSTEM, *conversation] for conversation in conversations]
    texts = [result.start, *(system or ()), *result.user, *result.answer, result.last]
    text = "".join(texts)
    if '"""' in text or "{{" in text:
        return None
    for conversation in conversations:
        if result.render(conversation) != _text(template, conversation, begin):
            return None
    return result


def _common_beginning(texts: Sequence[str]) -> str:
    """Return the longest text with which all ``texts`` begin."""
    beginning = ""
    for first, *others in zip(*texts, strict=False):
        if any(other != first for other in others):
            break
        beginning += first
    return beginning


def _without(text: str, end: str) -> str:
    return text[: len(text) - len(end)]


def _text(template: ChatTemplate, messages: Messages, begin: str) -> str:
    return template.render(to_turns(list(messages)), None, prompt=True).removeprefix(begin)


def _cut(template: ChatTemplate, messages: Messages, begin: str) -> list[str] | None:
    """Return the texts before, between and after the messages. None if the template refuses their order."""
    try:
        rest = _text(template, messages, begin)
    except UserError:
        return None
    pieces = []
    for message in messages:
        before, mark, rest = rest.partition(message["content"])
        if not mark:
            return None
        pieces.append(before)
    return [*pieces, rest]


def write_modelfile(source: Source, gguf: Path, adapter: bool = False) -> Path:
    """Write ``NAME.Modelfile`` for the file ``NAME.gguf`` of a model or an ``adapter``, and return its path."""
    encoder = TextEncoder(source.base / TOKENIZER)
    texts = {number: text for text, number in encoder.ids.items()}
    lines = [f"# ollama create NAME -f {gguf.stem}.Modelfile"]
    if adapter:
        files = files_in(source.base) or [str(source.base.resolve())]
        lines.append("# or: FROM a GGUF file of this base model")
        lines.append(f"FROM {files[0]}")
        lines.append(f"ADAPTER ./{gguf.name}")
    else:
        lines.append(f"FROM ./{gguf.name}")
    if source.template is not None:
        begin = "".join(texts.get(number, "") for number in encoder.prefix())
        read_off = parts(source.template, begin)
        if read_off is None:
            lines.append(
                "# The chat template has no equal in Ollama's language; the one that Ollama guesses may differ"
            )
        else:
            lines.append(f'TEMPLATE """{read_off.go()}"""')
    for number in dict.fromkeys((end_of_turn(source), *source.tokenizer.stop_tokens)):
        if number in texts:
            lines.append(f'PARAMETER stop "{texts[number]}"')
    path = gguf.with_suffix(".Modelfile")
    replace_text(path, "\n".join(lines) + "\n")
    return path
