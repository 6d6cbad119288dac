"""Compare what was trained with what a server answers: the tokens of prompts, and the adapter's effect on log-probs."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import ConcatDataset

from rocm_ext import config
from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.types import Json
from rocm_ext.data.messages import to_turns
from rocm_ext.data.render import (
    IGNORE,
    PlainRenderer,
    render_conversations,
    render_history,
    renderer_of,
    returned,
)
from rocm_ext.data.rows import Rows, labelled, open_dataset
from rocm_ext.data.sources import SourceDataset
from rocm_ext.data.template import Tools, Turns
from rocm_ext.evaluate.rows import open_learner
from rocm_ext.model.adapters.peft_layers import PeftLayer, names_of, trained_layers
from rocm_ext.model.lora import Dora, rank_and_alpha
from rocm_ext.model.names import last_part, last_parts
from rocm_ext.model.token_rows import TokenRows
from rocm_ext.plan import workload
from rocm_ext.runs.answers import AnswerLog
from rocm_ext.runs.intervals import Interval, paired_ratio
from rocm_ext.runs.tails import Tails
from rocm_ext.sampling.server.served import OpenAI, chat
from rocm_ext.train.learner import Learner
from rocm_ext.train.scoring import reference, score

LEAST = 0.9  # share of the adapter's effect; above 1 / LEAST the adapter's scale is wrong, too
_FLOOR = -80.0  # nats; servers round the probabilities below to 0
_SMALLEST = 1e-3  # nats a token; a smaller effect is lost in rounding
_NOISE = 0.01  # of the squared effect; a near share that leaves more unexplained may hide a fault
_OTHER = 0.5  # nats a token by which base models differ, more than by quantisation
_CLEAR = 0.8  # the most that a further fault may leave unexplained of what another one leaves
_ROUNDS = 3  # kinds or groups of modules that may be dropped at once
_AROUND = 6  # tokens shown on each side of a difference
_NOT_LOADED = "adapter not loaded: the server answers as its base model"
_ARGS = "chat_template_kwargs"  # of a request
_FLAGS: tuple[Json, ...] = ({"enable_thinking": True}, {"enable_thinking": False})
Change = Callable[[str, Tensor], Tensor]  # of a layer's B [out, r], by the layer's kind
Changed = Callable[[Change], np.ndarray]  # the effect of the changed adapter
Faults = Iterator[tuple[str, np.ndarray]]  # causes and effects


class Example(NamedTuple):
    """A trained answer behind its prompt.

    Attributes:
        asked: the request for the prompt. Empty for a text without turns.
        prompt: token ids of the prompt.
        tokens: [s] ids of prompt and answer.
        targets: positions of the answer's tokens that are compared.
    """

    asked: Json
    prompt: list[int]
    tokens: list[int]
    targets: Sequence[int]


@dataclass(frozen=True)
class Difference:
    """The first token of a prompt that a server renders differently.

    Attributes:
        prompt, token: number of the prompt, and of the token in it.
        here, served: the text around it, as trained and as served.
        cause: the likely cause.
    """

    prompt: int
    token: int
    here: str
    served: str
    cause: str


@dataclass(frozen=True)
class Parity:
    """How far a server answers as the trained model.

    Attributes:
        prompts, equal: number of rendered prompts, and of those with the same token ids on the server.
        first: the first difference of a prompt; None without one.
        tokens, untold: number of compared tokens, and of those whose log-probs the server does not tell.
        share: share of the adapter's effect that the server reproduces, with an interval over answers.
        effect: mean absolute effect of the adapter here, in nats a token.
        base: mean absolute difference without the adapter, in nats a token. None if no server answers without it.
        cause: why the effects differ; empty if the share is near 1 and no fault shows.
    """

    prompts: int
    equal: int
    first: Difference | None
    tokens: int
    untold: int
    share: Interval
    effect: float
    base: float | None
    cause: str

    @property
    def holds(self) -> bool:
        """Whether all prompts are equal, and the server reproduces the adapter's effect."""
        return self.first is None and not self.cause


def measure(
    cfg: DictConfig,
    source: Any,
    servers: Sequence[OpenAI],
    rows: int = 32,
    tokens: int = 32,
    seed: int = 0,
    sends_args: bool = False,
) -> Parity:
    """Compare the adapter that a config starts from with what servers answer.

    Args:
        cfg: config of any recipe.
        source: component of a data set; or the folder of a run of RAFT, GRPO or distillation, for its sampled answers.
        servers: the one with the adapter, and perhaps one with the base model.
        rows, tokens: the most answers, and the most tokens of each, spread over it.
        seed: chooses rows of the data set.
        sends_args: whether clients send the config's ``chat_template_args``.

    Raises:
        UserError: there is no answer, the adapter changes nothing, or a server refuses a request.
    """
    learner = open_learner(_config(cfg))
    with closing(learner.runtime.ranks):
        if isinstance(source, Path):
            found = _sampled(cfg, source, learner.tokenizer)
        else:
            found = _rows_of(source, learner, np.random.default_rng(seed))
        examples = [_thinned(example, tokens) for example in islice(found, rows)]
        if not examples:
            raise UserError("there is no answer to compare; name rows: --data")
        prompts = [example for example in examples if example.asked]
        if sends_args:
            for prompt in prompts:
                prompt.asked[_ARGS] = _args_of(learner.tokenizer)
        differing = _differing(prompts, servers[0])
        first = None
        if differing:
            first = _difference(prompts, differing[0], learner.tokenizer, servers[0])
        effects, base = _effects(learner, examples, servers)
        share = effects.share()
        return Parity(
            prompts=len(prompts),
            equal=len(prompts) - len(differing),
            first=first,
            tokens=len(effects.told),
            untold=int((~effects.told).sum()),
            share=share,
            effect=float(np.abs(effects.here).mean()),
            base=base,
            cause=_explain(effects, share.value, base),
        )


def _config(cfg: DictConfig) -> DictConfig:
    """Return the learner's config for a config of any recipe."""
    cfg = OmegaConf.create(config.trainer_config(cfg))
    cfg.loss = {config.COMPONENT: "rocm_ext.losses.CrossEntropy"}
    cfg.save_adapter_weights_only = True
    cfg.compile = False
    return cfg


# ---- answers to compare


def _rows_of(source: Any, learner: Learner, draw: np.random.Generator) -> Iterator[Example]:
    """Yield the rows of a data set of SFT or DPO in random order, without those that training refuses."""
    tokenizer = learner.tokenizer
    dataset: Any = open_dataset(source, tokenizer, "error")
    parts: list[Any] = dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]
    places = [(part, row) for part in parts for row in range(len(part))]
    longest = tokenizer.max_seq_len or learner.decoder.max_seq_len
    refused = "it is empty"
    fits = False
    for number in draw.permutation(len(places)):
        try:
            part, row = places[number]
            example = _row(part, row, tokenizer)
            if not example.targets or len(example.tokens) > longest:
                raise UserError(f"no answer within {longest} tokens")
        except (UserError, ValueError) as error:
            refused = one_line(error)
            continue
        fits = True
        yield example
    if not fits:
        raise UserError(f"no row can be compared: {refused}")


def _row(dataset: Any, row: int, tokenizer: Any) -> Example:
    conversation = dataset.conversation(row) if isinstance(dataset, SourceDataset) else None
    if conversation is None:
        item = dataset[row]
        return Example({}, [], item["tokens"], _targets(item["labels"]))
    tokens, labels = returned(render_conversations(tokenizer, [conversation])[0])
    *before, _ = conversation.trained().turns
    prompt = _prompt(tokenizer, before, conversation.tools)
    return Example(*prompt, tokens, _targets(labels))


def _targets(labels: Sequence[int]) -> list[int]:
    mask = labelled(np.array(labels), [len(labels)])
    return np.flatnonzero(mask).tolist()


def _prompt(tokenizer: Any, turns: Turns, tools: Tools) -> tuple[Json, list[int]]:
    """Return the request for a prompt, and the prompt's token ids as in training."""
    plain = isinstance(renderer_of(tokenizer), PlainRenderer)
    asked = {"prompt": turns[0].content} if plain else chat(turns, tools)
    return asked, render_history(tokenizer, turns, tools)


def _sampled(cfg: DictConfig, run: Path, tokenizer: Any) -> Iterator[Example]:
    """Yield an answer for each prompt that a run has sampled, of the last steps."""
    prompts = config.instantiate(cfg.prompts, key="prompts")
    waiting = {prompt.id: prompt for prompt in prompts}
    answers = AnswerLog(run, [], Tails())
    for step in reversed(answers.steps()):
        for (name, _), _, record in answers.answers(step):
            is_conversation = "messages" in record
            sampled: Any = record.get("tokens")
            if name in waiting and not is_conversation and sampled:
                asked = waiting.pop(name)
                turns = to_turns(asked.messages)
                body, begun = _prompt(tokenizer, turns, asked.tools or None)
                tokens = [*begun, *sampled]
                targets = range(len(begun), len(tokens))
                yield Example(body, begun, tokens, targets)


def _thinned(example: Example, most: int) -> Example:
    """Return an example with at most so many targets, spread over the answer."""
    targets = np.array(example.targets)
    count = min(most, len(targets))
    spread = np.linspace(0, len(targets) - 1, count).round()
    return example._replace(targets=targets[spread.astype(int)].tolist())


# ---- prompts


def _args_of(tokenizer: Any) -> Json:
    return getattr(tokenizer, "template_args", {})  # torchtune's tokenizers have none


def _differing(prompts: Sequence[Example], server: OpenAI) -> list[int]:
    """Return the numbers of the prompts that a server renders differently."""
    there = server.prompts([prompt.asked for prompt in prompts])
    numbers = range(len(prompts))
    return [number for number in numbers if there[number] != prompts[number].prompt]


def _difference(
    prompts: Sequence[Example], number: int, tokenizer: Any, server: OpenAI
) -> Difference:
    """Describe how a server renders a prompt differently."""
    prompt = prompts[number]
    ours = prompt.prompt
    (theirs,) = server.prompts([prompt.asked])
    renderer = renderer_of(tokenizer)
    at = len(commonprefix([ours, theirs]))  # noqa: RUF071 - of tokens
    cause = _cause(ours, theirs, at, renderer)
    for args in (_args_of(tokenizer), *_FLAGS):
        flagged = prompt._replace(asked={**prompt.asked, _ARGS: args})
        with suppress(UserError):  # the server refuses the key
            if not _differing([flagged], server):
                cause = f"thinking flag or template's variable: requests need {_ARGS} {args}"
    around = slice(max(0, at - _AROUND), at + _AROUND)
    here = renderer.text(ours[around])
    served = renderer.text(theirs[around])
    return Difference(number, at, here, served, cause)


def _cause(ours: list[int], theirs: list[int], at: int, renderer: Any) -> str:
    """Name the likely cause of a difference from token ``at`` on."""
    text = renderer.text
    if theirs[1:] == ours:
        what = "doubled" if theirs[0] == ours[0] else "added"
        return f"BOS {what}: the server begins with {text(theirs[:2])!r}"
    if ours[1:] == theirs:
        return f"BOS missing: the server leaves out {text(ours[:1])!r}"
    if at == len(theirs):
        return f"header of the assistant's turn missing: {text(ours[at:])!r}"
    if text(ours) != text(theirs):
        return "chat template: the server writes another text"
    token = text(ours[at : at + 1])
    if token in getattr(renderer, "added_tokens", ()):
        return f"special token: the server reads {token!r} as text, in pieces"
    return f"tokenizer: the server splits the text differently, from {token!r} on"


# ---- the adapter's effect


class _Effects(NamedTuple):
    """What the adapter adds to the log-probs of the told tokens.

    Attributes:
        learner, rows: to compute the effects of other adapters.
        told: [tokens] whether the server tells a token's log-prob.
        off: [told] log-probs here without the adapter.
        here, there: [told] the adapter's effect here and on the server.
    """

    learner: Learner
    rows: Rows
    told: np.ndarray
    off: np.ndarray
    here: np.ndarray
    there: np.ndarray

    def of(self, state: Mapping[str, Tensor]) -> np.ndarray:
        """Compute the effect here of another adapter."""
        with reference(self.learner, state):
            return _scored(self.learner, self.rows)[self.told] - self.off

    def rest(self, effect: np.ndarray) -> float:
        """Return what an effect leaves unexplained of the server's, as a sum of squares."""
        return float(np.square(self.there - effect).sum())

    def is_noise(self, rest: float) -> bool:
        """Whether so little is unexplained that it hides no fault."""
        return bool(rest < _NOISE * np.square(self.here).sum())

    def share(self) -> Interval:
        """Return the slope of the server's effect over the effect here, by least squares through 0."""
        counts = [np.count_nonzero(labels != IGNORE) for labels in self.rows.labels]
        numbers = np.arange(len(counts))
        row = np.repeat(numbers, counts)[self.told]
        products = np.bincount(row, self.here * self.there)
        squares = np.bincount(row, np.square(self.here))
        return paired_ratio(products[squares > 0], squares[squares > 0])


def _effects(
    learner: Learner, examples: Sequence[Example], servers: Sequence[OpenAI]
) -> tuple[_Effects, float | None]:
    """Compute the adapter's effects, and the mean absolute difference without it if a server tells that."""
    rows = _labelled(examples)
    work = workload.describe(rows, len(rows), "the compared answers", learner.shares)
    learner.setup(work)
    on = _scored(learner, rows)
    with reference(learner):
        off = _scored(learner, rows)
    effect = np.abs(on - off).mean()
    if effect < _SMALLEST:
        raise UserError(
            f"the adapter changes log-probs by {effect:.1g} nats a token here, which is too little to compare"
        )
    there_on = _asked(servers[0], examples)
    there_off = off
    base_server = servers[-1]
    has_off = base_server.has_off or len(servers) > 1
    if has_off:
        there_off = _asked(base_server, examples, adapted=not base_server.has_off)
    there = there_on - there_off
    told = np.isfinite(there)
    here = on - off
    effects = _Effects(learner, rows, told, off[told], here[told], there[told])
    base = np.abs(there_off - off)[told].mean()
    return effects, float(base) if has_off else None


def _labelled(examples: Sequence[Example]) -> Rows:
    """Return rows whose labels are the targets."""
    rows = Rows([], [], [], {"rows": len(examples)})
    for example in examples:
        tokens = np.array(example.tokens, np.int32)
        labels = np.full_like(tokens, IGNORE)
        labels[example.targets] = tokens[example.targets]
        rows.tokens.append(tokens)
        rows.labels.append(labels)
        rows.lengths.append((len(tokens),))
    return rows


def _scored(learner: Learner, rows: Rows) -> np.ndarray:
    logprobs = np.concatenate(score(learner, rows))
    return np.maximum(logprobs.astype(np.float64), _FLOOR)


def _asked(server: OpenAI, examples: Sequence[Example], adapted: bool = True) -> np.ndarray:
    texts = [example.tokens for example in examples]
    targets = [example.targets for example in examples]
    logprobs = server.logprobs(texts, targets, adapted)
    return np.maximum(logprobs.astype(np.float64), _FLOOR)


# ---- why a share is far from 1


def _explain(effects: _Effects, share: float, base: float | None) -> str:
    """Name the fault whose effect here is nearest to the server's, if that is much nearer than the adapter's.

    A share near 1 is a fault's only if the fault explains half of the difference; else the rest is noise, as of a
    quantised base model.
    """
    most = effects.rest(effects.here)
    of_server = effects.rest(0 * effects.here)
    near = LEAST <= share <= 1 / LEAST
    nearest = ""
    if near and effects.is_noise(most):
        return nearest
    if base is not None and np.abs(effects.there).mean() < _SMALLEST:
        return _NOT_LOADED
    if near:
        most *= 0.5
    elif base is not None and base > min(_OTHER, np.abs(effects.here).mean()):
        nearest = f"base model: without the adapter, the server differs by {base:.2g} nats a token"
        most = min(most, of_server) * 0.5
    else:
        nearest = (
            "unknown: neither scale, dropped modules nor order of heads; the base model may be another one, or more "
            "--rows are needed"
        )
        most *= _CLEAR
    for cause, effect in _faults(effects, share):
        rest = effects.rest(effect)
        if rest < most:
            nearest = cause
            most = _CLEAR * rest
    return nearest


def _faults(effects: _Effects, share: float) -> Faults:
    """Yield faults of exports and servers with the effects that they would have here."""
    yield _NOT_LOADED, 0 * effects.here
    learner = effects.learner
    names = names_of(learner.decoder, learner.cfg.checkpointer.model_type)
    layers = []
    for found in trained_layers(learner.decoder, names):
        if not isinstance(found.layer, TokenRows | Dora):
            layers.append(found)
    if not layers:
        return
    state = learner.adapter_state()

    def changed(change: Change) -> np.ndarray:
        adapter = dict(state)
        for layer in layers:
            name = f"{layer.name}.lora_b.weight"
            adapter[name] = change(_kind(layer), state[name])
        return effects.of(adapter)

    usual: Any = layers[0].layer
    rank, alpha = rank_and_alpha(usual)
    formulas = {
        "alpha / r": alpha / rank,
        "alpha / sqrt(r), rsLoRA's": alpha / rank**0.5,
        "alpha": alpha,
        "half": 0.5 * usual.scale,
        "twice": 2 * usual.scale,
    }
    yield from _scaled(changed, usual.scale, formulas)
    yield from _dropped(effects, changed, layers)
    for pairs in (True, False):
        order = _in_order(learner.decoder.head_dim, pairs)
        yield "order of heads: the rows of q_proj and k_proj", changed(order)
    # fitted, so last: a fault without a free number is likelier
    yield from _scaled(changed, usual.scale, {"about": share * usual.scale})


def _kind(layer: PeftLayer) -> str:
    """Return the short name of a layer's module, or of its weight of all experts."""
    return last_parts(layer.weight, 2) if layer.by_parameter else last_part(layer.module)


def _scaled(changed: Changed, ours: float, formulas: Mapping[str, float]) -> Faults:
    """Yield the effects of other scales than ``ours``."""
    for formula, scale in formulas.items():
        if scale == ours:
            continue
        effect = changed(lambda _, b: scale / ours * b)  # noqa: B023 - called at once
        yield (
            f"adapter's scale: {scale:.3g} ({formula}) on the server, {ours:.3g} in the run",
            effect,
        )


def _dropped(effects: _Effects, changed: Changed, layers: Sequence[PeftLayer]) -> Faults:
    """Yield the effects without a kind of module, or all of one parent, and without further ones while that is nearer.

    Their sum would not do: modules that are dropped together change more than each alone.
    """
    units: dict[str, set[str]] = defaultdict(set)
    for layer in layers:
        kind = _kind(layer)
        parent, *_ = last_parts(layer.weight, 3).split(".")
        units[kind].add(kind)
        units[f"all of {parent}"].add(kind)
    nearest: set[str] = set()
    rest = effects.rest(effects.here)
    for _ in range(_ROUNDS):
        begun = nearest
        for unit in units.values():
            dropped = begun | unit
            effect = changed(lambda kind, b: 0 * b if kind in dropped else b)  # noqa: B023 - called at once
            yield f"dropped: the adapter of {', '.join(sorted(dropped))}", effect
            left = effects.rest(effect)
            if left < _CLEAR * rest:
                nearest = dropped
                rest = left
        if nearest == begun or effects.is_noise(rest):
            return


def _in_order(head_dim: int, pairs: bool) -> Change:
    """Return the change of each head's rows to rotary pairs, as in llama.cpp's files of Llama, or back to halves."""
    shape = (2, head_dim // 2) if pairs else (head_dim // 2, 2)

    def change(kind: str, b: Tensor) -> Tensor:
        if kind not in ("q_proj", "k_proj") or len(b) % head_dim:
            return b
        heads = b.view(-1, *shape, b.shape[-1])
        return heads.transpose(1, 2).reshape(b.shape)

    return change
