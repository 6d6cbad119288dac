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
        system: texts before and after a system message; None: the template takes no system message.
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
        turns = [around[message["role"]][0] + message["content"] + around[message["role"]][1] for message in messages]
        return text + "".join(turns) + self.last

    def go(self) -> str:
        """Return the template in Ollama's language."""
        start = self.start
        if self.system is not None:
            before, after = self.system
            start = f"{{{{ if .System }}}}{before}{{{{ .System }}}}{after}{{{{ else }}}}{start}{{{{ end }}}}"
        user = f'{{{{ if eq .Role "user" }}}}{self.user[0]}{{{{ .Content }}}}{self.user[1]}'
        answer = f'{{{{ else if eq .Role "assistant" }}}}{self.answer[0]}{{{{ .Content }}}}{self.answer[1]}'
        return f"{start}{{{{ range .Messages }}}}{user}{answer}{{{{ end }}}}{{{{ end }}}}{self.last}"


def parts(template: ChatTemplate, begin: str = "") -> TemplateParts | None:
    """Read the parts of a template off rendered conversations.

    ``begin`` is the text of the token that Ollama adds before a prompt; its template must leave the token out. The
    result is None if the parts depend on more than a message's role, or cannot be written in a Modelfile.
    """
    conversations: list[Messages] = [_TALK, _TALK[:1], [_SYSTEM, *_TALK]]
    talk, alone, with_system = (_cut(template, conversation, begin) for conversation in conversations)
    if talk is None or alone is None:
        return None
    headers = [talk[0], talk[2], *([with_system[1]] if with_system else [])]  # all end with a user's header
    header = next(
        end
        for at in range(len(talk[0]) + 1)
        if all(conversation.endswith(end := talk[0][at:]) for conversation in headers)
    )
    system = (with_system[0], _without(with_system[1], header)) if with_system else None
    after = next(start for at in range(len(alone[1]), -1, -1) if talk[1].startswith(start := alone[1][:at]))
    answer = (talk[1][len(after) :], _without(talk[2], header))
    result = TemplateParts(_without(talk[0], header), system, (header, after), answer, alone[1][len(after) :])
    conversations = [_TALK[:1], _TALK, _LONGER]
    conversations += [[_SYSTEM, *conversation] for conversation in conversations] if system else []
    text = "".join([result.start, *(system or ()), *result.user, *result.answer, result.last])
    writes = '"""' not in text and "{{" not in text
    same = (result.render(conversation) == _text(template, conversation, begin) for conversation in conversations)
    return result if writes and all(same) else None


def _without(text: str, end: str) -> str:
    return text[: len(text) - len(end)]


def _text(template: ChatTemplate, messages: Messages, begin: str) -> str:
    return template.render(to_turns(list(messages)), None, prompt=True).removeprefix(begin)


def _cut(template: ChatTemplate, messages: Messages, begin: str) -> list[str] | None:
    """Return the texts before, between and after the messages; None: the template does not take them in this order."""
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
        lines += [
            "# or: FROM a GGUF file of this base model",
            f"FROM {(files_in(source.base) or [str(source.base.resolve())])[0]}",
            f"ADAPTER ./{gguf.name}",
        ]
    else:
        lines.append(f"FROM ./{gguf.name}")
    if source.template is not None:
        read_off = parts(source.template, "".join(texts.get(number, "") for number in encoder.prefix()))
        other = "# The chat template has no equal in Ollama's language; the one that Ollama guesses may differ"
        lines.append(other if read_off is None else f'TEMPLATE """{read_off.go()}"""')
    stops = [number for number in (end_of_turn(source), *source.tokenizer.stop_tokens) if number in texts]
    lines += [f'PARAMETER stop "{texts[number]}"' for number in dict.fromkeys(stops)]
    path = gguf.with_suffix(".Modelfile")
    replace_text(path, "\n".join(lines) + "\n")
    return path
