"""C, C++, Rust and Go: whether the code compiles, and what the program prints."""

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rocm_ext.base.errors import UserError, require_known
from rocm_ext.base.types import Row
from rocm_ext.sandbox import BOX, Limits, Sandbox
from rocm_ext.verifiers.base import (
    Result,
    Verifier,
    correct,
    error,
    short,
    timeout,
    unparsed,
    wrong,
)
from rocm_ext.verifiers.cases import OutputRule, cases_of, run_cases
from rocm_ext.verifiers.extract import extract_code

MAX_PROGRAM = 64 << 20  # bytes
MAIN = re.compile(r"\bmain\s{0,9}\(")


@dataclass(frozen=True)
class Language:
    """How a language is compiled.

    Attributes:
        file: name of the source file.
        compilers: names of compilers, the preferred one first.
        command: shell command that compiles ``$SRC`` with ``$CC`` into ``out``.
        install: Debian package of the compiler.
        hello: a program that compiles.
    """

    file: str
    compilers: tuple[str, ...]
    command: str
    install: str
    hello: str


LANGUAGES = {
    "c": Language("main.c", ("gcc", "clang"), '"$CC" -O1 -std=c17 -o out "$SRC" -lm', "gcc", "int main(void) {}"),
    "cpp": Language("main.cpp", ("g++", "clang++"), '"$CC" -O1 -std=c++17 -o out "$SRC"', "g++", "int main() {}"),
    "rust": Language("main.rs", ("rustc",), '"$CC" --edition 2021 -C opt-level=1 -o out "$SRC"', "rustc",
                     "fn main() {}"),
    "go": Language("main.go", ("go",), 'GOCACHE=/tmp/cache GOPATH=/tmp/go GO111MODULE=off GOTOOLCHAIN=local '
                   'CGO_ENABLED=0 "$CC" build -o out "$SRC"', "golang-go", "package main\nfunc main() {}"),
}  # fmt: skip
# Arguments with which a compiler prints its folder
ASK_FOLDER = {"rust": ("--print", "sysroot"), "go": ("env", "GOROOT")}


class Compile(Verifier):
    """Whether the completion's code compiles, in the sandbox. A row needs no fields.

    Args:
        language: c (C17), cpp (C++17), rust (2021) or go.
        timeout: seconds of wall time for the compiler.
        memory_mb: memory for the compiler with all its processes.
        sandbox: ``bubblewrap``, or ``rlimits`` for code that you trust; see rocm_ext.sandbox.
    """

    def __init__(
        self,
        language: str,
        timeout: float = 30.0,
        memory_mb: int = 2048,
        sandbox: str = "bubblewrap",
    ) -> None:
        require_known("language", language, LANGUAGES)
        self.language = language
        self.kind = sandbox
        self.compile_limits = Limits(
            seconds=timeout,
            memory_mb=memory_mb,
            processes=64,
            file_mb=64,
            tmp_mb=256,
            output_bytes=MAX_PROGRAM,
        )

    @functools.cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.kind, compiler(self.language)[1])

    def check(self) -> None:
        self._sandbox.check()
        program = self.compiled(LANGUAGES[self.language].hello)
        if isinstance(program, Result):
            said = short(f"{program.verdict}: {program.detail}", 200)
            raise UserError(f"{compiler(self.language)[0]} does not work in the sandbox: {said}")

    def compiled(self, code: str | None) -> bytes | Result:
        """Compile ``code``: the program, or the result if there is no code or it does not compile."""
        if code is None:
            return unparsed(f"no {self.language} code")
        language = LANGUAGES[self.language]
        # stdout carries the program out, since the sandbox cannot write to the host
        script = f'cd "$TMPDIR" && {language.command} >/dev/null && cat out'
        variables = [f"CC={compiler(self.language)[0]}", f"SRC={BOX}/{language.file}"]
        argv = ["/usr/bin/env", *variables, "/bin/sh", "-c", script]
        outcome = self._sandbox.run(argv, {language.file: code}, limits=self.compile_limits)
        if not outcome.started:
            return error(f"the sandbox did not start: {outcome.stderr.decode('utf-8', 'replace')}")
        if outcome.timed_out:
            return timeout(f"still compiling after {self.compile_limits.seconds:g} s")
        if outcome.killed:
            return wrong(f"the compiler {outcome.killed}")
        if outcome.returncode != 0 or not outcome.stdout:
            lines = outcome.stderr.decode("utf-8", "replace").split("\n")
            errors = [line for line in lines if "error" in line]
            return wrong(f"does not compile: {(errors or lines)[0]}")
        return outcome.stdout

    def __call__(self, completion: str, row: Row) -> Result:
        program = self.compiled(extract_code(completion, self.language))
        return program if isinstance(program, Result) else correct("compiles")


class Run(Compile):
    """What the completion's program prints for the row's ``cases``, a list of ``{input, output}``.

    The reward is graded: ``compiles`` for code that compiles; up to ``runs`` for the share of cases in which the
    program ends with status 0; the remainder for the share of cases with the expected output, ignoring trailing white
    space. The verdict is CORRECT if all cases are right.

    Args:
        language, sandbox: as for :class:`Compile`.
        timeout: seconds of wall time for all cases of a row together; longer gives TIMEOUT with reward 0.
        memory_mb: memory for the program.
        compiles, runs: parts of the reward.
        compile_timeout: seconds for the compiler.
        tolerance, checker: the rule for right output; see :class:`rocm_ext.verifiers.cases.OutputRule`.
    """

    needs = ("cases",)

    def __init__(
        self,
        language: str,
        timeout: float = 10.0,
        memory_mb: int = 512,
        compiles: float = 0.2,
        runs: float = 0.3,
        compile_timeout: float = 30.0,
        sandbox: str = "bubblewrap",
        tolerance: float | None = None,
        checker: str | None = None,
    ) -> None:
        super().__init__(language, compile_timeout, sandbox=sandbox)
        self.comparison = OutputRule(tolerance, checker, sandbox)
        if not (compiles >= 0 and runs >= 0 and compiles + runs < 1):
            raise UserError(
                f"Run needs compiles, runs >= 0 and a sum below 1, found {compiles} and {runs}"
            )
        self.limits = Limits(seconds=timeout, memory_mb=memory_mb)
        self.compiles = compiles
        self.runs = runs

    def check_row(self, row: Row) -> None:
        cases_of(row)
        self.comparison.check_row(row)

    def __call__(self, completion: str, row: Row) -> Result:
        program = self.compiled(extract_code(completion, self.language, MAIN.search))
        if isinstance(program, Result):
            return program
        box = Sandbox(self.kind)
        argv = [f"{BOX}/program"]
        files = {"program": program}
        results = run_cases(box, argv, files, row, self.limits, True, self.comparison)
        if isinstance(results, Result):
            return results
        rest = 1 - self.compiles - self.runs
        earned = (self.runs * results.ran + rest * results.right) / results.total
        return results.result(self.compiles + earned)


@functools.cache
def compiler(language: str) -> tuple[str, tuple[str, ...]]:
    """The path of a language's compiler, and the folders outside /usr that the sandbox must show it."""
    names = LANGUAGES[language].compilers
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        install = LANGUAGES[language].install
        raise UserError(
            f"language {language}: no compiler ({' or '.join(names)}) is in PATH: `apt install {install}`"
        )
    if language not in ASK_FOLDER:
        real = Path(path).resolve()
        return path, () if real.is_relative_to("/usr") else (str(real.parent.parent),)
    ask = [path, *ASK_FOLDER[language]]
    process = subprocess.run(ask, capture_output=True, text=True, check=False)
    root = process.stdout.strip()
    # rustup's wrapper reads the home, which the sandbox hides
    inside = os.path.join(root, "bin", names[0])
    if not (root and os.path.exists(inside)):
        raise UserError(
            f"language {language}: {path} does not run; `{' '.join(ask)}` must print its folder"
        )
    return inside, () if root.startswith("/usr/") or root == "/usr" else (root,)
