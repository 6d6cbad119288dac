"""``rocm-ext supervise``: keep a run going for days without anybody.

    rocm-ext supervise [options] -- tune run lora_finetune_rocm --config NAME [key=value ...]

Starts the run, or continues the one in its output_dir. A run that dies or hangs begins again from its last checkpoint,
after a pause that grows. The same command continues after a reboot. Ctrl-C saves and ends everything; a second one
kills. A user's error, and three deaths without progress, end it: the last line says why.

With --between the run saves and stops at the end of the hours, and goes on when they begin again. With --beside, a
server of models is stopped meanwhile, and started again whatever happens.

--notify runs a shell command with the variables SUPERVISE_EVENT (finished, paused, restarting or failed), SUPERVISE_RUN
(the output_dir), SUPERVISE_WHY, SUPERVISE_STEP and SUPERVISE_LOG (the last lines that the run printed).
"""

import os
import re
import signal
import sys
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.heartbeat import RETRY
from rocm_ext.base.log import duration
from rocm_ext.base.process import handled, stop_signals
from rocm_ext.cli._common import count, number, options, refuse_first
from rocm_ext.runs.progress import position
from rocm_ext.supervise.attempt import LOG, PATIENCE, SLOWER, Attempt, Ending, alone
from rocm_ext.supervise.messages import Messenger, say
from rocm_ext.supervise.server import ADAPTER, Server
from rocm_ext.supervise.window import Hours, Stop, Window

_LONGEST_PAUSE = 1800.0  # seconds


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    limit = f"{PATIENCE:g} s, or {SLOWER} of its slowest recent steps"
    option(
        "--hung-after S",
        f"end a run that is silent for longer (default: {limit})",
        number(float, 1, 10**7),
    )
    option("--deaths N", "give up after so many without progress (default: 3)", count, 3)
    pause = "seconds before a restart; the next pause is 4 times as long (default: 30)"
    option("--pause S", pause, number(float, 0, 10**7), 30.0)
    option("--evaluate-apart", "evaluate in separate processes, between training processes")
    option(
        "--between HOURS", "hours of the day in which the run goes on, such as 23:00-07:00", _hours
    )
    option("--hours N", "save and end after so many hours", number(float, 0.001, 10**5))
    option(
        "--beside UNIT", "systemd unit of a server to stop meanwhile, such as llama-server.service"
    )
    option("--beside-stop COMMAND", "instead of --beside: shell command that stops the server")
    option(
        "--beside-start COMMAND",
        f"shell command that starts it; {ADAPTER} is the run's newest adapter",
    )
    cool = "pause between micro-batches at so many °C, until it is 4 °C less (pause_at_celsius)"
    option("--cool CELSIUS", cool, number(float, 40, 120))
    option(
        "--notify COMMAND",
        "shell command to run at the end, at a pause and on trouble, to send a message, say",
    )
    words = "the run, as you would start it"
    parser.add_argument("command", nargs=REMAINDER, metavar="-- tune run ...", help=words)


def _hours(text: str) -> Hours:
    try:
        return Hours.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def run(args: Namespace) -> int:
    """Start the run again and again until it is done, and return the exit code.

    Raises:
        UserError: the command is no run, another process supervises it, a restart cannot mend its error, it died too
            often, or the server beside it does not stop.
    """
    command, out = _command(args.command)
    if args.cool is not None:
        command.append(f"pause_at_celsius={args.cool:g}")
    keeper = _Keeper(args, command, out)
    with alone(out), handled(keeper.stop.note, signal.SIGINT, *stop_signals()):
        return keeper.keep()


class _Keeper:
    """Keeps the run in ``out`` going.

    Attributes:
        stop: the signals to stop that came.
    """

    def __init__(self, args: Namespace, command: list[str], out: Path) -> None:
        self._args, self._command, self._out = args, command, out
        self.stop = Stop()
        self._window = Window(args.between, args.hours)
        self._messenger = Messenger(out, args.notify)
        self._server = _server(args)
        self._deaths = 0
        self._furthest = position(out)
        self._printed: list[str] = []  # the last lines of the last attempt

    def keep(self) -> int:
        """Keep the run going until it is done or its hours are over; return the exit code.

        Raises:
            UserError: it cannot go on.
        """
        try:
            return self._nights()
        except UserError as error:
            self._messenger.tell("failed", str(error), self._printed)
            raise

    def _nights(self) -> int:
        while True:
            self._wait()
            self._window.begin()
            away: AbstractContextManager[None] = nullcontext()
            if self._server is not None and not self.stop.signum:
                away = self._server.away(self._out, self._messenger, self.stop, self._window)
            with away:
                ending = self._attempts()
            if ending is not None and ending.complete:
                return 0
            if self.stop.signum:
                return self.stop.code
            where = "the run did not go on"
            if ending is not None and (ending.saved or ending.segment):
                where = f"the run is saved {ending.saved or ending.segment}"
            elif ending is not None:
                where = f"the run ended without saving: {ending.why}"
            if self._window.is_over:
                self._messenger.tell("paused", f"{where}; the same command goes on", self._printed)
                return 0
            later = f"{where}; it goes on at {self._window.opens}"
            self._messenger.tell("paused", later, self._printed)

    def _wait(self) -> None:
        """Wait until the run may go on."""
        if self._window.is_open:
            return
        if self._server is not None:
            self._server.recover(self._messenger)
        say(f"the run begins at {self._window.opens}")
        self.stop.wait_open(self._window)

    def _attempts(self) -> Ending | None:
        """Attempt the run until it is done, the window closes or a signal comes; return how the last attempt ended.

        Raises:
            UserError: starting it again does not help.
        """
        ending = None
        while self._window.is_open and not self.stop.signum:
            attempt = Attempt(self._out, self._args.hung_after, self._args.evaluate_apart)
            try:
                ending = attempt.run(self._command, self.stop, self._window)
            finally:
                self._printed = attempt.lines
            if ending.complete:
                self._messenger.tell("finished", "the run is done", self._printed)
                break
            if self.stop.signum:
                break
            if ending.segment:
                say(f"the run stopped {ending.segment}; another process goes on")
            elif ending.code != RETRY or self._window.is_open:
                self.stop.wait(self._pause_after(ending), self._window)
        return ending

    def _pause_after(self, ending: Ending) -> float:
        """Report that the run died; return the seconds until the next attempt.

        Raises:
            UserError: another attempt does not help, or too many have failed.
        """
        reached = position(self._out)
        self._deaths = 1 if reached > self._furthest else self._deaths + 1
        self._furthest = max(reached, self._furthest)
        why = f"at step {reached[1]:g}: {ending.why}"
        if ending.code != RETRY:
            raise UserError(f"the run ended {why}. Starting it again does not help", ending.code)
        if self._deaths >= self._args.deaths:
            times = f"the run died {self._deaths} times without progress"
            raise UserError(f"{times}, {why}. {self._out / LOG} has its output")
        growth = 4.0 ** min(self._deaths - 1, 20)
        pause = min(self._args.pause * growth, _LONGEST_PAUSE)
        next_start = f"it died {why}; the next start is in {duration(pause)}"
        self._messenger.tell("restarting", next_start, self._printed)
        return pause


def _server(args: Namespace) -> Server | None:
    """The server that the options name; a UserError if they contradict each other."""
    commands = [args.beside_stop, args.beside_start]
    refuse_first(
        (args.between and args.hours, "--between is for every day and --hours for now; name one"),
        (args.beside and any(commands), "name a unit with --beside, or two commands, not both"),
        (any(commands) and not all(commands), "--beside-stop and --beside-start need each other"),
    )
    if args.beside:
        server = Server.of_unit(args.beside)
    elif all(commands):
        server = Server.of_commands(*commands)
    else:
        return None
    server.check()
    return server


def _command(words: list[str]) -> tuple[list[str], Path]:
    """Return the command that continues the run, and its output folder.

    Raises:
        UserError: the system is not Linux, the words start no recipe, or the config cannot be read.
    """
    refuse_first((sys.platform != "linux", "supervise needs Linux; on Windows use WSL2"))
    if words[:1] == ["--"]:
        words = words[1:]
    table = registry.recipes()
    named = [word for word in words if word in table or registry.is_recipe_file(word)]
    if not named:
        raise UserError(
            "name the run after --, such as -- tune run lora_finetune_rocm --config my_run.yaml",
            code=2,
        )
    first = named[0]
    recipe = table.get(first) or registry.read_recipe(Path(first))
    at = words.index(first)
    name, overrides = config.command_line(words[at + 1 :])
    machines = re.search(r"--nnodes[ =](\d+)(?::(\d+))?", " ".join(words[:at]))
    several = machines is not None and any(int(number) > 1 for number in machines.groups("0"))
    anew = any(item.replace(" ", "").lower() == "overwrite_output_dir=true" for item in overrides)
    refuse_first(
        (several, "supervise watches a run on one machine; drop --nnodes"),
        (anew, "supervise continues the run in output_dir; drop overwrite_output_dir=True"),
    )
    defaults = config.defaults(recipe)
    content = config.layers.read(config.find(name))
    try:
        given = OmegaConf.from_dotlist([item for item in overrides if "=" in item])
        out = str(OmegaConf.merge(defaults, content, given).output_dir)
    except (
        OmegaConfBaseException,
        TypeError,
        ValueError,
        yaml.YAMLError,
    ) as error:  # OmegaConf raises them, too
        raise UserError(f"config {name}: {one_line(error)}") from error
    program = words[0]
    if program == "tune":
        beside = Path(sys.executable).with_name(
            "tune"
        )  # this environment's; another one may be active
        program = str(beside) if beside.exists() else program
    command = [program, *words[1:], "resume_from_checkpoint=True"]
    return command, Path(os.path.expanduser(out))
