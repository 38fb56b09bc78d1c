"""Shared memory in huge pages, where the kernel provides them.

Copies into pages of 4 KB take up to twice as long, and the first access of a process up to sixteen times. By default
the kernel uses huge pages for shared memory only where an administrator enabled them. Since Linux 6.1 a process may
also request them for existing pages. A refusal affects only the speed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

HUGE_BYTES = 2 << 20
_PROT_NONE, _MAP_FIXED, _MADV_COLLAPSE = 0, 0x10, 25

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]


def map_shared(fd: int, size_bytes: int) -> np.ndarray:
    """Maps a file for as long as the array is referenced, at an address that allows huge pages.

    That is a multiple of their size, found by first reserving more than is needed.
    """
    reserved = size_bytes + HUGE_BYTES
    base = _mmap(0, reserved, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-base // HUGE_BYTES) * HUGE_BYTES
    try:
        _mmap(start, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _libc.munmap(base, reserved)
        raise
    memory = (ctypes.c_uint8 * size_bytes).from_address(start)
    # Not at interpreter exit: threads may still be reading.
    weakref.finalize(memory, _libc.munmap, base, reserved).atexit = False
    return np.ctypeslib.as_array(memory)


def use_huge_pages(memory: np.ndarray, start: int, end: int) -> bool:
    """Requests huge pages for the existing pages between two offsets; false when the kernel refused some."""
    first, last = start // HUGE_BYTES * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
    return first == last or _libc.madvise(memory.ctypes.data + first, last - first, _MADV_COLLAPSE) == 0


def _mmap(address: int, size_bytes: int, protection: int, flags: int, fd: int) -> int:
    mapped = _libc.mmap(address, size_bytes, protection, flags, fd, 0)
    if mapped == ctypes.c_size_t(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size_bytes} bytes: {os.strerror(error)}")
    return mapped
