"""``rocm-ext eval``: measure a model on held-out rows or prompts, with or without an adapter.

With a config of SFT or DPO, it measures loss and perplexity on its held-out rows. With a config of RAFT or GRPO, with
--verifier, or with the --set of prompts, it samples answers to prompts, verifies them, and prints pass@1 of greedy
answers, and pass@k of --samples drawn ones, with 95 % intervals.
"""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.hub import is_hub_name
from rocm_ext.base.types import Json
from rocm_ext.cli._common import (
    add_format,
    add_json,
    add_model,
    add_trust,
    count,
    number,
    options,
    prepare,
    print_json,
    printable,
    refuse_first,
    shortened,
    take_model,
)
from rocm_ext.config.chosen_model import ChosenModel, find_target, sampling_config
from rocm_ext.config.components import names_prompts
from rocm_ext.config.layers import read
from rocm_ext.runs.scores import Score

if TYPE_CHECKING:
    from rocm_ext.evaluate.answers import Evaluation
    from rocm_ext.evaluate.rows import Measured

_TITLES = ("", "without the adapter: ")  # the measured model, and what --base adds
_TAIL = 200  # characters shown of a question's beginning and of an answer's end
# The measured model, with --base also the model without the adapter; and the function that compares these
Measurements = tuple[Sequence[Any], Callable[..., Json]]


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    option("--adapter DIR", "PEFT folder (default: the run's, or that of the config)", Path)
    option("--base", "measure the model that the config starts from, too, and compare them")
    option("--set NAME", "measure on dataset_val.NAME or eval_prompts.NAME, if it has several sets")
    option("--data FILE", "rows to use instead of the config's: a file or a hub name")
    option("--split SPLIT", "split of a hub data set (default: test)")
    option("--name NAME", "configuration of a hub data set (openai/gsm8k: main)")
    add_format(parser)
    option("--verifier NAME", "MathAnswer, PythonTests, …, or my_module.MyVerifier")
    option("--samples N", "answers drawn per prompt for pass@k, beside the greedy one", count)
    wrong = (
        "print this many wrong answers, and with --base as many gained and lost ones (default: 3)"
    )
    option("--show N", wrong, number(int, 0, 10**6), 3)
    output = "keep answers, verdicts and scores, or the losses of rows, in this new folder; rocm-ext compare takes two"
    option("--output DIR", output, Path)
    add_json(parser)
    add_trust(parser)
    add_model(parser)


def run(args: Namespace) -> None:
    """Measure the model and print its scores."""
    unused: list[str] = []
    if args.verifier:
        unused += ["verifier", "environment"]
    if args.data:
        unused += ["eval_prompts", "dataset_val"]
    target = find_target(take_model(args), args.adapter, args.trust_config, unused)
    adapter = target.adapter
    target = replace(
        target, adapter=None
    )  # the adapter is measured in addition to the config's start
    family = registry.family(target.recipe(args.overrides))
    keys = target.content or read(config.find(target.name))
    of_rows = family in (registry.SFT, registry.DPO)
    answers = bool(args.verifier) or not of_rows or names_prompts(keys, args.set)
    _check(args, adapter, target, answers)
    prepare(target, args.overrides)
    measure, show = (_answers, _print_answers) if answers else (_rows, _print_rows)
    measured, compare = measure(args, target, adapter)
    content: Json = dict(measured[0].scores)
    if args.base:
        content |= {"base": measured[1].scores, "paired": compare(*measured)}
    if args.json:
        print_json(content)
    else:
        show(args, measured, content.get("paired"))


def _check(args: Namespace, adapter: Path | None, target: ChosenModel, answers: bool) -> None:
    alone = target.content is not None and not target.run
    refuse_first(
        (args.base and adapter is None, "--base compares an adapter with the model that the config starts from; name "
         "one: --adapter"),
        (answers and alone and not (args.verifier and args.data), "a model alone has no prompts and no verifier; set "
         "--data and --verifier"),
        (not answers and (args.format or args.samples), "--format and --samples are for answers that a verifier "
         "judges; set --verifier"),
        code=1,
    )  # fmt: skip
    if args.data:
        return
    for name in ("format", "split", "name"):
        refuse_first(
            (getattr(args, name), f"--{name} describes the rows of --data; set --data, too")
        )


def _check_new(folder: Path | None) -> None:
    """Refuse to write among other files: some may have the names of ours."""
    if folder is None or not folder.exists():
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"--output {folder} exists and is not empty; choose a new folder")


def _answers(args: Namespace, target: ChosenModel, adapter: Path | None) -> Measurements:
    from rocm_ext.evaluate.answers import compare, evaluate

    cfg = _sampling(args, target)
    if not cfg.overwrite_output_dir:
        _check_new(args.output)
    with TemporaryDirectory() as scratch:
        cfg.output_dir = cfg.checkpointer.output_dir = str(args.output or scratch)
        return evaluate(cfg, adapter, args.base), compare


def _print_answers(
    args: Namespace, evaluations: Sequence["Evaluation"], paired: Json | None
) -> None:
    for evaluation, title in zip(evaluations, _TITLES, strict=False):
        scores = evaluation.scores
        print(f"{title}pass@1 {Score(scores['correct'], scores['prompts'])}")
        for k, at in scores["pass_at_k"].items():
            low, high = at["interval"]
            drawn = f"pass@{k} of {scores['samples_per_prompt']}"
            print(f"{title}{drawn}: {at['pass']:.1%}, 95 % interval {low:.1%} - {high:.1%}")
    if paired:
        low, high = paired["interval"]
        print(
            f"the adapter gains {paired['gained']} prompts and loses {paired['lost']}: {100 * paired['gain']:+.1f} "
            f"points, 95 % interval {100 * low:+.1f} – {100 * high:+.1f}; McNemar p = {paired['p']:.2g}"
        )
        adapted, base = evaluations
        _print_changed("gained", adapted, adapted, base, args.show)
        _print_changed("lost", base, adapted, base, args.show)
    _print_wrong(evaluations[0], args.show)
    if args.output:
        print(f"all answers: {args.output / 'answers.jsonl'}")


def _sampling(args: Namespace, target: ChosenModel) -> DictConfig:
    """Return the config of the sampling; keys that only RAFT has may be set for any recipe's config."""
    known = config.defaults(target.recipe(args.overrides))
    only_rafts = config.defaults(registry.RAFT).keys() - known.keys()
    overrides: list[str] = []
    later: list[str] = []
    for item in args.overrides:
        key = item.partition("=")[0].split(".")[0]
        (later if key in only_rafts else overrides).append(item)
    cfg = target.load([*overrides, "output_dir=eval"])
    if "prompts" not in cfg:
        cfg = sampling_config(cfg)
    if args.data:
        cfg.eval_prompts = {config.COMPONENT: "rocm_ext.data.prompt_dataset", **_source(args)}
        if args.format:
            cfg.eval_prompts.format = args.format
    config.components.choose_prompts(cfg, args.set)
    if args.verifier:
        path = args.verifier if "." in args.verifier else f"rocm_ext.verifiers.{args.verifier}"
        cfg.verifier = {config.COMPONENT: path}
        cfg.environment = None
    cfg.eval_samples = args.samples or cfg.eval_samples
    return OmegaConf.merge(cfg, OmegaConf.from_dotlist(later))  # type: ignore[return-value]


def _source(args: Namespace) -> dict[str, str]:
    split = "test" if is_hub_name(args.data) else "train"  # a file has the split train alone
    source = {"source": args.data, "split": args.split or split}
    if args.name:
        source["name"] = args.name
    return source


def _print_changed(
    change: str, right: "Evaluation", adapted: "Evaluation", base: "Evaluation", most: int
) -> None:
    """Print the first prompts of which only the model ``right`` is right, with the greedy answers of both models."""
    before, after = _greedy(base), _greedy(adapted)
    changed = []
    for prompt in after:
        differs = adapted.right[prompt] != base.right[prompt]
        if differs and right.right[prompt]:
            changed.append(prompt)
    for prompt in changed[:most]:
        print(f"  {change}: {shortened(after[prompt]['prompt'], _TAIL)}")
        print(f"    without the adapter: {shortened(before[prompt]['text'], -_TAIL)}")
        print(f"    with it:             {shortened(after[prompt]['text'], -_TAIL)}")


def _greedy(evaluation: "Evaluation") -> dict[str, Json]:
    """Return the greedy answers by the prompts' ids."""
    return {answer["prompt_id"]: answer for answer in evaluation.answers if answer["sample"] < 0}


def _print_wrong(evaluation: "Evaluation", most: int) -> None:
    """Print the verdicts on wrong greedy answers, and the first such answers."""
    wrong = [answer for answer in _greedy(evaluation).values() if answer["verdict"] != "CORRECT"]
    if not wrong or not most:
        return
    verdicts = Counter(answer["verdict"] for answer in wrong)
    cut = sum(answer["finish_reason"] == "length" for answer in wrong)
    counts = ", ".join(f"{number} {name}" for name, number in sorted(verdicts.items()))
    print(f"wrong greedy answers: {counts}; {cut} of them are cut at max_new_tokens")
    for answer in wrong[:most]:
        print(f"  {answer['prompt_id']}: {answer['verdict']} {printable(answer['detail'])}")
        print(f"    asked: {shortened(answer['prompt'], _TAIL)}")
        print(f"    said:  {shortened(answer['text'], -_TAIL)}")


def _rows(args: Namespace, target: ChosenModel, adapter: Path | None) -> Measurements:
    from rocm_ext.evaluate.rows import compare, keep, measure
    from rocm_ext.recipes.dpo_rocm import DPO
    from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

    _check_new(args.output)
    cfg = target.load(args.overrides)
    if args.data:
        if not isinstance(cfg.dataset.get("source"), str):
            raise UserError(
                "--data replaces dataset.source, which this config's dataset does not have"
            )
        dataset = dict(cfg.dataset)
        dataset.pop("data_files", None)
        dataset.pop("name", None)
        cfg.dataset_val = dataset | _source(args)
        cfg.validation_fraction = 0.0
    of_pairs = registry.family(registry.find(cfg.recipe)) == registry.DPO
    recipe = (DPO if of_pairs else LoRAFinetune)(cfg)
    both = measure(recipe, adapter, args.base, args.set)
    if args.output:
        keep(both[0], args.output)
        if args.base:
            keep(both[1], args.output / "base")
    return both, compare


def _print_rows(args: Namespace, both: Sequence["Measured"], paired: Json | None) -> None:
    for measured, title in zip(both, _TITLES, strict=False):
        scores = dict(measured.scores)
        text = f"loss {scores.pop('loss'):.4f}, perplexity {scores.pop('perplexity'):.3f}"
        text += f" ({scores.pop('rows'):,} rows, {scores.pop('tokens'):,} tokens)"
        for name, value in scores.items():
            text += f", {name} {value:.4f}"
        print(title + text)
    if paired:
        low, high = paired["interval"]
        change = f"the adapter changes the NLL per token by {paired['difference']:+.4f}"
        print(f"{change}, 95 % interval {low:+.4f} – {high:+.4f}")
        if "p" in paired:
            print(
                f"it makes the chosen answer more probable in {paired['gained']} pairs, and no longer so in "
                f"{paired['lost']}; McNemar p = {paired['p']:.2g}"
            )
    _print_worst(both[0].rows, args.show)
    if args.output:
        print(f"all rows: {args.output / 'rows.jsonl'}")


def _print_worst(rows: Sequence[Json], most: int) -> None:
    if not most or not rows:
        return
    if "loss" in rows[0]:
        worst = sorted(rows, key=lambda row: -row["loss"])[:most]
        print(
            "highest losses: " + ", ".join(f"row {row['row']}: {row['loss']:.3f}" for row in worst)
        )
        return
    gaps = sorted((row["logprob_chosen"] - row["logprob_rejected"], row["row"]) for row in rows)
    swapped = [f"row {number}: by {-gap:.2f}" for gap, number in gaps[:most] if gap < 0]
    if swapped:
        print("rejected answers that are the more probable ones: " + ", ".join(swapped))
