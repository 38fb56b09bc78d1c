from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.payload.io.huge_pages import HUGE_BYTES, map_shared, use_huge_pages
from penstock.payload.io.mapping import DIRECTORY

SIZE = 3 * HUGE_BYTES + 4096


@pytest.fixture
def fd() -> Iterator[int]:
    with tempfile.TemporaryFile(dir=DIRECTORY) as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
        yield file.fileno()


def about(address: int) -> dict[str, int]:
    """What the kernel says about the mapping that begins at `address`, in KB; nothing if there is none."""
    found: dict[str, int] = {}
    here = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                here = int(name.partition("-")[0], 16) == address
            elif here and rest.endswith("kB\n"):
                found[name[:-1]] = int(rest.split()[0])
    return found


def test_a_file_is_mapped_whole_and_on_a_boundary_until_its_last_view_is_gone(fd: int) -> None:
    memory = map_shared(fd, SIZE)
    address = memory.ctypes.data
    assert address % HUGE_BYTES == 0
    assert about(address)["Size"] == SIZE // 1024
    memory[-1] = 7
    assert os.pread(fd, 1, SIZE - 1) == b"\x07"
    last = memory.data[-1:]
    del memory
    assert about(address)
    assert last[0] == 7
    del last
    assert not about(address)


def test_huge_pages_hold_what_the_small_ones_held(fd: int) -> None:
    memory = map_shared(fd, SIZE)
    content = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    memory[:] = content
    given = use_huge_pages(memory, HUGE_BYTES // 2, SIZE)
    assert np.array_equal(memory, content)
    assert np.array_equal(map_shared(fd, SIZE), content)
    if not given:
        pytest.skip("this kernel gives no huge pages to shared memory")
    assert about(memory.ctypes.data)["ShmemPmdMapped"] * 1024 == 3 * HUGE_BYTES


def test_less_than_a_huge_page_is_left_as_it_is(fd: int) -> None:
    assert use_huge_pages(map_shared(fd, SIZE), 4096, HUGE_BYTES - 1)


def test_what_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match=f"cannot map {SIZE} bytes"):
        map_shared(-1, SIZE)
