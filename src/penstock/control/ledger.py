"""The books of a pipeline: where every sample and every prompt is.

Promises, checked by `check()`:
- every sample ever issued is in exactly one state, and the counts are changed in one place (`_move`);
- every prompt ever taken from the stream is in exactly one place: a live group, the redo queue, or done
  (trained and durable, filtered, set aside): none is skipped, none is doubled;
- at most one group per prompt exists at a time, so a prompt cannot be trained twice by the same lineage;
- no group is dispatched to a step more than `max_staleness` ahead of its oldest sample.

Each operation costs the same whatever is in flight: work is done per sample moved, never per sample held.
"""

from __future__ import annotations

from math import isfinite
from typing import Protocol

from penstock.control.audit import audit
from penstock.control.samples import (
    MOVES,
    NO_VERSION,
    NOT_LEASED,
    Group,
    LedgerState,
    Reason,
    Redo,
    SetAside,
    State,
    StepBooks,
)
from penstock.errors import InvalidTransition, LocalProtocolError, Stale
from penstock.records.ids import MemberId, PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout


class GroupFilter(Protocol):
    """Looks at a complete group's rewards; returns why it should not be trained, or None. Must be pure."""

    def __call__(self, rewards: tuple[float, ...], /) -> str | None: ...


class Ledger:
    def __init__(
        self,
        *,
        groups_per_step: int,
        group_size: int,
        max_staleness: int,
        max_failures: int = 3,
        prompt_limit: int | None = None,
        group_filter: GroupFilter | None = None,
        max_filtered_per_step: int = 0,
        state: LedgerState | None = None,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.group_size = group_size
        self.max_staleness = max_staleness
        self.max_failures = max_failures
        self.group_filter = group_filter
        self.max_filtered_per_step = max_filtered_per_step
        self.released: list[PayloadRef] = []
        """Payloads of dropped samples since this list was last emptied by the owner."""
        self.state = state if state is not None else LedgerState(prompt_limit=prompt_limit)
        self._group_of: dict[SampleId, Group] = {
            sample: group for group in self.state.groups.values() for sample in group.samples if sample != NOT_LEASED
        }

    # -- what the books say -------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Samples that are issued and neither trained nor dropped."""
        counts = self.state.counts
        return counts["leased"] + counts["delivered"] + counts["buffered"] + counts["dispatched"]

    @property
    def live_groups(self) -> int:
        """Groups that are issued and neither trained nor dropped: every one stands for `group_size` samples."""
        return (self.in_flight + self.state.awaiting_count) // self.group_size

    @property
    def open_groups(self) -> int:
        """Groups that are not complete yet."""
        counts = self.state.counts
        return (counts["leased"] + counts["delivered"] + self.state.awaiting_count) // self.group_size

    @property
    def ready_groups(self) -> int:
        """Complete groups that wait for a batch."""
        return self.state.counts["buffered"] // self.group_size

    @property
    def prompts_left(self) -> bool:
        """Whether a whole group could still be issued, if there were room for it."""
        state = self.state
        return bool(state.redo) or state.prompt_limit is None or state.next_prompt < state.prompt_limit

    def held_by(self, member: MemberId) -> int:
        """Samples leased to a member."""
        return len(self.state.leases.get(member, ()))

    def state_of(self, sample: SampleId) -> State | None:
        """Where a sample is; None once it is dropped, or trained and durable (the journal knows the rest)."""
        group = self._group_of.get(sample)
        if group is None:
            return None
        if group.stage != "open":
            return group.stage
        return "leased" if self._is_leased(group, group.samples.index(sample)) else "delivered"

    # -- leasing ------------------------------------------------------------------------------------------------

    def lease_awaiting(self, member: MemberId, budget: int, min_version: Version) -> list[PromptLease]:
        """Issues again single members of open groups, oldest first, up to `budget` samples."""
        state = self.state
        leases: list[PromptLease] = []
        while budget > 0 and state.awaiting:
            prompt = next(iter(state.awaiting))
            members = state.awaiting[prompt][:budget]
            if len(members) == len(state.awaiting[prompt]):
                del state.awaiting[prompt]
            else:
                state.awaiting[prompt] = state.awaiting[prompt][budget:]
            state.awaiting_count -= len(members)
            budget -= len(members)
            leases.append(self._lease(state.groups[prompt], member, members, min_version))
        return leases

    def lease_group(self, member: MemberId, budget: int, min_version: Version) -> PromptLease:
        """Opens the next group and leases its first `budget` members; the others await the next worker."""
        state, size = self.state, self.group_size
        attempt = failures = 0
        if state.redo:
            prompt = next(iter(state.redo))
            redo = state.redo.pop(prompt)
            attempt, failures = redo.attempt, redo.failures
        elif state.prompt_limit is None or state.next_prompt < state.prompt_limit:
            prompt = state.next_prompt
            state.next_prompt = PromptIndex(prompt + 1)
        else:
            raise LocalProtocolError(f"no prompt is left to lease: all {state.prompt_limit} were issued")
        group = Group(
            prompt=prompt,
            attempt=attempt,
            failures=failures,
            stage="open",
            samples=[NOT_LEASED] * size,
            owners=[member] * size,
            payloads=[None] * size,
            rewards=[0.0] * size,
            versions=[NO_VERSION] * size,
            lengths=[0] * size,
            missing=size,
        )
        state.groups[prompt] = group
        taken = min(budget, size)
        if taken < size:
            state.awaiting[prompt] = list(range(taken, size))
            state.awaiting_count += size - taken
        return self._lease(group, member, list(range(taken)), min_version)

    def _lease(self, group: Group, member: MemberId, members: list[int], min_version: Version) -> PromptLease:
        state = self.state
        first = state.next_sample
        samples = tuple(SampleId(first + k) for k in range(len(members)))
        state.next_sample = SampleId(first + len(members))
        held = state.leases.setdefault(member, {})
        for index, sample in zip(members, samples, strict=True):
            group.samples[index] = sample
            group.owners[index] = member
            self._group_of[sample] = group
            held[sample] = None
        self._move(None, "leased", len(members))
        return PromptLease(group.prompt, group.attempt, samples, tuple(members), min_version)

    # -- delivery -----------------------------------------------------------------------------------------------

    def deliver(self, member: MemberId, rollout: Rollout, newest: Version) -> str:
        """Books a rollout. Returns why it was refused, or "". A rollout that is already booked changes nothing."""
        group, index = self._find(member, rollout.sample)
        if group is None:
            return "is not leased to this worker (any more)"
        if not self._is_leased(group, index):
            return ""
        if rollout.version > newest:
            self._drop_lease(group, index, "outdated")
            return f"was made with weights version {rollout.version}, which does not exist any more"
        if rollout.version < self.state.next_step - self.max_staleness:
            self._drop_group(group, "outdated", redo=True)
            return f"was made with weights version {rollout.version}, too old for step {self.state.next_step}"
        if not isfinite(rollout.reward):
            self.fail(member, FailedRollout(rollout.sample, "reward", f"the reward is {rollout.reward}"))
            return f"has the reward {rollout.reward}"
        group.payloads[index] = rollout.payload
        group.rewards[index] = rollout.reward
        group.versions[index] = rollout.version
        group.lengths[index] = rollout.length
        group.missing -= 1
        self._return_lease(group, index)
        self._move("leased", "delivered")
        if group.oldest == NO_VERSION or rollout.version < group.oldest:
            self._shelve(group, rollout.version)
        if group.missing == 0:
            self._complete(group)
        return ""

    def fail(self, member: MemberId, failure: FailedRollout) -> str:
        """Books a failed rollout: the member is issued again, or its prompt set aside if it failed too often."""
        group, index = self._find(member, failure.sample)
        if group is None or not self._is_leased(group, index):
            return "is not leased to this worker (any more)"
        group.failures += 1
        self._drop_lease(group, index, "failed")
        if failure.poison or group.failures >= self.max_failures:
            self._drop_group(group, "failed", redo=False)
            self.state.set_aside[group.prompt] = SetAside(group.failures, failure.hook, failure.error)
        return ""

    def give_back(self, member: MemberId, sample: SampleId) -> str:
        """Books an unused lease as lost, to be issued again."""
        group, index = self._find(member, sample)
        if group is None or not self._is_leased(group, index):
            return "is not leased to this worker (any more)"
        self._drop_lease(group, index, "lost")
        return ""

    def reject(self, member: MemberId, sample: SampleId) -> None:
        """Drops a leased sample that was made with the wrong weights, to be issued again."""
        group, index = self._find(member, sample)
        if group is not None and self._is_leased(group, index):
            self._drop_lease(group, index, "outdated")

    def lose_member(self, member: MemberId) -> int:
        """Takes back everything leased to a member; returns how many samples that were."""
        held = list(self.state.leases.get(member, ()))
        for sample in held:
            group = self._group_of[sample]
            self._drop_lease(group, group.samples.index(sample), "lost")
        self.state.leases.pop(member, None)
        return len(held)

    def _drop_lease(self, group: Group, index: int, reason: Reason) -> None:
        """Drops one leased sample; its place in the group awaits another one."""
        state = self.state
        self._return_lease(group, index)
        del self._group_of[group.samples[index]]
        group.samples[index] = NOT_LEASED
        state.awaiting.setdefault(group.prompt, []).append(index)
        state.awaiting_count += 1
        self._move("leased", "dropped", 1, reason)

    def _find(self, member: MemberId, sample: SampleId) -> tuple[Group | None, int]:
        group = self._group_of.get(sample)
        if group is None:
            return None, -1
        index = group.samples.index(sample)
        return (group, index) if group.owners[index] == member else (None, -1)

    @staticmethod
    def _is_leased(group: Group, index: int) -> bool:
        return group.stage == "open" and group.payloads[index] is None

    def _return_lease(self, group: Group, index: int) -> None:
        held = self.state.leases[group.owners[index]]
        del held[group.samples[index]]
        if not held:
            del self.state.leases[group.owners[index]]

    def _shelve(self, group: Group, oldest: Version) -> None:
        """Files an open group under its oldest version, so that outdated groups are found without a search."""
        shelves = self.state.open_by_version
        self._unshelve(shelves, group)
        group.oldest = oldest
        shelves.setdefault(oldest, {})[group.prompt] = None

    @staticmethod
    def _unshelve(shelves: dict[Version, dict[PromptIndex, None]], group: Group) -> None:
        shelf = shelves.get(group.oldest)
        if shelf is not None:
            shelf.pop(group.prompt, None)
            if not shelf:
                del shelves[group.oldest]

    def _complete(self, group: Group) -> None:
        state = self.state
        judge = self.group_filter if state.filtered_since_step < self.max_filtered_per_step else None
        if judge is not None and judge(tuple(group.rewards)) is not None:
            state.filtered_since_step += 1
            state.filtered_prompts += 1
            self._drop_group(group, "filtered", redo=False)
            return
        self._unshelve(state.open_by_version, group)
        group.stage = "buffered"
        state.ready_by_version.setdefault(group.oldest, {})[group.prompt] = None
        self._move("delivered", "buffered", self.group_size)

    # -- steps --------------------------------------------------------------------------------------------------

    def dispatch(self, *, final: bool, now: float) -> StepBooks:
        """Gives the next step its batch: the oldest complete groups, at most `groups_per_step` of them."""
        state, size = self.state, self.group_size
        step = state.next_step
        chosen: list[Group] = []
        for version in sorted(state.ready_by_version):
            for prompt in state.ready_by_version[version]:
                if len(chosen) == self.groups_per_step:
                    break
                chosen.append(state.groups[prompt])
        for group in chosen:
            self._unshelve(state.ready_by_version, group)
            group.stage = "dispatched"
        samples = len(chosen) * size
        ages = [step - version for group in chosen for version in group.versions]
        books = StepBooks(
            prompts=[group.prompt for group in chosen],
            final=final,
            dispatched_at=now,
            reward_mean=sum(sum(group.rewards) for group in chosen) / samples if samples else 0.0,
            staleness_mean=sum(ages) / samples if samples else 0.0,
            staleness_max=max(ages, default=0),
            samples=samples,
        )
        if books.staleness_max > self.max_staleness:
            raise InvalidTransition(f"step {step} was about to get a sample {books.staleness_max} versions old")
        state.steps[step] = books
        state.next_step = StepIndex(step + 1)
        state.filtered_since_step = 0
        self._move("buffered", "dispatched", samples)
        self._drop_outdated()
        return books

    def _drop_outdated(self) -> None:
        """Drops every group too old for the next step: it can only get older."""
        state = self.state
        oldest_allowed = state.next_step - self.max_staleness
        for shelves in (state.ready_by_version, state.open_by_version):
            for version in [version for version in sorted(shelves) if version < oldest_allowed]:
                for prompt in list(shelves[version]):
                    self._drop_group(state.groups[prompt], "outdated", redo=True)

    def acknowledge(self, step: StepIndex, missing: tuple[PromptIndex, ...]) -> bool:
        """Books a step as trained, except the groups of `missing`. False if it was acknowledged before."""
        state = self.state
        if step < state.version:
            return False
        books = state.steps.get(step)
        if step > state.version or books is None:
            raise LocalProtocolError(f"step {step} was acknowledged, but the next step to train is {state.version}")
        absent = dict.fromkeys(missing)
        strangers = [prompt for prompt in absent if prompt not in books.prompts]
        if strangers:
            raise LocalProtocolError(f"step {step} reports prompts {strangers} missing that were not in its batch")
        for prompt in books.prompts:
            group = state.groups[prompt]
            if prompt in absent:
                self._drop_group(group, "lost", redo=True)
            else:
                group.stage = "trained"
                group.payloads = []
                self._move("dispatched", "trained", self.group_size)
        books.prompts = [prompt for prompt in books.prompts if prompt not in absent]
        state.version = Version(step + 1)
        state.moves += 1
        return True

    def settle(self, durable: StepIndex) -> bool:
        """Forgets the steps below `durable`: a checkpoint holds them. False if that was known."""
        state = self.state
        if durable > state.version:
            raise LocalProtocolError(f"a checkpoint of step {durable} was saved, but only {state.version} were trained")
        if durable <= state.durable:
            return False
        for step in [step for step in state.steps if step < durable]:
            for prompt in state.steps.pop(step).prompts:
                for sample in state.groups.pop(prompt).samples:
                    del self._group_of[sample]
                state.settled_prompts += 1
        state.durable = durable
        state.moves += 1
        return True

    def roll_back(self, step: StepIndex) -> int:
        """Undoes every step from `step` on; returns how many prompts are to be issued again because of it."""
        state = self.state
        if step < state.durable:
            raise Stale(f"the trainer starts at step {step}, but a checkpoint of step {state.durable} was confirmed")
        redone = self._undo(step)
        self._drop_newer_than(Version(step))
        state.version, state.next_step = Version(step), step
        return redone

    def undo_after(self, step: StepIndex) -> None:
        """A new trainer starts at the step that is due: it keeps that step's batch, and none that was given ahead."""
        self._undo(StepIndex(step + 1))
        self._drop_newer_than(Version(step))
        self.state.next_step = min(self.state.next_step, StepIndex(step + 1))

    def _undo(self, first: StepIndex) -> int:
        """Drops what the steps from `first` on were given; their prompts come before all others in the queue."""
        state = self.state
        waiting, state.redo = state.redo, {}
        for step in [step for step in state.steps if step >= first]:
            for prompt in state.steps.pop(step).prompts:
                self._drop_group(state.groups[prompt], "lost", redo=True)
        redone = len(state.redo)
        state.redo.update(waiting)
        state.moves += 1
        return redone

    def _drop_newer_than(self, version: Version) -> None:
        """Drops groups with samples of versions above `version`: the trainer that made those weights is gone."""
        waiting = [group for group in self.state.groups.values() if group.stage in ("open", "buffered")]
        for group in waiting:
            if max(group.versions) > version:
                self._drop_group(group, "outdated", redo=True)

    def lose_payloads(self) -> int:
        """Drops every group that is not trained: the payloads are gone. Returns how many prompts that concerns."""
        state = self.state
        lost = [group for group in state.groups.values() if group.stage != "trained"]
        for group in lost:
            self._drop_group(group, "lost", redo=True)
        for step in [step for step in state.steps if step >= state.version]:
            del state.steps[step]
        state.next_step = StepIndex(state.version)
        state.moves += 1
        return len(lost)

    # -- the one place where groups end, and the one place where counts change -------------------------------------

    def _drop_group(self, group: Group, reason: Reason, *, redo: bool) -> None:
        state = self.state
        stage = group.stage
        if stage == "open":
            leased = delivered = 0
            for index, sample in enumerate(group.samples):
                if sample == NOT_LEASED:
                    continue
                if group.payloads[index] is None:
                    self._return_lease(group, index)
                    leased += 1
                else:
                    delivered += 1
            state.awaiting_count -= len(state.awaiting.pop(group.prompt, ()))
            self._unshelve(state.open_by_version, group)
            self._move("leased", "dropped", leased, reason)
            self._move("delivered", "dropped", delivered, reason)
        else:
            if stage == "buffered":
                self._unshelve(state.ready_by_version, group)
            self._move(stage, "dropped", self.group_size, reason)
        self.released.extend(payload for payload in group.payloads if payload is not None)
        for sample in group.samples:
            if sample != NOT_LEASED:
                del self._group_of[sample]
        del state.groups[group.prompt]
        if redo:
            state.redo[group.prompt] = Redo(group.attempt + 1, group.failures)

    def _move(self, source: State | None, target: State, samples: int = 1, reason: Reason | None = None) -> None:
        if (source, target) not in MOVES:
            raise InvalidTransition(f"a sample cannot go from {source} to {target}")
        state = self.state
        if source is not None:
            state.counts[source] -= samples
        state.counts[target] += samples
        if reason is not None:
            state.dropped[reason] += samples
        state.moves += samples

    # -- audit --------------------------------------------------------------------------------------------------

    def conservation(self) -> int:
        """Samples issued minus samples accounted for: zero, always."""
        return self.state.next_sample - sum(self.state.counts.values())

    def check(self) -> None:
        """Recounts everything from the rows and raises if any promise of this module is broken. Linear in size."""
        audit(self.state, group_size=self.group_size, max_staleness=self.max_staleness)
        in_groups = {sample for group in self.state.groups.values() for sample in group.samples} - {NOT_LEASED}
        if self._group_of.keys() != in_groups:
            raise InvalidTransition("the index of samples does not agree with the groups")

    def __repr__(self) -> str:
        state = self.state
        states = " ".join(f"{name}={count}" for name, count in state.counts.items())
        return (
            f"<Ledger version={state.version} next_step={state.next_step} durable={state.durable} {states} "
            f"awaiting={state.awaiting_count} redo={len(state.redo)} next_prompt={state.next_prompt}>"
        )
