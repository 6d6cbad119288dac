"""Exceptions as JSON. This runs inside both sandboxes."""

import builtins


def lineage(kind, number_of=lambda kind: None):
    """Module, name and number of an exception class and of its bases, up to the first builtin."""
    found = []
    for base in kind.__mro__:
        if isinstance(base, type) and issubclass(base, BaseException):
            found.append([base.__module__, base.__name__, number_of(base)])
            if getattr(builtins, base.__name__, None) is base:
                break
    return found


def arguments(error):
    """The arguments with which a builtin class makes an exception again."""
    if isinstance(error, OSError) and error.filename is not None and len(error.args) == 2:
        return (*error.args, error.filename)
    return error.args


def encode(error, codec, number_of=lambda kind: None, number=None):
    """The JSON of an exception."""
    nested = codec.__dict__.setdefault("nested", [])
    if len(nested) > 8 or error in nested:
        return None
    nested.append(error)
    try:
        try:
            says = str(error)[:10_000]
        except Exception:
            says = ""
        attributes = []
        for name, value in list(vars(error).items())[:50]:
            if name == "__notes__" or name[:2] != "__":
                attributes.append([name, codec._encode(value, 0)])
        cause = None if error.__cause__ is None else codec._encode(error.__cause__, 0)
        try:
            args = [codec._encode(arg, 0) for arg in arguments(error)]
        except Exception:
            args = [says]
        return ["ex", lineage(type(error), number_of), args, attributes, says, number, cause]
    finally:
        nested.pop()
