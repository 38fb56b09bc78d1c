"""A driver for one pipeline: sends events as processes would, and audits everything at teardown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest

from penstock.control import effects, events
from penstock.control.ledger import GroupFilter
from penstock.control.pipeline import PipelineControl
from penstock.control.settings import PipelineSettings
from penstock.records.batch import Batch
from penstock.records.ids import MemberId, PipelineName, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef, RingAddress
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout
from penstock.records.weights import Manifest
from penstock.wire import messages
from penstock.wire.codec import decode_section, encode_section

E = TypeVar("E")
P, W, T = PipelineName("p"), MemberId("w"), MemberId("t")


class Driver:
    """`control` plus a clock and a journal. `sent` holds the effects of the last event."""

    def __init__(self, group_filter: GroupFilter | None = None, **settings: Any) -> None:
        chosen: dict[str, Any] = {"steps": 10, "groups_per_step": 2, "group_size": 2, "max_staleness": 1} | settings
        self.settings = PipelineSettings(name=P, **chosen)
        self.filter = group_filter
        self.control = PipelineControl(self.settings, group_filter)
        self.now = 0.0
        self.sent: list[effects.Effect] = []
        self.lines: list[str] = []
        self.requests: dict[MemberId, int] = {}
        self._journal: list[tuple[bytes, float]] = []

    @property
    def books(self):
        return self.control.ledger.state

    @property
    def counts(self) -> dict[str, int]:
        return {str(state): count for state, count in self.books.counts.items() if count}

    def send(self, event: events.Event) -> Any:
        """Returns the answering effect (or None for a tick)."""
        revision, before = self.control.revision, self.control.snapshot()
        self.sent = self.control.handle(event, self.now)
        if self.control.revision != revision:
            self._journal.append((msgspec.msgpack.encode(event, enc_hook=encode_section), self.now))
        else:
            assert self.control.snapshot() == before, f"{event} changed the state but not the revision"
        self.lines += [effect.line for effect in self.sent if isinstance(effect, effects.Log)]
        return self.sent[0] if self.sent and not isinstance(event, events.TimePassed) else None

    def instructed(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.sent if isinstance(effect, kind)]

    def announced(self) -> set[str]:
        return {effect.topic for effect in self.instructed(effects.Announce)}

    def tick(self, seconds: float = 0.0, *, every_s: float = 1.0) -> list[effects.Effect]:
        """Lets time pass in the controller's own rhythm; returns all that was instructed meanwhile."""
        until, all_sent = self.now + seconds, []
        while True:
            self.send(events.TimePassed())
            all_sent += self.sent
            if self.now >= until:
                return all_sent
            self.now = min(until, self.now + every_s)

    def join(self, *workers: str, trainer: str | None = "t", step: int | None = None) -> None:
        for worker in workers:
            ring = RingAddress(worker, 0, "host", "127.0.0.1")
            answer = self.send(messages.Register(P, MemberId(worker), "rollout", ring=ring))
            assert isinstance(answer, messages.Registered)
        if trainer is not None:
            at = None if step is None else StepIndex(step)
            answer = self.send(messages.Register(P, MemberId(trainer), "trainer", step=at))
            assert isinstance(answer, messages.Registered)

    def ask(self, samples: int = 2, member: str = "w", version: int | None = None, **seen: Any) -> Any:
        """Asks with a fresh request number, which a refusal does not use up."""
        name = MemberId(member)
        serves = self.control.newest if version is None else Version(version)
        request = self.requests.get(name, 0)
        answer = self.send(messages.AskLease(P, name, request, samples, serves, **seen))
        if getattr(answer, "verdict", "") == "granted":
            self.requests[name] = request + 1
        return answer

    def lease(self, samples: int = 2, member: str = "w", version: int | None = None) -> tuple[PromptLease, ...]:
        answer = self.ask(samples, member, version)
        assert isinstance(answer, messages.Leased), answer
        assert answer.leases, answer
        return answer.leases

    def rollout(self, sample: int, version: int | None = None, reward: float = 1.0, ring: str = "w") -> Rollout:
        made_with = self.control.newest if version is None else Version(version)
        digest = self.books_digest(made_with)
        return Rollout(SampleId(sample), made_with, digest, reward, 5, PayloadRef(ring, 0, sample, 0, 1, 0))

    def books_digest(self, version: Version) -> str:
        return self.control.state.published.valid.get(version, "")

    def deliver(
        self,
        leases: tuple[PromptLease, ...],
        member: str = "w",
        version: int | None = None,
        rewards: tuple[float, ...] = (),
    ) -> messages.Delivered:
        samples = [sample for lease in leases for sample in lease.samples]
        values = rewards or (1.0,) * len(samples)
        rollouts = [
            self.rollout(sample, version, reward, member) for sample, reward in zip(samples, values, strict=True)
        ]
        return self.send(messages.Deliver(P, MemberId(member), tuple(rollouts)))

    def fail(self, *samples: int, member: str = "w", poison: bool = False) -> Any:
        failures = tuple(FailedRollout(SampleId(sample), "generate", "boom", poison) for sample in samples)
        return self.send(messages.Deliver(P, MemberId(member), failures=failures))

    def batch(self, step: int, member: str = "t") -> Batch:
        answer = self.send(messages.AskBatch(P, MemberId(member), StepIndex(step)))
        assert isinstance(answer, messages.BatchReady), answer
        return answer.batch

    def ack(self, step: int, member: str = "t", missing: tuple[int, ...] = ()) -> Any:
        return self.send(messages.AckStep(P, MemberId(member), StepIndex(step), missing_prompts=tuple(missing)))  # type: ignore[arg-type]

    def checkpoint(self, step: int, member: str = "t", last_resort: int | None = None) -> Any:
        resort = None if last_resort is None else StepIndex(last_resort)
        return self.send(messages.AckCheckpoint(P, MemberId(member), StepIndex(step), resort))

    def publish(self, version: int, digest: str = "", member: str = "t") -> Any:
        manifest = Manifest(Version(version), member, digest or f"digest{version}", (), "")
        return self.send(messages.PublishWeights(P, MemberId(member), manifest))

    def fill(self, groups: int | None = None, member: str = "w", version: int | None = None) -> None:
        """Leases and delivers whole groups."""
        for _ in range(self.settings.groups_per_step if groups is None else groups):
            self.deliver(self.lease(self.settings.group_size, member, version), member, version)

    def train(self, step: int, member: str = "t") -> Batch:
        batch = self.batch(step, member)
        assert isinstance(self.ack(step, member), messages.Ok)
        return batch

    def audit(self) -> None:
        """The books balance, the replayed journal gives the same bytes, and so does the restored snapshot."""
        self.control.check()
        snapshot = self.control.snapshot()
        replayed = PipelineControl(self.settings, self.filter)
        decode = msgspec.msgpack.Decoder(events.Event, dec_hook=decode_section).decode
        for event, at in self._journal:
            replayed.handle(decode(event), at)
        assert replayed.snapshot() == snapshot
        restored = PipelineControl(self.settings, self.filter)
        restored.restore(snapshot)
        restored.check()
        assert restored.snapshot() == snapshot


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    """Makes drivers, each audited at the end of the test."""
    drivers: list[Driver] = []

    def make(group_filter: GroupFilter | None = None, **settings: Any) -> Driver:
        drivers.append(Driver(group_filter, **settings))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.audit()
