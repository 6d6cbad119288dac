"""Some answers of a run, with their prompts and verdicts."""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rocm_ext.report.raft import VERDICTS
from rocm_ext.runs.cycles import CycleFolder
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import Judged, SampleKey

PER_VERDICT = 2
_PROMPTS = "rocm_ext.data.prompt_dataset"


@dataclass(frozen=True)
class Shown:
    """An answer as the page shows it; ``prompt`` is None if it was not found."""

    prompt_id: str
    prompt: str | None
    text: str
    tokens: int
    finish_reason: str
    judged: Judged

    @classmethod
    def of(cls, key: SampleKey, prompt: str | None, record: Mapping[str, Any], judged: Judged) -> "Shown":
        """An answer from its line of ``samples.jsonl``."""
        return cls(
            prompt_id=key[0],
            prompt=prompt,
            text=str(record.get("text", "")),
            tokens=len(record["tokens"]) if isinstance(record.get("tokens"), list) else 0,
            finish_reason=str(record.get("finish_reason", "")),
            judged=judged,
        )


def choose(run: RunFolder) -> tuple[str, list[Shown]]:
    """Answers of the newest cycle that has some: :data:`PER_VERDICT` of each verdict, chosen by a hash.

    Returns:
        a description of the choice, and the answers; both are empty if the run has none.
    """
    for cycle in reversed(run.cycles):
        for judged, held_out in ((cycle.judged, False), (cycle.judged_held_out, True)):
            shown = _choose(run, cycle, judged, held_out)
            if shown:
                of = "held-out answers" if held_out else "answers"
                return f"{len(shown)} of {len(judged):,} {of} of cycle {cycle.number}", shown
    return "", []


def _choose(run: RunFolder, cycle: CycleFolder, judged: dict[SampleKey, Judged], held_out: bool) -> list[Shown]:
    by_verdict: dict[str, list[SampleKey]] = {}
    for key in sorted(judged, key=key_hash):
        by_verdict.setdefault(judged[key].verdict, []).append(key)
    order = [*VERDICTS, *sorted(by_verdict.keys() - set(VERDICTS))]
    keys = [key for verdict in order for key in by_verdict.get(verdict, ())[:PER_VERDICT]]
    texts = cycle.texts(set(keys), held_out) if keys else {}
    prompts = prompt_texts(run, {prompt for prompt, _ in keys}, held_out) if texts else {}
    return [
        Shown.of(key, prompts.get(key[0]), record, judged[key])
        for key in keys
        if (record := texts.get(key)) is not None
    ]


def key_hash(key: SampleKey) -> str:
    """A number that orders answers by chance, but equally in every report."""
    return hashlib.sha256(f"{key[0]}\0{key[1]}".encode(errors="backslashreplace")).hexdigest()


def prompt_texts(run: RunFolder, ids: Collection[str], held_out: bool = False) -> dict[str, str]:
    """The last turn of prompts by id, from the run's own data if that is a file that still exists.

    A report downloads nothing and runs no component of the user's.
    """
    node: Any = run.setting("eval_prompts" if held_out else "prompts")
    if not isinstance(node, dict) or node.get("_component_") != _PROMPTS:
        return {}
    source = node.get("source")
    if not isinstance(source, str) or not Path(source).is_file():
        return {}
    try:
        written = Path(source).stat().st_mtime_ns
    except OSError:
        return {}
    found = _last_turns(json.dumps(node, sort_keys=True, default=str), written)
    return {prompt: found[prompt] for prompt in ids if prompt in found}


@lru_cache(maxsize=4)  # a live page asks again and again
def _last_turns(node: str, written: int) -> dict[str, str]:
    """The last turns of all prompts, by id.

    Args:
        node: the setting as JSON.
        written: when its file was.
    """
    from rocm_ext.data.prompts import prompt_dataset  # here: `datasets` takes a second to import

    settings = {key: value for key, value in json.loads(node).items() if key != "_component_"}
    try:
        return {prompt.id: prompt.messages[-1]["content"] for prompt in prompt_dataset(**settings)}
    except Exception:  # the file may have changed since; the report is useful without prompts
        return {}
