"""``rocm-ext export``: write a trained model for other programs.

Writes the adapter of a run, or the model with the adapter merged, with the tokenizer and the chat template. Weights are
read and written one at a time.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_text
from rocm_ext.base.hub import is_hub_name
from rocm_ext.base.log import setup_logging
from rocm_ext.cli._common import add_force, add_trust, check_new_file, options, refuse_first


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    source = "output_dir of a run of any recipe, an adapter's folder, or the folder of a model without adapter"
    option("source RUN", source, Path)
    option(
        "--base-model DIR", "the base model's folder (default: the one in the run's config)", Path
    )
    add_trust(parser)
    option("--merged DIR", "write the merged model in Hugging Face's format", Path)
    option("--gguf FILE", "write the merged model as one file for llama.cpp and Ollama", Path)
    types = ("f16", "bf16", "q8_0", "f32")
    about = "type of the weights in --gguf (default: f16)"
    parser.add_argument("--type", choices=types, default="f16", help=about)
    option("--gguf-adapter FILE", "write the adapter for llama.cpp's --lora", Path)
    option("--card FILE", "write the model card (with --merged: README.md in DIR)", Path)
    add_force(parser)
    option("--push OWNER/NAME", "upload the written files, or else the adapter, with its card")
    option("--private", "make the new repository of --push private, or demand that it is")
    option(
        "--base-name OWNER/NAME", "the base model's name on the hub (default: as its folder says)"
    )


def run(args: Namespace) -> None:
    """Write the files that the options name, and print their paths."""
    _check_new(args)
    named = "--merged DIR, --gguf FILE, --gguf-adapter FILE, --card FILE or --push OWNER/NAME"
    refuse_first(
        (not any((args.merged, args.gguf, args.gguf_adapter, args.card, args.push)), f"nothing to write; set {named}"),
        (args.base_name and not is_hub_name(args.base_name),
         f"--base-name {args.base_name} is no name on the hub; expected OWNER/NAME"),
    )  # fmt: skip
    from rocm_ext.export import gguf_model, open_source
    from rocm_ext.export.ollama import write_modelfile
    from rocm_ext.export.push import card, push
    from rocm_ext.export.source import write_merged

    setup_logging()
    source = open_source(args.source, args.base_model, args.trust_config)
    source = replace(source, base_name=args.base_name)
    if source.adapter is None and (args.card or args.push):
        raise UserError(f"{args.source} has no adapter; --card and --push are for trained adapters")
    merges = bool(args.merged or args.gguf)
    uploads: list[Path] = []
    here: list[Path] = []  # files that are not uploaded
    if args.merged:
        write_merged(source, args.merged, lambda: card(source, merged=True))
        print(args.merged)
    if args.gguf:
        gguf_model.write_model(source, args.gguf, args.type)
        uploads += [args.gguf, write_modelfile(source, args.gguf)]
    if args.gguf_adapter:
        gguf_model.write_adapter(source, args.gguf_adapter)
        uploads.append(args.gguf_adapter)
        # The adapter's Modelfile names a folder of this machine.
        here.append(write_modelfile(source, args.gguf_adapter, adapter=True))
    if args.card:
        replace_text(args.card, card(source, merges))
        here.append(args.card)
    for path in (*uploads, *here):
        print(path)
    if args.push:
        folder = args.merged or (None if uploads else source.adapter)
        text = card(source, merges)
        print(push(source, args.push, text, folder, uploads, args.private))


def _check_new(args: Namespace) -> None:
    """Refuse names of files that exist, or that two options share, before the weights are read."""
    models = [path for path in (args.gguf, args.gguf_adapter) if path]
    paths = models + [check_new_file(path, args.force).with_suffix(".Modelfile") for path in models]
    if args.card:
        paths.append(args.card)
    for number, path in enumerate(paths):
        check_new_file(path, args.force)
        refuse_first(
            (path in paths[:number], f"{path} would be written twice; choose another name")
        )
