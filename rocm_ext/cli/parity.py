"""``rocm-ext parity``: compare what was trained with what a server answers.

Renders prompts of the run's data, and compares their token ids with those of llama.cpp's server, or of one with vLLM's
protocol. Computes log-probs of trained answers with the adapter off and on, here and on the server, and prints the
share of the adapter's effect that the server reproduces. Names the first difference and its likely cause. Exits with 1
if prompts differ, if the share is below 0.9 or above 1.11, or if a known fault explains what differs; with 2 if nothing
could be compared.
"""

import math
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.cli._common import (
    add_json,
    add_model,
    add_trust,
    count,
    exits_with,
    options,
    prepare,
    print_json,
    printable,
    refuse_first,
    seed,
    shortened,
    take_model,
)
from rocm_ext.config.chosen_model import find_target

if TYPE_CHECKING:
    from rocm_ext.evaluate.parity import Parity

_UNUSED = ("eval_prompts", "verifier", "environment", "engine", "loss")  # keys of a run's config
_TEXT = 100  # characters of a prompt around a difference


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    option("--server URL", "the server's address, such as http://127.0.0.1:8080", required=True)
    option("--served NAME", "vLLM's name of the adapter or model, or llama.cpp's id of the adapter")
    option("--base-server URL", "a server with the base model, for one that has a merged model")
    option("--api-key-env NAME", "environment variable with the servers' API key")
    option("--adapter DIR", "PEFT folder (default: the run's or the config's)", Path)
    option("--data FILE", "rows to use instead of the run's, as for SFT: a file")
    option("--rows N", "answers to compare (default: 32)", count, 32)
    option("--tokens N", "tokens of an answer to compare, spread over it (default: 32)", count, 32)
    option("--seed N", "chooses the rows (default: 0)", seed, 0)
    option("--send-args", "send the run's chat_template_args, as your clients do")
    add_json(parser)
    add_trust(parser)
    add_model(parser)


def run(args: Namespace) -> int:
    """Compare and print; returns the exit code, which is the answer."""
    with exits_with(2):  # 1 means: the server does not answer as the trained model
        compared = _compare(args)
    if args.json:
        interval = {"low": compared.share.low, "high": compared.share.high}
        content = asdict(compared) | {"share": compared.share.value, "interval": interval}
        print_json(content | {"holds": compared.holds})
    else:
        _print(compared)
    return 0 if compared.holds else 1


def _compare(args: Namespace) -> "Parity":
    target = find_target(take_model(args), args.adapter, args.trust_config, _UNUSED)
    family = registry.family(target.recipe(args.overrides))
    of_rows = family in (registry.SFT, registry.DPO)
    refuse_first(
        (not (of_rows or target.run or args.data), "answers come from a run, or from rows: --data")
    )
    prepare(target, args.overrides)
    from rocm_ext.evaluate.parity import measure
    from rocm_ext.sampling.server.served import open_served

    servers = [open_served(args.server, args.served, args.api_key_env)]
    if args.base_server:
        servers.append(open_served(args.base_server, None, args.api_key_env))
    cfg = target.load(args.overrides)
    refuse_first(
        (not cfg.checkpointer.get("adapter_checkpoint"), "there is no adapter to compare; name a run, or --adapter")
    )  # fmt: skip
    source: Any = Path(target.name).parent  # the run's, for its sampled answers
    if of_rows:
        held_out = config.components.data_sets("dataset_val", cfg.dataset_val)
        source = next(iter(held_out.values())) or cfg.dataset
    if args.data:
        usual = {config.COMPONENT: "rocm_ext.data.sft_dataset"}
        like = source if of_rows and "source" in source else usual
        source = OmegaConf.create({**like, "source": args.data})
    return measure(cfg, source, servers, args.rows, args.tokens, args.seed, args.send_args)


def _print(compared: "Parity") -> None:
    prompts = f"{compared.equal} of {compared.prompts} have the server's token ids"
    if not compared.prompts:
        prompts = "the rows are texts without a prompt"
    told = compared.tokens - compared.untold
    logprobs = f"{told:,} tokens; the adapter moves them by {compared.effect:.3g} nats"
    if compared.untold:
        logprobs += f"; the server does not tell {compared.untold:,} more"
    base = "not compared: a merged model has no off, and --base-server is not set"
    if compared.base is not None:
        base = f"differs by {compared.base:.2g} nats a token without the adapter"
    share = compared.share
    interval = "unknown from one answer"
    if math.isfinite(share.low):
        interval = f"{share.low:.3f} – {share.high:.3f}"
    print(f"prompts    {prompts}")
    print(f"log-probs  {logprobs}")
    print(f"base       {base}")
    print(f"share      {share.value:.3f} of the adapter's effect (95 % interval {interval})")
    first = compared.first
    if first is not None:
        print(f"prompt {first.prompt}, token {first.token}")
        print(f"  here:   {shortened(first.here, _TEXT)}")
        print(f"  served: {shortened(first.served, _TEXT)}")
    if compared.holds:
        print("verdict: the server answers as the trained model")
        return
    causes = [first.cause] if first is not None else []
    if compared.cause:
        causes.append(compared.cause)
    named = printable("; ".join(causes))
    print(f"verdict: the server does not answer as the trained model: {named}")
