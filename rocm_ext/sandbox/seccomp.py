"""The system calls that sandboxed code may not make, as a classic BPF program for x86-64 and AArch64.

This deny list is defence in depth behind the namespaces. It closes ways to memory that no limit counts (shared memory
segments and maps, memfd, pages given to a pipe or a socket, larger buffers, queues of file events, extended attributes,
a tmpfs mounted in a nested user namespace), sockets that no network namespace contains (AF_VSOCK reaches the host of a
virtual machine), and parts of the kernel with a history of security holes.
"""

import functools
import platform
import struct
from dataclasses import dataclass

EPERM, EINVAL, EMFILE, ENOSYS, EPROTONOSUPPORT, EOPNOTSUPP, EAFNOSUPPORT = 1, 22, 24, 38, 93, 95, 97
# error, which programs expect of the call: name: numbers on x86-64 and on AArch64
REFUSED = {
    EPERM: {
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
        "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
        "setns": (308, 268), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
        "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
        "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
        "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
        "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
        "memfd_create": (319, 279), "vmsplice": (278, 75),
    },
    # extended attributes on a tmpfs are memory that its size does not limit; programs know file systems without them
    EOPNOTSUPP: {"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    # a byte of a page in a socket keeps the page and counts as a byte; programs then copy
    EINVAL: {"splice": (275, 76), "tee": (276, 77), "sendfile": (40, 71)},
    EMFILE: {"inotify_init": (253, 26), "inotify_init1": (294, 26)},  # queues of 8 MB each; programs then poll
}  # fmt: skip
# Calls from Linux 5.1 on have one number on all machines. Programs run without them, and nobody has searched them for
# memory, except for pidfd_open, close_range, openat2, faccessat2 and epoll_pwait2. For clone3, whose flags no filter
# sees, glibc falls back to clone.
NEW, ALLOWED_NEW = 425, (434, 436, 437, 439, 441)
CLONE, NEWUSER = (56, 220), 0x10000000
# MADV_DONTNEED takes a page of a shared map without a file out of every process's resident memory, and the map keeps it
MMAP, SHARED, ANONYMOUS = (9, 222), 0x01, 0x20
SOCKETS = ((41, 53), (198, 199))  # socket and socketpair, by machine
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: the network namespace contains them
PROTOCOLS = 18  # from here on: MPTCP, SCTP and others, whose buffers nothing shows
SETSOCKOPT, SOL_SOCKET, SO_SNDBUF, SO_RCVBUF = (54, 208), 1, 7, 8
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF opcodes
# offsets in struct seccomp_data on a little-endian machine
NUMBER, ARCH = 0, 4
FIRST_ARGUMENT, SECOND_ARGUMENT, THIRD_ARGUMENT, FOURTH_ARGUMENT = 16, 24, 32, 40


@dataclass(frozen=True)
class CallNumbers:
    """A machine's system calls.

    Attributes:
        column: index of its numbers in the tables.
        arch: ``AUDIT_ARCH_*``, which the kernel reports for native system calls.
        foreign: the first number of another ABI; 0 without another ABI.
    """

    column: int
    arch: int
    foreign: int = 0


MACHINES = {"x86_64": CallNumbers(0, 0xC000003E, 0x40000000), "aarch64": CallNumbers(1, 0xC00000B7)}


def missing() -> str:
    """A note that this machine has no filter; empty if it has one."""
    machine = platform.machine()
    if machine in MACHINES:
        return ""
    return f"without a filter of system calls, which {machine} does not have"


@functools.cache
def program(machine: str | None = None) -> bytes | None:
    """``struct sock_filter[]`` for ``bwrap --seccomp``; None if the machine, by its ``uname -m``, has no filter."""
    abi = MACHINES.get(machine or platform.machine())
    if abi is None:
        return None

    def op(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, true, false, value)

    column = abi.column
    body = [
        op(LOAD, ARCH),
        op(EQUAL, abi.arch, true=1),
        op(RETURN, KILL),
        op(LOAD, NUMBER),
    ]
    if abi.foreign:
        body += [op(AT_LEAST, abi.foreign, false=1), op(RETURN, KILL)]
    count = len(ALLOWED_NEW)
    body.append(op(AT_LEAST, NEW, false=count + 1))
    for i, number in enumerate(ALLOWED_NEW):
        body.append(op(EQUAL, number, true=count - i))
    body.append(op(RETURN, ERRNO | ENOSYS))
    for error, calls in REFUSED.items():
        for numbers in calls.values():
            body.append(op(EQUAL, numbers[column], false=1))
            body.append(op(RETURN, ERRNO | error))
    allowed = []
    for family in FAMILIES:
        allowed += [op(EQUAL, family, false=1), op(RETURN, ALLOW)]
    one, other = SOCKETS[column]
    body += [
        op(EQUAL, one, true=1),
        op(EQUAL, other, false=len(allowed) + 5),
        op(LOAD, THIRD_ARGUMENT),
        op(AT_LEAST, PROTOCOLS, false=1),
        op(RETURN, ERRNO | EPROTONOSUPPORT),
        op(LOAD, FIRST_ARGUMENT),
        *allowed,
        op(RETURN, ERRNO | EAFNOSUPPORT),
    ]
    # a socket keeps its default buffers: the call succeeds and does nothing
    body += [
        op(EQUAL, SETSOCKOPT[column], false=7),
        op(LOAD, SECOND_ARGUMENT),
        op(EQUAL, SOL_SOCKET, false=4),
        op(LOAD, THIRD_ARGUMENT),
        op(EQUAL, SO_SNDBUF, true=1),
        op(EQUAL, SO_RCVBUF, false=1),
        op(RETURN, ERRNO),
        op(RETURN, ALLOW),
    ]
    for numbers, argument, flags in (
        (MMAP, FOURTH_ARGUMENT, (SHARED, ANONYMOUS)),
        (CLONE, FIRST_ARGUMENT, (NEWUSER,)),
    ):
        count = len(flags)
        body.append(op(EQUAL, numbers[column], false=count + 3))
        body.append(op(LOAD, argument))
        for i, flag in enumerate(flags):
            body.append(op(ANY_BIT, flag, false=count - i))
        body += [op(RETURN, ERRNO | EPERM), op(RETURN, ALLOW)]
    body.append(op(RETURN, ALLOW))
    return b"".join(body)
