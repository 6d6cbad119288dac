"""The main function of a recipe's script: it reads the command line, sets the environment and gives an exit code."""

import gc
import inspect
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rocm_ext.base import heartbeat, registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import log, setup_logging
from rocm_ext.base.process import end_with_parent, stop_signals, survive_terminal, tell_launcher
from rocm_ext.config.layers import find, load
from rocm_ext.config.model_folder import check_model_folder
from rocm_ext.machine.detect import detect
from rocm_ext.machine.environment import apply_environment, preset
from rocm_ext.machine.profile import load_profile


def recipe_main(
    recipe: str, defaults: str | None = None
) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Decorate a recipe's main function: parse, set the machine's environment, run, end with an exit code.

    A :class:`UserError` becomes one line and its code; Ctrl-C, SIGTERM and SIGHUP become 130, 143 and 129.

    Args:
        recipe: name of the recipe, as a literal: tools read it without running the file.
        defaults: YAML of its keys, relative to the file of the decorated function. It says ``recipe: NAME``, and
            ``extends: lora_finetune_rocm`` to inherit that recipe's keys. None: ``recipe`` is already in the table, and
            this is another script for it.
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        def action() -> None:
            setup_logging()
            this_recipe = registry.made_by(
                recipe, defaults, Path(main.__code__.co_filename).resolve()
            )
            name, overrides = command_line(sys.argv[1:], main.__doc__ or "")
            cfg = load(this_recipe, name, overrides)
            profile = load_profile(cfg.hardware)
            for line in [*preset(profile), *apply_environment(profile, detect())]:
                log.info("%s", line)
            check_model_folder(cfg, find(name))
            main(cfg)

        @wraps(main)
        def run() -> None:
            if not gc.isenabled():  # see rocm_ext.config.startup
                gc.enable()
                gc.freeze()  # what was imported stays
            # ranks that outlive torchrun would hold the GPUs and go on writing
            if "TORCHELASTIC_RUN_ID" in os.environ:
                end_with_parent()
            # torchrun's SIGTERM must end a rank that waits for another in C++ code
            if int(os.environ.get("WORLD_SIZE", 1)) == 1:
                for signum in stop_signals():
                    signal.signal(signum, _terminate)
            sys.exit(guarded(action))

        return run

    return decorate


def guarded(action: Callable[[], Any]) -> int:
    """Run ``action``, print a user's error in one line, and return the exit code."""
    rank = os.environ.get("RANK")
    try:
        action()
    except UserError as error:
        heartbeat.note(error=str(error), code=error.code)
        if not tell_launcher(f"error: {error}"):
            where = "" if rank is None else f"[rank {rank}] "
            print(f"{where}error: {error}", file=sys.stderr)
        return error.code
    except Exception:
        # if another rank failed first, the launcher ends this one before it prints
        if rank is not None:
            time.sleep(2)
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    heartbeat.note(complete=int(rank or 0), ranks=ranks)
    return 0


def _terminate(signum: int, frame: Any) -> None:
    survive_terminal()
    sys.exit(128 + signum)


def command_line(argv: list[str], description: str = "") -> tuple[str, list[str]]:
    """``--config NAME key=value …`` -> the name and the overrides."""
    if any(arg in ("-h", "--help") for arg in argv):
        print(
            f"{inspect.cleandoc(description)}\n\nusage: --config NAME_OR_FILE [key=value ...] [~key ...]"
        )
        sys.exit(0)
    name = None
    overrides = []
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if arg == "--config" and rest:
            name = rest.pop(0)
        elif arg.startswith("--config="):
            name = arg.partition("=")[2]
        elif arg.startswith("-"):
            raise UserError(
                f"unknown option {arg}; expected --config NAME and key=value overrides", code=2
            )
        else:
            overrides.append(arg)
    if name is None:
        raise UserError("--config is missing; `tune ls` lists the configs", code=2)
    return name, overrides
