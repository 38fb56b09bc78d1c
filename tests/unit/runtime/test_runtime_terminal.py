"""Text for people, and streams that go away."""

import io
import os

import pytest

from penstock.errors import sentence_of
from penstock.runtime.logs import rotate
from penstock.runtime.terminal import Unbreakable, escape_controls


def test_control_characters_are_written_out():
    assert escape_controls("plain, ünïcode, \t and\nlines") == "plain, ünïcode, \t and\nlines"
    assert escape_controls("\x1b[31mred\x07\x9b\r") == "\\x1b[31mred\\x07\\x9b\\r"


def test_a_pipe_that_was_closed_takes_everything():
    reading, writing = os.pipe()
    with open(writing, "w", buffering=1) as pipe:
        stream = Unbreakable(pipe)
        stream.write("heard\n")
        os.close(reading)
        for _ in range(3):
            stream.write("lost\n")
            stream.flush()
        assert stream.lost
    closed = io.StringIO()
    closed.close()
    assert Unbreakable(closed).write("lost") == 4


def test_a_log_that_is_too_large_is_moved_and_its_writer_goes_on(tmp_path):
    log = tmp_path / "worker.log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"a" * 50 + b"b" * 100)
        assert rotate(tmp_path, 200) == []
        assert rotate(tmp_path, 100) == ["worker.log"]
        writer.write(b"c")
        assert log.read_bytes() == b"c"
        assert (tmp_path / "worker.log.1").read_bytes() == b"b" * 100
        writer.write(b"d" * 100)
        rotate(tmp_path, 100)
    assert (tmp_path / "worker.log.1").read_bytes() == b"d" * 100


def test_a_log_elsewhere_is_left_alone(tmp_path):
    other = tmp_path / "other"
    other.write_bytes(b"a" * 100)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.log").symlink_to(other)
    assert rotate(tmp_path / "logs", 10) == []
    assert other.stat().st_size == 100


def test_errors_of_the_system_become_sentences(tmp_path):
    with pytest.raises(OSError) as found:
        (tmp_path / "nowhere" / "file").open()
    assert sentence_of(found.value) == f"{tmp_path}/nowhere/file: No such file or directory"
    assert "ulimit -n" in sentence_of(OSError(24, "Too many open files"))
    assert sentence_of(KeyError("x")) == "KeyError: 'x'"
