"""Whatever is left of a torn log, what is read back is what was written first, and the journal goes on from there."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.journal.reader import history, replay
from penstock.journal.writer import Journal
from penstock.records.ids import PipelineName, RunId
from profiles import examples

A = PipelineName("a")
RUN = RunId("run-1")


def write_slowly(path: Path, events: int) -> None:
    """One commit per event, and nothing moved out of the log yet."""
    journal = Journal(path, RUN, flush_every_s=3600)
    for number in range(events):
        seq = journal.append(A, float(number), b"event %d " % number + bytes(number % 700))
        while journal._committed_seq < seq:
            pass
    for file in (path, path.with_name(f"{path.name}-wal")):
        shutil.copy(file, file.with_name(f"torn-{file.name}"))
    journal.close(10)


class Torn:
    """A journal with a log, as a killed machine would leave it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-torn-"))
        source = self.folder / "source.sqlite"
        write_slowly(source, 60)
        self.database = (self.folder / "torn-source.sqlite").read_bytes()
        self.log = (self.folder / "torn-source.sqlite-wal").read_bytes()
        self.expected = [entry.body for entry in history(source)]

    def restored(self, log: bytes) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        (folder / "journal.sqlite").write_bytes(self.database)
        (folder / "journal.sqlite-wal").write_bytes(log)
        return folder / "journal.sqlite"


@pytest.fixture(scope="module")
def torn() -> Iterator[Torn]:
    torn = Torn()
    yield torn
    shutil.rmtree(torn.folder)


@settings(max_examples=examples(60), deadline=None)
@given(share=st.floats(0, 1), junk=st.binary(max_size=64))
def test_a_log_cut_anywhere_gives_back_a_prefix(torn: Torn, share: float, junk: bytes) -> None:
    keep = int(share * len(torn.log))
    path = torn.restored(torn.log[:keep] + junk)
    journal = Journal(path, RUN)
    found = [entry.body for entry in history(path)]
    assert found == torn.expected[: len(found)]
    assert journal.last_seq == len(found)
    journal.append(A, 99.0, b"life goes on")
    journal.close(10)
    assert [entry.body for entry in history(path)] == [*found, b"life goes on"]
    shutil.rmtree(path.parent)


def test_the_uncut_log_gives_back_everything(torn: Torn) -> None:
    path = torn.restored(torn.log)
    journal = Journal(path, RUN)
    journal.close(10)
    assert [entry.body for entry in history(path)] == torn.expected
    assert len(torn.expected) == 60


class JournalMachine(RuleBasedStateMachine):
    """Appending, snapshots, and reopening in any order, against a list."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-journal-"))
        self.path = self.folder / "journal.sqlite"
        self.journal = Journal(self.path, RUN)
        self.model: list[bytes] = []
        self.snapshot_at = 0

    @rule(bodies=st.lists(st.binary(max_size=40), max_size=20))
    def append(self, bodies: list[bytes]) -> None:
        for body in bodies:
            self.model.append(body)
            assert self.journal.append(A, float(len(self.model)), body) == len(self.model)

    @rule()
    @precondition(lambda self: self.model)
    def snapshot(self) -> None:
        self.snapshot_at = len(self.model)
        self.journal.snapshot({A: b"state %d" % self.snapshot_at})

    @rule()
    def reopen(self) -> None:
        self.journal.close(10)
        found = replay(self.path)
        assert found.seq == self.snapshot_at
        assert found.states == ({A: b"state %d" % self.snapshot_at} if self.snapshot_at else {})
        assert [entry.body for entry in found.entries] == self.model[self.snapshot_at :]
        assert [entry.body for entry in history(self.path)] == self.model
        self.journal = Journal(self.path, RUN)

    @invariant()
    def numbers_are_dense(self) -> None:
        assert self.journal.last_seq == len(self.model)

    def teardown(self) -> None:
        self.reopen()
        self.journal.close(10)
        shutil.rmtree(self.folder)


JournalMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=20, deadline=None)
TestJournal = JournalMachine.TestCase
