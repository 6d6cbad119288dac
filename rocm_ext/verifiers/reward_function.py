"""Reward functions in TRL's signature as verifiers, and verifiers as such functions."""

import inspect
import itertools
import math
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.importing import COMPONENT, Component, import_component
from rocm_ext.base.types import Message, Row
from rocm_ext.verifiers.base import Result, Verdict, Verifier, error, field, short
from rocm_ext.verifiers.build import build
from rocm_ext.verifiers.workers import Pool

LOGGERS = ("log_extra", "log_metric")  # functions with which TRL's trainers log
TRAINERS = ("completion_ids", "trainer_state", "environments")  # arguments that only a trainer has
NO_COLUMNS = ("prompt", "completion", *TRAINERS, *LOGGERS)  # see GRPOTrainer._calculate_rewards


class RewardFunction(Verifier):
    """A reward function as TRL's trainers take it: ``f(prompts, completions, **columns) -> list[float | None]``.

    It runs as you, without a sandbox. It gets the rows' columns as lists: those in its signature, or all if it has
    ``**kwargs``. It may be asynchronous. The verdict is CORRECT from ``threshold`` on, else WRONG. None (the function
    does not apply to the row) and a number outside ``scale`` are an ERROR.

    Instead of a number it may return a mapping with ``reward`` and parts by name, see :class:`Result`. A value given to
    TRL's ``log_metric`` is a part of all rewards of the call.

    A call has up to ``batch_size`` answers, if possible to one prompt. A reward must not depend on other answers unless
    ``groups`` is True: then a call has all answers to one prompt and no others.

    Args:
        function: dotted name, such as ``my_module.reward``. The module may be in the current directory.
        threshold: reward, in [0, 1], from which the verdict is CORRECT.
        scale: the function's values that become the rewards 0 and 1; values between are mapped linearly.
        conversational: whether prompts and completions are lists of messages, as the functions in ``trl.rewards`` take
            them, or texts. By default they are lists for rows with ``messages``, as in TRL.
        batch_size: the most answers in one call.
        groups: whether rewards depend on the other answers to the prompt; ``batch_size`` has no effect then.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        threshold: float = 1.0,
        scale: Sequence[float] = (0.0, 1.0),
        conversational: bool | None = None,
        batch_size: int = 16,
        groups: bool = False,
    ) -> None:
        self.scale, self.threshold = checked_scale("RewardFunction", scale, threshold)
        if not (type(batch_size) is int and batch_size >= 1):
            raise UserError(
                f"RewardFunction: batch_size must be a whole number of at least 1, found {batch_size!r}"
            )
        self.function = import_component(function) if isinstance(function, str) else function
        if inspect.isclass(self.function):
            raise UserError(
                f"RewardFunction: {function} is a class; expected a function, or an object with __call__"
            )
        # messages and names of parts use it
        self.__name__ = getattr(self.function, "__name__", type(self.function).__name__)
        self.conversational = conversational
        self.batch_size = batch_size
        self.groups = groups
        self._takes_all = False
        self._named: dict[str, bool] = {}  # parameter -> whether it is required
        for name, parameter in inspect.signature(self.function).parameters.items():
            required = parameter.default is parameter.empty
            if parameter.kind is parameter.VAR_KEYWORD:
                self._takes_all = True
            elif parameter.kind is parameter.VAR_POSITIONAL:
                continue
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                raise UserError(
                    f"RewardFunction: the function takes {name} by position only, and gets all columns by name"
                )
            elif name not in TRAINERS:
                self._named[name] = required
            elif required:
                raise UserError(
                    f"RewardFunction: the function needs {name}, which only a trainer has"
                )
        given = ("prompts", "completions", *LOGGERS)
        required_names = [name for name, required in self._named.items() if required]
        self.needs = tuple(name for name in required_names if name not in given)

    def check_row(self, row: Row) -> None:
        super().check_row(row)
        self.prompt(row)

    def __call__(self, completion: str, row: Row) -> Result:
        try:
            return self.judge_batch([completion], [row])[0]
        except Exception as problem:
            return error(f"the reward function failed: {one_line(problem)}")

    def judge_batch(self, completions: Sequence[Any], rows: Sequence[Row]) -> list[Result]:
        answers = []
        for answer, row in zip(completions, rows, strict=True):
            # a conversation's completion is a list of messages already
            if isinstance(answer, str) and self._talks(row):
                answer = [{"role": "assistant", "content": answer}]
            answers.append(answer)
        prompts = [self.prompt(row) for row in rows]
        given: dict[str, Any] = {"prompts": prompts, "completions": answers}
        for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
            if name not in (*NO_COLUMNS, *given):
                given[name] = [row.get(name) for row in rows]
        if not self._takes_all:
            given = {name: value for name, value in given.items() if name in self._named}
        for name in LOGGERS:
            if self._named.get(name):
                given[name] = lambda *_, **__: None
        parts: dict[str, float] = {}
        if "log_metric" in self._named:
            given["log_metric"] = lambda name, value: parts.update(_finite({name: value}))
        rewards = self.function(**given)
        if inspect.isawaitable(rewards):
            import asyncio  # here, since it takes a quarter of a worker's start

            rewards = asyncio.run(_result_of(rewards))
        if not isinstance(rewards, Iterable) or isinstance(rewards, (str, Mapping)):
            raise TypeError(
                f"it returned {short(repr(rewards), 40)}; expected a list with a reward for each answer"
            )
        rewards = list(rewards)
        if len(rewards) != len(rows):
            raise ValueError(f"it returned {len(rewards)} rewards for {len(rows)} completions")
        return [self._result(reward, parts) for reward in rewards]

    def judge_group(self, completions: Sequence[str], row: Row) -> list[Result]:
        return self.judge_batch(completions, [row] * len(completions))

    def _talks(self, row: Row) -> bool:
        return "messages" in row if self.conversational is None else self.conversational

    def prompt(self, row: Row) -> Any:
        """The row's prompt as the function gets it: a text or messages."""
        if not self._talks(row):
            return field(row, "prompt", str)
        if "messages" not in row:
            messages = [{"role": "user", "content": field(row, "prompt", str)}]
        else:
            messages = [dict(message) for message in field(row, "messages", (list, tuple))]
            if messages and messages[-1].get("role") == "assistant":  # the row's answer
                messages.pop()
        system = row.get("system")
        if system and messages and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def _result(self, reward: Any, parts: Mapping[str, float]) -> Result:
        if isinstance(reward, Mapping):
            if "reward" not in reward:
                raise ValueError(
                    f"it returned {short(repr(reward), 80)}; expected 'reward' beside its parts"
                )
            own_parts = {name: value for name, value in reward.items() if name != "reward"}
            parts = {**parts, **_finite(own_parts)}
            reward = reward["reward"]
        if reward is None:
            return error("the reward function does not apply to this row: it returned None")
        if isinstance(reward, str):
            raise TypeError(f"it returned the text {short(reward, 40)!r} as a reward")
        result = scaled(float(reward), self.scale, self.threshold, "the reward function")
        return replace(result, parts=parts)


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _finite(parts: Mapping[Any, Any]) -> dict[str, float]:
    """The parts as numbers, without None, NaN and infinities."""
    finite = {}
    for name, value in parts.items():
        number = math.nan if value is None else float(value)
        if math.isfinite(number):
            finite[str(name)] = number
    return finite


def checked_scale(
    who: str, scale: Sequence[float], threshold: float
) -> tuple[tuple[float, float], float]:
    """A verifier's arguments ``scale`` and ``threshold`` as floats; raises UserError if one is out of range."""
    is_pair = isinstance(scale, (list, tuple)) and len(scale) == 2
    are_numbers = is_pair and all(type(number) in (int, float) for number in scale)
    if not (are_numbers and 0 < scale[1] - scale[0] < math.inf):
        raise UserError(
            f"{who}: scale must be [low, high], two numbers with low < high, found {scale!r}"
        )
    if not (type(threshold) in (int, float) and 0 < threshold <= 1):
        raise UserError(f"{who}: threshold must be in (0, 1], found {threshold!r}")
    low, high = map(float, scale)
    return (low, high), float(threshold)


def scaled(value: float, scale: tuple[float, float], threshold: float, who: str) -> Result:
    """The result for a value in ``scale``; ERROR for a value outside."""
    low, high = scale
    if not low <= value <= high:  # NaN, too
        hint = "; set scale to its least and greatest value" if math.isfinite(value) else ""
        return error(f"{who} gave {value:g}, which is not between {low:g} and {high:g}{hint}")
    reward = (value - low) / (high - low)
    verdict = Verdict.CORRECT if reward >= threshold - 1e-9 else Verdict.WRONG
    return Result(verdict, reward, f"{who} gave {value:g}")


class _VerifierReward:
    """The function of :func:`as_reward_function`. It can be pickled: TRL may send it to another process."""

    def __init__(self, node: Component, workers: int, timeout: float) -> None:
        self.__name__ = str(node.get(COMPONENT)).rpartition(".")[2]
        self._arguments = node, workers, timeout
        self._verifier = build(node)
        self._verifier.check()
        self._pool = Pool(node, workers, timeout).__enter__()
        # ends the workers; also when the interpreter ends
        self.close = weakref.finalize(self, self._pool.close)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        kept = {name: values for name, values in columns.items() if name not in NO_COLUMNS}
        rows = []
        for index, prompt in enumerate(prompts):
            row = {}
            for name, values in kept.items():
                if values[index] is not None:
                    row[name] = values[index]
            row["prompt"] = _text(prompt)
            if not isinstance(prompt, str):
                row["messages"] = prompt
            self._verifier.check_row(row)
            rows.append(row)
        answers = zip(rows, map(_text, completions), strict=True)
        if not self._pool.groups:
            futures = [self._pool.submit(text, row) for row, text in answers]
            return [future.result().reward for future in futures]
        # trainers repeat a prompt's row for all its answers
        groups = [
            self._pool.submit_group([text for _, text in pairs], row)
            for row, pairs in itertools.groupby(answers, key=lambda pair: pair[0])
        ]
        return [result.reward for group in groups for result in group.result()]

    def __reduce__(self) -> tuple[Any, ...]:
        return _VerifierReward, self._arguments


def as_reward_function(node: Component, workers: int = 1, timeout: float = 60.0) -> _VerifierReward:
    """A verifier as a reward function for TRL's trainers: ``GRPOTrainer(reward_funcs=as_reward_function(...))``.

    The row of an answer is its dataset columns, with ``prompt`` as text. An ERROR gives None, which TRL leaves out. The
    verifier runs in worker processes.

    Args:
        node: the verifier, as for :func:`rocm_ext.verifiers.build`.
        workers: number of processes.
        timeout: seconds for one verification.

    Raises:
        UserError: the verifier cannot be built or run here; or, in a call, a row lacks a field.
    """
    return _VerifierReward(node, workers, timeout)


def _text(messages: str | Sequence[Message]) -> str:
    """The text of the last message, or the text itself."""
    if isinstance(messages, str):
        return messages
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str) or content is None:
        return content or ""
    parts = [part.get("text", "") for part in content if isinstance(part, Mapping)]
    if len(parts) != len(content):
        raise UserError(f"a message has the content {short(content, 80)}; expected text")
    return "".join(parts)
