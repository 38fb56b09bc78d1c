"""Decides which requests are decoded together, and which conversations keep their cache between turns. Does no I/O.

Requests are seated in order of arrival: the first one waits for a free row and enough tokens, and none overtakes it.
A seated request ends within its maximum length, so no request waits indefinitely.

Bounds, after every event: at most `rows` seats; seats times the longest of them at most `cache_tokens`, since all rows
are as wide as the widest; conversations between turns hold at most `kept_tokens`, the least recent are evicted first.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from penstock.errors import InvalidTransition, LocalProtocolError

Request = int
Key = Hashable
"""Names a conversation."""


# Events


class RequestArrived(msgspec.Struct, frozen=True):
    """A completion was requested."""

    request: Request
    tokens: int
    """Its maximum length: the context and all new tokens."""


class RequestLeft(msgspec.Struct, frozen=True):
    """A waiting or seated request ended or was cancelled."""

    request: Request


class AllLeft(msgspec.Struct, frozen=True):
    """The engine was interrupted or failed: all requests left."""


class ConversationPaused(msgspec.Struct, frozen=True):
    """A turn ended and another may follow, which can reuse the cache."""

    key: Key
    tokens: int


class ConversationLeft(msgspec.Struct, frozen=True):
    """Its cache was loaded into a row, or is not needed any more."""

    key: Key


class CachesDropped(msgspec.Struct, frozen=True):
    """All kept caches were dropped."""


Event = RequestArrived | RequestLeft | AllLeft | ConversationPaused | ConversationLeft | CachesDropped

# Effects


class Seat(msgspec.Struct, frozen=True):
    """Assign a row, and decode it from the next step on."""

    request: Request


class Keep(msgspec.Struct, frozen=True):
    """Keep this conversation's cache."""

    key: Key


class Evict(msgspec.Struct, frozen=True):
    """Drop this conversation's cache: a later turn prefills its context again."""

    key: Key


Effect = Seat | Keep | Evict


class _Waiting(msgspec.Struct, frozen=True):
    tokens: int
    since: float


class Seating:
    """The state machine. One instance per engine; single-threaded."""

    def __init__(self, rows: int, cache_tokens: int, kept_tokens: int) -> None:
        if rows < 1 or cache_tokens < 1 or kept_tokens < 0:
            raise LocalProtocolError(
                f"an engine needs at least one row and one token, found rows={rows}, cache_tokens={cache_tokens}, "
                f"kept_tokens={kept_tokens}"
            )
        self.rows = rows
        self.cache_tokens = cache_tokens
        self.kept_tokens = kept_tokens
        self._waiting: dict[Request, _Waiting] = {}
        self._seated: dict[Request, int] = {}
        self._kept: dict[Key, int] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def seated(self) -> int:
        return len(self._seated)

    @property
    def longest_tokens(self) -> int:
        """Columns that the rows need."""
        return max(self._seated.values(), default=0)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._seated

    def fits(self, tokens: int) -> bool:
        """Whether a request of this length can ever be seated."""
        return tokens <= self.cache_tokens

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Returns the effects to carry out, in order."""
        effects: list[Effect] = []
        match event:
            case RequestArrived(request, tokens):
                if request in self._waiting or request in self._seated:
                    raise InvalidTransition(f"request {request} arrived twice")
                if not self.fits(tokens):
                    raise LocalProtocolError(
                        f"request {request} may become {tokens} tokens long, which never fits into {self.cache_tokens}"
                    )
                self._waiting[request] = _Waiting(tokens, now)
            case RequestLeft(request):
                self._waiting.pop(request, None)
                self._seated.pop(request, None)
            case AllLeft():
                self._waiting.clear()
                self._seated.clear()
            case ConversationPaused(key, tokens):
                self._kept.pop(key, None)
                if tokens <= self.kept_tokens:
                    self._kept[key] = tokens
                    effects.append(Keep(key))
                    self._evict(effects)
                else:
                    effects.append(Evict(key))
            case ConversationLeft(key):
                if self._kept.pop(key, None) is not None:
                    effects.append(Evict(key))
            case CachesDropped():
                self._kept.clear()
        self._seat(effects)
        return effects

    def _seat(self, effects: list[Effect]) -> None:
        while self._waiting and len(self._seated) < self.rows:
            request, first = next(iter(self._waiting.items()))
            if (len(self._seated) + 1) * max(self.longest_tokens, first.tokens) > self.cache_tokens:
                return
            del self._waiting[request]
            self._seated[request] = first.tokens
            effects.append(Seat(request))

    def _evict(self, effects: list[Effect]) -> None:
        held = sum(self._kept.values())
        while held > self.kept_tokens:
            oldest = next(iter(self._kept))
            held -= self._kept.pop(oldest)
            effects.append(Evict(oldest))

    def check(self) -> None:
        """Raises if an invariant is broken."""
        if len(self._seated) > self.rows or len(self._seated) * self.longest_tokens > self.cache_tokens:
            raise LocalProtocolError(f"the seated requests exceed the cache: {self!r}")
        if sum(self._kept.values()) > self.kept_tokens:
            raise LocalProtocolError(f"the kept caches exceed kept_tokens: {self!r}")
        if self._waiting.keys() & self._seated.keys():
            raise LocalProtocolError(f"a request is both seated and waiting: {self!r}")
        if self._waiting and not self._seated:
            raise LocalProtocolError(f"requests wait although no row is in use: {self!r}")

    def __repr__(self) -> str:
        oldest = next(iter(self._waiting.items()), None)
        waits = f", longest waiting: {oldest[0]} since {oldest[1].since:.3f}" if oldest else ""
        return (
            f"Seating(seated={self.seated}/{self.rows}, longest={self.longest_tokens}, waiting={self.waiting}, "
            f"kept={len(self._kept)} conversations with {sum(self._kept.values())} tokens{waits})"
        )
