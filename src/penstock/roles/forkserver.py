"""Imports torch and the rest once, then forks the processes of a run on request.

A request is one JSON message on a socket: the arguments, the environment and the log of the process. The answer is its
pid. Every process is forked twice, so that it becomes a child of the supervisor, which is a subreaper meanwhile: it
dies with the supervisor and is reaped by it, like one that was started from nothing. This process has one thread and
never touches a GPU: neither survives a fork.

    python -m penstock.roles.forkserver SOCKET_FD PARENT_PID MODULE...
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.runtime.process import die_with_parent

MOST_BYTES = 1 << 20
ADOPTED_WITHIN_S = 10.0


def main() -> int:
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    modules = sys.argv[3:-1]
    die_with_parent(parent)
    for name in modules:
        with contextlib.suppress(ImportError):  # a process that needs it says what is missing
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection of every child would copy all pages
    with socket.socket(fileno=descriptor) as requests:
        requests.send(json.dumps({"threads": len(os.listdir("/proc/self/task"))}).encode())
        while body := requests.recv(MOST_BYTES):
            pid = _fork_twice(json.loads(body), parent, requests)
            requests.send(json.dumps({"pid": pid}).encode())
    return 0


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
    """In the new process: everything that a fresh interpreter would have found, then the role."""
    deadline = time.monotonic() + ADOPTED_WITHIN_S
    while os.getppid() != parent:  # the one between has not ended yet
        if time.monotonic() > deadline:
            return 1
        time.sleep(0.001)
    die_with_parent(parent)
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = request["path"]
    arguments = request["arguments"]
    _show_as(arguments)
    sys.argv = ["penstock.roles", *arguments[arguments.index("penstock.roles") + 1 :]]
    from penstock.roles import __main__ as entry

    return entry.finished(entry.main())


def _show_as(arguments: Sequence[str]) -> None:
    """Makes these the arguments that `ps` shows: they name the process for people."""
    status = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(status[45]), int(status[46])  # of the arguments in memory
    text = b"\0".join(argument.encode() for argument in arguments)
    if 0 < start < end and len(text) < end - start:
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    os._exit(main())
