"""The limits of a process."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from penstock.runtime.process import MAX_FILES, raise_file_limit


@pytest.fixture
def hard() -> Iterator[int]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limits[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_may_open_as_many_files_as_the_hard_limit_allows(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    raise_file_limit()
    found = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found == (MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES), hard)


def test_a_higher_limit_is_not_lowered(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
