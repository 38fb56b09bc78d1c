"""Starts the fork server before the rest of the command is imported: the import of torch takes longest at a start.

Imports only the standard library.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from penstock.runtime.interpreter import python_command, search_path
from penstock.runtime.parent import MEMBER_VARIABLE

PADDING = "penstock".ljust(2048)
"""Reserves space for the arguments of forked processes, which `ps` shows."""
NO_MEMBER = "x" * 512
"""Reserves space for the member of forked processes, by which their descendants are found."""


def possible() -> bool:
    """Whether processes can be forked: a GPU that an import has initialised cannot be used after a fork."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and not any(Path("/dev").glob("nvidia[0-9]*"))


@dataclass(frozen=True, slots=True)
class Preloading:
    """A fork server that imports torch and waits for the list of other modules. It ends with this process."""

    process: subprocess.Popen[bytes]
    requests: socket.socket

    def close(self) -> None:
        self.requests.close()
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Preloading:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()


_begun: list[Preloading] = []


def begin() -> None:
    """Starts a fork server that the next `start` returns."""
    _begun.append(start())


def start() -> Preloading:
    """Returns at once: the imports take seconds."""
    if _begun:
        return _begun.pop()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",  # a library that starts threads at its import could not be forked
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": search_path(),
        MEMBER_VARIABLE: NO_MEMBER,
    }
    with theirs:
        process = subprocess.Popen(
            python_command("-m", "penstock.roles.forkserver", str(theirs.fileno()), str(os.getpid()), PADDING),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # until it receives the path of its log
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return Preloading(process, ours)
