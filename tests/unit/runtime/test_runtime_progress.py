from __future__ import annotations

import os

from penstock.runtime import progress
from penstock.runtime.progress import CELL, MAX_DOING_BYTES, ProgressCell


def test_nothing_before_the_first_move() -> None:
    cell = ProgressCell()
    assert cell.read() is None
    cell.close()


def test_a_reader_through_the_descriptor_sees_what_the_writer_says() -> None:
    cell = ProgressCell()
    reader = ProgressCell(os.dup(cell.fileno()))
    cell.moved("waiting for a lease")
    seen = reader.read()
    assert seen is not None
    assert seen.doing == "waiting for a lease"
    assert 0 <= seen.ago_s < 60
    reader.close()
    cell.close()


def test_a_long_text_is_cut_and_stays_readable() -> None:
    cell = ProgressCell()
    cell.moved("é" * 500)
    seen = cell.read()
    assert seen is not None
    assert len(seen.doing.encode()) <= MAX_DOING_BYTES + 3
    cell.close()


def test_a_writer_that_died_within_a_write_leaves_its_time_but_no_torn_text() -> None:
    cell = ProgressCell()
    cell.moved("whole")
    CELL.pack_into(cell._cell, 0, 7, 123.0, 5, b"torn!", 6)
    seen = cell.read()
    assert seen is not None
    assert seen.doing == ""
    assert seen.ago_s > 0
    cell.close()


def test_progress_is_the_last_move_even_when_the_text_stays_the_same(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    cell = ProgressCell()
    cell.moved("generate")
    now[0] = 105.0
    cell.moved("generate")
    now[0] = 107.0
    seen = cell.read()
    assert seen is not None
    assert seen.ago_s == 2.0
    cell.close()
