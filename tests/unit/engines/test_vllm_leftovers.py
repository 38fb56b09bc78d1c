"""What a killed vLLM server leaves behind is attributed to it by name, and removed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engines.vllm.leftovers import DIRECTORY, PREFIX_VARIABLE, homes_in, prefix_of, remove_leftovers
from penstock.runtime.interpreter import python_command

pytestmark = pytest.mark.skipif(not DIRECTORY.is_dir(), reason="this system has no /dev/shm")

SERVER = """
import pickle, time
from multiprocessing import shared_memory
from penstock.engines.vllm.leftovers import name_shared_memory
name_shared_memory()
made = shared_memory.SharedMemory(create=True, size=64)
again = pickle.loads(pickle.dumps(made))
print(made.name, again.name, flush=True)
time.sleep(600)
"""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "engines" / "letters" / "letters.rollout.0"
    home.mkdir(parents=True)
    yield home
    remove_leftovers([home])


def test_memory_of_a_killed_server_is_removed_and_no_other(home: Path):
    environment = os.environ | {PREFIX_VARIABLE: prefix_of(home)}
    command = python_command("-c", SERVER)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        assert server.stdout is not None
        name, again = server.stdout.readline().split()
        os.killpg(server.pid, signal.SIGKILL)  # with the process of Python that would have removed it
    assert name == again
    assert (DIRECTORY / name).exists()
    other = DIRECTORY / f"psm_test_{os.getpid()}"
    other.touch()
    try:
        assert remove_leftovers([home.with_name("letters.rollout.1")]) == []
        assert remove_leftovers(homes_in(home.parents[2])) == [name]
        assert not (DIRECTORY / name).exists()
        assert other.exists()
    finally:
        other.unlink()


def test_a_linked_home_is_left_alone(tmp_path: Path, home: Path):
    (tmp_path / "stranger" / "engines").mkdir(parents=True)
    (tmp_path / "stranger" / "engines" / "letters").symlink_to(home.parent)
    assert homes_in(tmp_path) == [home]
    assert homes_in(tmp_path / "stranger") == []


def test_sockets_are_removed_and_files_stay(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(home)  # the path of a socket is limited
    (home / "versions").write_text("")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("3c2f")
    assert remove_leftovers([home]) == ["3c2f"]
    assert [path.name for path in home.iterdir()] == ["versions"]
