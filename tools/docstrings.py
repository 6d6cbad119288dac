"""What the docstrings say in Sphinx's roles, as Markdown: ``:class:`Verifier``` becomes `Verifier` on the site."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`~?([^`]+)`")


class Roles(griffe.Extension):
    """Replace the roles in each docstring as it is collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
