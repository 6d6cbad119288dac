"""``rocm-ext export``: take what a run trained to other programs."""

import argparse
from pathlib import Path

from rocm_ext.errors import UserError


def add(commands) -> None:
    """Add the command's parser to argparse's subparsers."""
    parser = commands.add_parser(
        "export",
        help="write a merged model for transformers and vLLM, or GGUF files for llama.cpp and Ollama",
        description="Write what a run trained for other programs: merged with its base model, or as an adapter, with "
        "the tokenizer and the chat template. Weights are read and written one at a time.",
    )
    option = parser.add_argument
    option(
        "source",
        type=Path,
        metavar="RUN",
        help="output_dir of a run of any recipe, an adapter's folder, or the folder of a model without adapter",
    )
    option("--base", type=Path, metavar="DIR", help="the base model's folder (default: the one in the run's config)")
    option("--merged", type=Path, metavar="DIR", help="write the merged model in Hugging Face's format")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write what the options name, and print each path."""
    if not args.merged:
        raise UserError("nothing to write; set --merged DIR", code=2)
    from rocm_ext.export import open_source
    from rocm_ext.export.merged import write_merged
    from rocm_ext.log import setup_logging

    setup_logging()
    source = open_source(args.source, args.base)
    if args.merged:
        write_merged(source, args.merged)
        print(args.merged)
