"""``rocm-ext serve``: train this model from scripts that speak Tinker's API: the SDK tinker, tinker-cookbook.

Prints two lines to export in the shell of a script; the script then trains and samples here, unchanged. Several
scripts train adapters over one base model at once. Their checkpoints are folders in --out, which `rocm-ext chat` and
`export` read. Ctrl-C saves what no checkpoint has. Needs the extra: pip install 'torchtune-rocm[serve]'.
"""

import os
import secrets
import socket
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import disk_errors
from rocm_ext.cli._common import (
    add_model,
    add_trust,
    count,
    note,
    number,
    options,
    prepare,
    refuse_first,
    take_model,
)
from rocm_ext.config.chosen_model import find_target

_KEY = "TINKER_API_KEY"


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    option("--out DIR", "folder for checkpoints (default: serve)", Path, Path("serve"))
    option(
        "--adapters N",
        "models in training at once, for which memory is planned (default: 2)",
        count,
        2,
    )
    option("--port N", "port (default: 8300; 0: any free one)", number(int, 0, 65535), 8300)
    host = "address to listen at (default: 127.0.0.1, which only this machine reaches)"
    option("--host ADDRESS", host, default="127.0.0.1")
    add_trust(parser)
    add_model(parser)


def run(args: Namespace) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    key = os.environ.get(_KEY) or f"tml-{secrets.token_urlsafe(24)}"
    refuse_first((not key.startswith("tml-"), f"{_KEY} must begin with tml-, as the SDK asks"))
    name = take_model(args)
    target = find_target(name, None, args.trust_config)
    listener = _listen(args.host, args.port)
    prepare(target, args.overrides)
    try:
        from rocm_ext.serve.server import serve
    except ImportError as error:
        raise UserError(
            f"serve needs an extra: pip install 'torchtune-rocm[serve]' ({one_line(error)})"
        ) from error
    from rocm_ext.train.lifecycle import Interrupt
    from rocm_ext.train.output_dir import hold
    from rocm_ext.training.opening import config_for

    cfg = config_for(target, args.overrides)
    interrupt = Interrupt()
    with disk_errors(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
    with hold(args.out), interrupt:
        serve(
            cfg,
            args.out,
            listener,
            key,
            names=[name],
            most=args.adapters,
            stopped=lambda: interrupt.signum is not None,
            greet=lambda adapters: _greet(args, listener, key, adapters.names),
        )
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Open the port before the model, which takes longer."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(
            f"cannot listen at {host}:{port}: {error.strerror}; choose another --port"
        ) from error


def _greet(args: Namespace, listener: socket.socket, key: str, names: list[str]) -> None:
    _, port = listener.getsockname()[:2]
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.host, args.host)
    if ":" in host:
        host = f"[{host}]"
    if args.host != "127.0.0.1":
        note(
            "Others on the network can reach this server, without encryption: keep the key to yourself."
        )
    note(
        f"Serving {' = '.join(names)}; checkpoints go to {args.out}. In the shell of your script:\n"
    )
    print(f"export TINKER_BASE_URL=http://{host}:{port}")
    print(f"export {_KEY}={key}", flush=True)
    note(f"\nUp to {args.adapters} models train at once. Ctrl-C saves and ends.")
