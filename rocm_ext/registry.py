"""Makes ``tune ls``, ``tune cp`` and ``tune run`` know this library's recipes and configs.

torch loads :func:`register` at the end of ``import torch``, through the entry point group
``torch.backends`` (device extension autoload, PyTorch RFC 122468). In any program but ``tune`` it
returns at once; nothing heavier than ``sys`` is imported at the top of this file.
"""

import sys

TORCHTUNE_PIN = "0.6.1"
TORCHAO_PIN = ("0.13", "0.16")  # from, below
RECIPES = ("lora_finetune_rocm", "raft_rocm")


def register() -> None:
    """Append our recipes to torchtune's registry if the running program is ``tune``. Never raises,
    but ends ``tune`` with one line where the installed torchtune or torchao cannot work."""
    try:
        if not _is_tune():
            return
        problem = wrong_pins()
        if problem and _names_us(sys.argv):
            sys.exit(problem)
        _add_recipes()
    except Exception as error:
        print(f"torchtune-rocm: its recipes are not registered: {error}", file=sys.stderr)


def installed() -> dict[str, str | None]:
    """The versions of torchtune and torchao; None: not installed."""
    from importlib.metadata import PackageNotFoundError, version

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: of(name) for name in ("torchtune", "torchao")}


def wrong_pins(versions: dict[str, str | None] | None = None) -> str | None:
    """One line that says which of torchtune and torchao does not fit, or None. ``versions``: else the installed."""
    versions = installed() if versions is None else versions
    torchtune, torchao = (versions.get(name) or "none" for name in ("torchtune", "torchao"))
    low, below = (_numbers(pin) for pin in TORCHAO_PIN)
    if _numbers(torchtune) == _numbers(TORCHTUNE_PIN) and low <= _numbers(torchao) < below:
        return None
    return (
        f"torchtune-rocm needs torchtune=={TORCHTUNE_PIN} and torchao>={TORCHAO_PIN[0]},<{TORCHAO_PIN[1]}; "
        f"found torchtune {torchtune}, torchao {torchao}. "
        f'Fix: pip install "torchtune=={TORCHTUNE_PIN}" "torchao=={TORCHAO_PIN[0]}.0"'
    )


def _is_tune() -> bool:
    # sys.argv[0] is "-m" while `python -m torchtune._cli.tune` is still importing torchtune
    names = [*sys.argv[:1], *getattr(sys, "orig_argv", [])[1:3]]
    return any(name.replace("\\", "/").rsplit("/", 1)[-1] in _TUNE for name in names)


_TUNE = ("tune", "tune.exe", "tune-script.py", "torchtune._cli.tune")


def _names_us(argv: list[str]) -> bool:
    # `tune ls` fails in torchtune itself if the pair is broken; other people's recipes are not our business
    return len(argv) < 3 or any(name in argv for name in (*RECIPES, *_config_names()))


def _numbers(version: str) -> tuple[int, ...]:
    head = version.split("+")[0].split(".")
    return tuple(int(part) for part in head if part.isascii() and part.isdigit())


def _folder(name: str):
    from importlib.resources import files

    return files(f"rocm_ext.{name}")


def _config_names() -> list[str]:
    return sorted(entry.name[:-5] for entry in _folder("recipe_configs").iterdir() if entry.name.endswith(".yaml"))


def _recipe_of(config: str) -> str:
    return "raft_rocm" if "raft" in config.split("_") else "lora_finetune_rocm"


def _add_recipes() -> None:
    from torchtune._recipe_registry import _ALL_RECIPES, Config, Recipe

    for name in RECIPES:
        configs = [
            # torchtune joins these to its own folder, and joining an absolute path yields that path
            Config(name=config, file_path=str(_folder("recipe_configs") / f"{config}.yaml"))
            for config in _config_names()
            if _recipe_of(config) == name
        ]
        path = str(_folder("recipes") / f"{name}.py")
        _ALL_RECIPES.append(Recipe(name=name, file_path=path, configs=configs, supports_distributed=True))
