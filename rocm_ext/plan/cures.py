"""Changes of the config for runs that do not fit into memory."""

import math
from collections.abc import Sequence

from omegaconf import DictConfig

from rocm_ext.plan.memory import readable
from rocm_ext.plan.planner import TrainingPlanner


def cures(cfg: DictConfig, planner: TrainingPlanner, tokens: int, layers: Sequence[int], goal: float) -> list[str]:
    """List changes of the config that lower the planned peak, the fastest first.

    Args:
        cfg: config of the training.
        planner: the run's planner.
        tokens: tokens of a micro-batch.
        layers: the checkpointed layers.
        goal: the most bytes that a change may plan.

    Returns:
        Up to two changes, as ``key=value`` with their peak and their cost; none, if no smaller micro-batch reaches
        ``goal``.
    """
    now, every = planner.choice(tokens, layers, 0), range(planner.memory(tokens).layers)
    longest = planner.rows.longest
    ways = {"enable_activation_checkpointing=True": planner.choice(tokens, every, 0)}
    size = math.ceil(tokens / longest)  # rows of the longest length
    while size > 1 and (size := size // 2):
        key = f"tokens_per_micro_batch={size * longest}"  # batch_size may also say how many rows a step has
        ways[key] = planner.choice(size * longest, layers, 0)
        ways[f"{key} enable_activation_checkpointing=True"] = planner.choice(size * longest, every, 0)
        if ways[key].peak <= goal:
            break
    enough = {way: choice for way, choice in ways.items() if choice.peak <= min(goal, now.peak - 1)}
    named = []
    for way, choice in sorted(enough.items(), key=lambda item: item[1].step.seconds)[:2]:
        slower = round(100 * (choice.step.seconds / now.step.seconds - 1))
        named.append(f"{way} (plans {readable(choice.peak)}{f', {slower} % slower' if slower > 0 else ''})")
    return named
