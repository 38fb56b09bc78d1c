"""Every error that Penstock raises, named for what the caller must do.

    PenstockError
    ├── ConfigError              fix the configuration; nothing was started (exit 2)
    ├── ProtocolError            a bug in one of the two peers
    │   ├── LocalProtocolError       ours: we were about to break the protocol
    │   ├── RemoteProtocolError      theirs: the peer broke it
    │   │   └── Damaged                  the bytes differ from those published: publish them again
    │   └── InvalidTransition        a state machine received an event that its state does not allow
    ├── Transient                retry with backoff
    ├── Stale                    the object no longer exists: drop it, never retry
    ├── Aborted                  rolled back: continue
    ├── PeerLost                 the peer is dead or unreachable: replace it
    └── RunFailed                the run cannot continue: stop (exit 1)

All of them can be pickled. Each carries one message that names the problem and what to do.
"""

from __future__ import annotations

import errno

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended; not an error."""


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
    """The two peers of a protocol disagree: a bug in one of them."""


class LocalProtocolError(ProtocolError):
    """The local caller attempted something that the protocol does not allow."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow."""


class Damaged(RemoteProtocolError):
    """The bytes differ from those that were published; only a new publication repairs this."""


class InvalidTransition(ProtocolError):
    """A state machine received an event that its current state does not allow."""


class Transient(PenstockError):
    """Failed for now: the same call may succeed later."""


class Stale(PenstockError):
    """Refers to something that no longer exists; a retry can never succeed."""


class Aborted(PenstockError):
    """The operation was rolled back completely; the caller may continue as if it had never started."""


class PeerLost(PenstockError):
    """The other process is dead or unreachable; it must be replaced."""


class RunFailed(PenstockError):
    """The run cannot continue; the message is the sentence shown to the user."""


ADVICE = {
    errno.EMFILE: "this process may not open more files; raise the limit (`ulimit -n`)",
    errno.ENFILE: "the machine has reached its limit of open files",
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not access the path",
    errno.ENOTDIR: "a file exists where a directory is expected; move it away",
    errno.EEXIST: "another file is at this path; move it away",
    errno.EIO: "the disk cannot be read or written",
}


def sentence_of(error: BaseException) -> str:
    """Describes in one sentence an error that Penstock did not raise, with advice from `ADVICE` if there is any."""
    if not isinstance(error, OSError) or error.errno is None:
        return f"{type(error).__name__}: {error}"
    named = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    advice = ADVICE.get(error.errno)
    return f"{f'{named}: ' if named else ''}{error.strerror}{f': {advice}' if advice else ''}"
