"""Rules by which a BPE splits text into words: a ``tokenizer.json``'s ``pre_tokenizer``, and llama.cpp's names."""

from rocm_ext.base.types import Json

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {  # expressions of tokenizer.json, and llama.cpp's names
    rf"{_WORD}\p{{N}}{{1,3}}{_REST}": "llama-bpe",
    rf"{_WORD}\p{{N}}{_REST}": "qwen2",
    _TEKKEN: "tekken",
    _O200K: "gpt-4o",
    _QWEN35: "qwen35",
}
# llama.cpp looks words up as tokens before it merges; for o200k it merges, and reaches the same tokens
TAKES_WORDS = ("llama-bpe", "tekken")
WHOLE_WORDS = (*TAKES_WORDS, "gpt-4o")
BEGINS = ("llama-bpe", "tekken")  # texts begin with BOS, unless the file says otherwise
# other names of the same rules
_SAME = {
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral"), "llama-bpe"),
    "deepseek-r1-qwen": "qwen2",
}


def name_of(pre: Json) -> str | None:
    """Return llama.cpp's name of a ``pre_tokenizer``, or None."""
    steps = pre.get("pretokenizers", [pre])
    kinds = [step.get("type") for step in steps]
    if not steps or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    by_level = steps[-1].get("use_regex", True)
    first = steps[0]
    if kinds == ["ByteLevel"] and by_level:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and by_level and first.get("individual_digits"):
        return "smollm"
    if kinds != ["Split", "ByteLevel"] or by_level:
        return None
    if first.get("behavior") != "Isolated" or first.get("invert"):
        return None
    pattern = first.get("pattern") or {}
    return _SPLITS.get(str(pattern.get("Regex")))


def of_name(name: str) -> Json | None:
    """Return llama.cpp's ``pre_tokenizer`` by a name of :func:`known_as`, or None if the table lacks the name."""
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    if name == "gpt-2":
        return level
    if name == "smollm":
        first = {"type": "Digits", "individual_digits": True}
    else:
        expressions = {named: expression for expression, named in _SPLITS.items()}
        if name not in expressions:
            return None
        first = {
            "type": "Split",
            "pattern": {"Regex": expressions[name]},
            "behavior": "Isolated",
            "invert": False,
        }
        level["use_regex"] = False
    return {"type": "Sequence", "pretokenizers": [first, level]}


def known_as(name: str) -> str:
    """Return the first of llama.cpp's names for the same rules."""
    return _SAME.get(name, name)
