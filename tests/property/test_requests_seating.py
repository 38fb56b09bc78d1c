"""Which requests are decoded together: none is lost or overtaken, every bound holds, each gets a row."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engines.torch.seating import (
    AllLeft,
    CachesDropped,
    ConversationLeft,
    ConversationPaused,
    Effect,
    Evict,
    Keep,
    RequestArrived,
    RequestLeft,
    Seat,
    Seating,
)
from penstock.errors import InvalidTransition, LocalProtocolError
from profiles import examples


class Engine(RuleBasedStateMachine):
    """Acts on the effects as an engine does, and keeps books of its own."""

    @initialize(rows=st.integers(1, 4), cache_tokens=st.integers(1, 40), kept_tokens=st.integers(0, 30))
    def start(self, rows: int, cache_tokens: int, kept_tokens: int) -> None:
        self.machine = Seating(rows, cache_tokens, kept_tokens)
        self.arrived = 0
        self.line: list[int] = []
        self.seated: dict[int, int] = {}
        self.needs: dict[int, int] = {}
        self.kept: dict[int, int] = {}
        self.pausing: tuple[int, int] | None = None

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Seat(request):
                    assert self.line, "a request was seated twice"
                    assert request == self.line.pop(0), "a request was overtaken"
                    self.seated[request] = self.needs[request]
                case Keep(kept):
                    assert self.pausing is not None
                    key, tokens = self.pausing
                    assert kept == key
                    self.kept.pop(key, None)
                    self.kept[key] = tokens
                case Evict(evicted):
                    assert isinstance(evicted, int)
                    self.kept.pop(evicted, None)

    @rule(tokens=st.integers(1, 45))
    def arrive(self, tokens: int) -> None:
        if not self.machine.fits(tokens):
            with pytest.raises(LocalProtocolError, match="never fits"):
                self.machine.handle(RequestArrived(self.arrived, tokens), 0.0)
            return
        self.needs[self.arrived] = tokens
        self.line.append(self.arrived)
        self.arrived += 1
        self.act(self.machine.handle(RequestArrived(self.arrived - 1, tokens), float(self.arrived)))

    @precondition(lambda self: self.seated)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.seated)))
        del self.seated[request]
        self.act(self.machine.handle(RequestLeft(request), 0.0))

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.line))
        self.line.remove(request)
        self.act(self.machine.handle(RequestLeft(request), 0.0))

    @precondition(lambda self: self.line or self.seated)
    @rule(data=st.data())
    def arrive_twice(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([*self.line, *self.seated]))
        with pytest.raises(InvalidTransition):
            self.machine.handle(RequestArrived(known, 1), 0.0)

    @rule(key=st.integers(0, 5), tokens=st.integers(1, 35))
    def pause(self, key: int, tokens: int) -> None:
        self.pausing = (key, tokens)
        self.act(self.machine.handle(ConversationPaused(key, tokens), 0.0))
        assert (key in self.kept) == (tokens <= self.machine.kept_tokens), "the newest is kept if it fits at all"
        self.pausing = None

    @rule(key=st.integers(0, 5))
    def leave(self, key: int) -> None:
        self.act(self.machine.handle(ConversationLeft(key), 0.0))
        assert key not in self.kept

    @rule()
    def interrupt(self) -> None:
        self.line.clear()
        self.seated.clear()
        self.act(self.machine.handle(AllLeft(), 0.0))

    @rule()
    def drop(self) -> None:
        self.kept.clear()
        self.act(self.machine.handle(CachesDropped(), 0.0))

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "machine"):
            return
        self.machine.check()
        assert (self.machine.seated, self.machine.waiting) == (len(self.seated), len(self.line))
        assert len(self.seated) <= self.machine.rows
        assert len(self.seated) * max(self.seated.values(), default=0) <= self.machine.cache_tokens
        assert sum(self.kept.values()) <= self.machine.kept_tokens
        if self.line and len(self.seated) < self.machine.rows:
            wide = max([*self.seated.values(), self.needs[self.line[0]]])
            assert (len(self.seated) + 1) * wide > self.machine.cache_tokens, (
                "a row is free and no request was given it"
            )

    def teardown(self) -> None:
        """Everyone in line gets a seat if only those who sit come to their end."""
        while getattr(self, "seated", None):
            request = next(iter(self.seated))
            del self.seated[request]
            self.act(self.machine.handle(RequestLeft(request), 0.0))
        assert not getattr(self, "line", None)
        assert not hasattr(self, "machine") or self.machine.idle


Engine.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
TestSeating = Engine.TestCase


def test_an_engine_without_room_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="at least one row"):
        Seating(0, 10, 0)
