"""Run GRPO or distillation: ``… grpo_ours GIVEN --config …``; answers of the first steps are given, for the gate."""

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml
from rocm_ext.recipes import distil_rocm, grpo_rocm

from rocm_ext.sampling import Completion, Request, Sampling
from rocm_ext.sampling.local import LocalSession

GIVEN: list[dict[str, list[list[int]]]] = json.loads(
    Path(sys.argv.pop(1)).read_text()
)  # by prompt id
_generate = LocalSession.generate


def generate(
    self: LocalSession, requests: Iterable[Request], sampling: Sampling
) -> Iterator[Completion]:
    """Yield the given answers of a step; sample those of the later steps."""
    if not GIVEN:
        yield from _generate(self, requests, sampling)
        return
    step = GIVEN.pop(0)
    for request in requests:
        tokens = step[request.prompt_id][request.sample]
        text = self._tokenizer.decode(tokens[:-1])
        yield Completion(request, tokens, [0.0] * len(tokens), text, "stop")


if __name__ == "__main__":
    LocalSession.generate = generate  # type: ignore[method-assign]
    recipe = yaml.safe_load(Path(sys.argv[-1]).read_text())["recipe"]
    {"grpo_rocm": grpo_rocm, "distil_rocm": distil_rocm}[recipe].main()
