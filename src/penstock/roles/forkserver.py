"""Imports torch and the rest once, then forks the processes of a run on request.

The first JSON message on its socket contains the modules to import beside torch, and the log file. Every later one
requests a process, with its modules, arguments, environment and log; the answer is the pid. Every process is forked
twice, so that it becomes a child of the supervisor, which is a subreaper meanwhile: it dies with the supervisor and is
reaped by it, like a process that it starts directly. This process has one thread and never uses a GPU: neither threads
nor GPU contexts survive a fork.

    python -m penstock.roles.forkserver SOCKET_FD PARENT_PID PADDING
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.roles.quick_imports import import_all
from penstock.runtime.parent import MEMBER_VARIABLE, die_with_parent
from penstock.runtime.run_token import handed_over

MAX_BYTES = 1 << 20
ADOPTED_WITHIN_S = 10.0


def main() -> int:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    gc.disable()  # collections take a fifth of the imports' time and free almost nothing
    _import(["torch"])
    with socket.socket(fileno=descriptor) as requests:
        order = requests.recv(MAX_BYTES)
        if not order:
            return 0
        setup = json.loads(order)
        _send_output_to(setup["log"])
        _import(setup["modules"])
        requests.send(json.dumps({"threads": len(os.listdir("/proc/self/task"))}).encode())
        while body := requests.recv(MAX_BYTES):
            request = json.loads(body)
            _import(request["modules"])
            pid = _fork_twice(request, parent, requests)
            requests.send(json.dumps({"pid": pid}).encode())
    return 0


def _import(names: Sequence[str]) -> None:
    import_all(names)
    gc.freeze()  # else the first collection of every child would copy all pages


def _send_output_to(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)


def _fork_twice(request: Mapping[str, Any], parent: int, requests: socket.socket) -> int:
    """The pid of the process that runs the role, by then a child of the supervisor."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.close(writer)
            requests.close()
            os._exit(_run(request, parent))
        os.write(writer, str(child).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        pid = int(answer.read())
    os.waitpid(between, 0)
    return pid


def _run(request: Mapping[str, Any], parent: int) -> int:
    """In the new process: sets up everything that a new interpreter would have, then runs the role."""
    deadline = time.monotonic() + ADOPTED_WITHIN_S
    while os.getppid() != parent:  # the process in between has not ended yet
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.001)
    die_with_parent(parent)
    os.setsid()
    _send_output_to(request["log"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = request["path"]
    arguments = request["arguments"]
    _show_as(arguments)
    _show_member(request["environment"][MEMBER_VARIABLE])
    gc.enable()
    from penstock.roles import __main__ as entry

    with handed_over(request["token"]) as reader:
        token = os.dup(reader)  # the role closes it
    sys.argv = ["penstock.roles", *arguments[arguments.index("penstock.roles") + 1 :], "--token-fd", str(token)]
    return entry.finished(entry.main())


def _show_as(arguments: Sequence[str]) -> None:
    """Makes these the arguments that `ps` shows, which name the process."""
    status = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(status[45]), int(status[46])  # of the arguments in memory
    text = b"\0".join(argument.encode() for argument in arguments)
    if 0 < start < end and len(text) < end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _show_member(member: str) -> None:
    """Makes this the member in the environment that the kernel shows of this process, and of all that it forks: it
    shows the memory of the environment at the start of the program."""
    status = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(status[47]), int(status[48])  # of that memory
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        if entry.startswith(f"{MEMBER_VARIABLE}=".encode()):
            text = f"{MEMBER_VARIABLE}={member}\0PENSTOCK_PADDING=".encode()
            if len(text) <= len(entry):
                ctypes.memmove(start, text.ljust(len(entry), b"x"), len(entry))
            return
        start += len(entry) + 1


if __name__ == "__main__":
    os._exit(main())
