"""Every error Penstock raises, named for what the caller must do.

    PenstockError
    ├── ConfigError              fix the configuration; nothing was started (exit 2)
    ├── ProtocolError            a bug in one of the two peers
    │   ├── LocalProtocolError       ours: we were about to break the protocol
    │   ├── RemoteProtocolError      theirs: the peer broke it
    │   │   └── Damaged                  the bytes are not those that were published: they must be published again
    │   └── InvalidTransition        a machine was told something impossible in its state
    ├── Transient                try again, with backoff
    ├── Stale                    the thing is gone for good: drop it, never retry
    ├── Aborted                  rolled back, go on
    ├── PeerLost                 the peer is dead or unreachable: replace it
    └── RunFailed                the run cannot go on: stop (exit 1)

All of them survive pickling, and all carry one message that explains itself.
"""

from __future__ import annotations

import errno

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended: no error."""


class PenstockError(Exception):
    """The root: `except PenstockError` catches everything that Penstock itself raises."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class ConfigError(PenstockError):
    """The user's configuration is wrong; the message names the key, what was expected and what was found."""

    exit_code = 2


class ProtocolError(PenstockError):
    """The two ends of a protocol disagree: a bug in one of them."""


class LocalProtocolError(ProtocolError):
    """We were asked to do something the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something the protocol does not allow."""


class Damaged(RemoteProtocolError):
    """The bytes are not those that were published; only publishing them again mends that."""


class InvalidTransition(ProtocolError):
    """A machine received an event that its present state does not allow."""


class Transient(PenstockError):
    """Failed for now: the same call may succeed later."""


class Stale(PenstockError):
    """Refers to something that no longer exists; retrying can never help."""


class Aborted(PenstockError):
    """Was rolled back completely; the caller may go on as if it had never begun."""


class PeerLost(PenstockError):
    """The other process is dead or unreachable; it must be replaced."""


class RunFailed(PenstockError):
    """The run cannot continue; the message is the one sentence the user sees."""


ADVICE = {
    errno.EMFILE: "this process may not open more files; raise the limit (`ulimit -n`)",
    errno.ENFILE: "the machine has no more open files to give",
    errno.ENOSPC: "the disk is full; make room",
    errno.EDQUOT: "the disk quota is used up; make room",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not do that there",
    errno.ENOTDIR: "a file is where a directory should be; move it away",
    errno.EEXIST: "something else is there; move it away",
    errno.EIO: "the disk cannot be read or written",
}


def sentence_of(error: BaseException) -> str:
    """One sentence for an error that Penstock did not raise itself, with what to do where that is known."""
    if not isinstance(error, OSError) or error.errno is None:
        return f"{type(error).__name__}: {error}"
    named = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    advice = ADVICE.get(error.errno)
    return f"{f'{named}: ' if named else ''}{error.strerror}{f': {advice}' if advice else ''}"
