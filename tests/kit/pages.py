"""Counts the pages of a file that the system caches."""

import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest


def pages_in_memory(path: Path) -> int:
    """Count the pages of a file that the system has cached; skips the test where they cannot be counted or dropped."""
    if sys.platform != "linux":
        pytest.skip("counts pages with Linux's mincore")
    probe = path.with_name("probe_of_pages")
    probe.write_bytes(b"x" * mmap.PAGESIZE)
    descriptor = os.open(probe, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    kept = _count(probe)
    probe.unlink()
    if kept:
        pytest.skip("this file system keeps its files in memory")
    return _count(path)


def _count(path: Path) -> int:
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as view:
        address = ctypes.addressof(held := ctypes.c_char.from_buffer(view))
        assert (
            ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), vector) == 0
        )
        del held
    return sum(byte & 1 for byte in vector)
