"""Processes and what they write: identity, trees, parents, metrics, logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.metrics import JsonLines
from penstock.runtime.process import host_id, is_alive, kill_tree, start_time


def eventually(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


TREE = """
    import os, signal, subprocess, sys, time
    depth = int(sys.argv[1])
    if sys.argv[2] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if depth:
        subprocess.Popen([sys.executable, "-c", os.environ["TREE"], str(depth - 1), sys.argv[2]])
    print(os.getpid(), flush=True)
    time.sleep(120)
"""


@pytest.fixture(params=["obedient", "stubborn"])
def tree(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    program = textwrap.dedent(TREE)
    command = [sys.executable, "-c", program, "2", request.param]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TREE": program}) as root:
        assert root.stdout is not None
        yield root, [int(root.stdout.readline()) for _ in range(3)]


def test_a_whole_tree_is_ended(tree: tuple[subprocess.Popen[str], list[int]]) -> None:
    root, pids = tree
    assert all(is_alive(pid) for pid in pids)
    assert kill_tree(root.pid, 4.0) == []
    assert not any(is_alive(pid) for pid in pids)
    assert root.wait(20) in (-signal.SIGTERM, -signal.SIGKILL)  # the exit code was left for its parent


def test_ending_what_is_not_there() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(20)
    assert kill_tree(gone.pid, 1.0) == []


def test_a_pid_and_its_start_time_name_one_process() -> None:
    mine = start_time(os.getpid())
    assert mine is not None
    assert start_time(os.getpid()) == mine
    assert is_alive(os.getpid(), mine)
    assert not is_alive(os.getpid(), mine + 1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        began = start_time(child.pid)
        assert began is not None
        assert began >= mine
    assert start_time(child.pid) is None
    assert not is_alive(child.pid, began)


def test_host_id_is_stable_and_says_something() -> None:
    assert host_id() == host_id()
    assert len(host_id()) > 8


CHILD = """
    import os, time
    from penstock.runtime.parent import die_with_parent
    die_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(120)
"""
PARENT = "import os, subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(120)"


def test_a_child_dies_with_a_parent_that_was_killed() -> None:
    command = [sys.executable, "-c", PARENT, textwrap.dedent(CHILD)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
        parent.wait(20)
        eventually(lambda: not is_alive(child))


def test_a_parent_that_died_before_the_call_is_noticed() -> None:
    program = "from penstock.runtime.parent import die_with_parent; die_with_parent(1 << 22); print('survived')"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == b""


# -- metrics ------------------------------------------------------------------------------------------------------


def test_json_lines_are_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "metrics.jsonl"
    lines = JsonLines(path)
    for number in range(1000):
        lines.write({"number": number, "odd": Path("a path")})
    assert lines.close(20)
    read = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["number"] for record in read] == list(range(1000))
    assert lines.dropped == 0


def test_a_disk_that_refuses_costs_records_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    lines = JsonLines(path)
    lines.write({"a": 1})
    eventually(lambda: lines.dropped == 1)
    lines.write({"a": 2})
    eventually(lambda: lines.dropped == 2)
    assert len([record for record in caplog.records if "cannot write" in record.getMessage()]) == 1
    path.rmdir()
    lines.write({"a": 3})
    assert lines.close(20)
    assert path.read_text() == '{"a":3}\n'


def test_logs_go_to_the_file_and_warnings_to_standard_error(tmp_path: Path) -> None:
    program = """
        import logging, sys, warnings
        from penstock.runtime.logs import configure
        configure("worker-0", sys.argv[1], "INFO")
        configure("worker-0", sys.argv[1], "INFO")
        logging.getLogger("penstock.test").info("quiet")
        logging.getLogger("penstock.test").warning("loud")
        logging.getLogger("penstock.test").debug("silent")
        warnings.warn("deprecated thing")
    """
    path = tmp_path / "logs" / "worker-0.log"
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    written = path.read_text()
    assert written.count("quiet") == written.count("loud") == 1
    assert "worker-0 penstock.test: quiet" in written
    assert "deprecated thing" in written
    assert "silent" not in written
    assert "loud" in ended.stderr
    assert "quiet" not in ended.stderr


def test_sigusr1_writes_every_stack_to_the_log(tmp_path: Path) -> None:
    program = """
        import sys, time
        from penstock.runtime.logs import configure
        configure("worker-0", sys.argv[1])
        def a_place_to_hang():
            print("ready", flush=True)
            time.sleep(60)
        a_place_to_hang()
    """
    path = tmp_path / "worker-0.log"
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), path], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGUSR1)
        eventually(lambda: "a_place_to_hang" in path.read_text())
        process.kill()
