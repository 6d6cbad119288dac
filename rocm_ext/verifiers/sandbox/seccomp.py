"""The system calls that sandboxed code may not make, as a classic BPF program for x86-64.

This deny list is defence in depth behind the namespaces. It closes ways to memory that no limit counts (shared memory
segments, memfd, a tmpfs mounted in a nested user namespace), and parts of the kernel with a history of security
holes.
"""

import platform
import struct

DENIED = {  # x86-64 numbers
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "mount_setattr": 442,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "kexec_load": 246,
    "init_module": 175, "finit_module": 313, "open_by_handle_at": 304, "name_to_handle_at": 303,
    "add_key": 248, "request_key": 249, "keyctl": 250,
    "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "memfd_create": 319, "memfd_secret": 447,
}  # fmt: skip
CLONE, CLONE3, NEWUSER = 56, 435, 0x10000000
AUDIT_ARCH_X86_64, X32 = 0xC000003E, 0x40000000
EPERM, ENOSYS = 1, 38
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF opcodes


def program() -> bytes | None:
    """``struct sock_filter[]`` for ``bwrap --seccomp``; None if the machine is not x86-64."""
    if platform.machine() != "x86_64":
        return None

    def op(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, true, false, value)

    number, arch, first_argument = 0, 4, 16  # offsets in struct seccomp_data
    body = [
        op(LOAD, arch),
        op(EQUAL, AUDIT_ARCH_X86_64, true=1),
        op(RETURN, KILL),
        op(LOAD, number),
        op(AT_LEAST, X32, false=1),
        op(RETURN, KILL),
        # glibc falls back to clone, whose flags a filter can see; clone3 passes them behind a pointer
        op(EQUAL, CLONE3, false=1),
        op(RETURN, ERRNO | ENOSYS),
    ]
    for denied in DENIED.values():
        body += [op(EQUAL, denied, false=1), op(RETURN, ERRNO | EPERM)]
    body += [
        op(EQUAL, CLONE, false=3),
        op(LOAD, first_argument),
        op(ANY_BIT, NEWUSER, false=1),
        op(RETURN, ERRNO | EPERM),
        op(RETURN, ALLOW),
    ]
    return b"".join(body)
