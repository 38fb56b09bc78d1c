"""Files of a directory that a stranger made: no link leads out of it, and no special file blocks its reader."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.runtime.beneath import check_beneath, files_beneath, open_beneath, read_beneath, write_beneath
from penstock.runtime.following import Following
from penstock.runtime.rundir import RunDir, write_atomically


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that is not in the run, with a file that nobody may read or change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.log").write_text("secret\n")
    return folder


@pytest.fixture
def root(tmp_path: Path, outside: Path) -> Path:
    root = tmp_path / "run"
    (root / "plain").mkdir(parents=True)
    (root / "plain" / "a.log").write_text("a\n")
    (root / "plain" / "linked.log").symlink_to(outside / "secret.log")
    (root / "linked").symlink_to(outside)
    return root


LINKS = ["plain/linked.log", "linked/secret.log"]


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("read", [open_beneath, read_beneath, check_beneath])
def test_a_link_is_not_read(read: Callable[[Path, Path], object], name: str, root: Path):
    assert (root / name).read_text() == "secret\n"
    with pytest.raises(OSError, match="links are not followed"):
        read(root, root / name)


@pytest.mark.parametrize("name", ["../outside/secret.log", "..", ".", "/etc/hostname", "a\0b"])
def test_a_path_that_leaves_the_directory_is_not_read(name: str, root: Path):
    with pytest.raises(OSError, match="no file in"):
        read_beneath(root, root / name)


def test_plain_files_are_read_and_listed(root: Path):
    assert read_beneath(root, root / "plain" / "a.log") == b"a\n"
    assert files_beneath(root, "*/*.log") == [root / "plain" / "a.log"]
    check_beneath(root, root / "plain" / "a.log", root / "absent" / "file", root)
    with pytest.raises(FileNotFoundError):
        read_beneath(root, root / "absent" / "file")


def test_a_pipe_is_refused_at_once(root: Path):
    os.mkfifo(root / "pipe")
    with pytest.raises(OSError, match="no plain file"):
        open_beneath(root, root / "pipe")


def test_writing_replaces_a_link_and_never_its_target(root: Path, outside: Path):
    write_beneath(root, root / "plain" / "linked.log", b"new")
    assert not (root / "plain" / "linked.log").is_symlink()
    assert (root / "plain" / "linked.log").read_bytes() == b"new"
    with pytest.raises(OSError, match="links are not followed"):
        write_beneath(root, root / "linked" / "secret.log", b"new")
    assert (outside / "secret.log").read_text() == "secret\n"
    assert [path.name for path in outside.iterdir()] == ["secret.log"]


def test_writing_makes_folders_and_leaves_nothing_else(root: Path):
    write_beneath(root, root / "new" / "inner" / "file", b"text")
    assert [path.name for path in (root / "new" / "inner").iterdir()] == ["file"]
    (root / "new" / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_beneath(root, root / "new" / "folder", b"text")
    assert not list((root / "new").glob(".*"))


def test_a_link_at_the_name_of_the_temporary_file_is_not_written_through(root: Path, outside: Path):
    (root / f".report.html.{os.getpid()}").symlink_to(outside / "secret.log")
    write_atomically(root / "report.html", "text")
    assert (outside / "secret.log").read_text() == "secret\n"


def test_lines_are_followed_in_plain_files_only(root: Path):
    assert Following(root / "plain" / "a.log", root=root).read() == [b"a"]
    for name in LINKS:
        with pytest.raises(OSError, match="links are not followed"):
            Following(root / name, root=root).read()


def test_a_run_directory_is_for_its_owner_only(tmp_path: Path):
    assert RunDir.create(tmp_path / "runs", "r", "", "0").root.stat().st_mode & 0o077 == 0
