"""The ledger of a pipeline: tracks every sample and every prompt.

Invariants, checked by `check()`:
- every issued sample is in exactly one state;
- every prompt taken from the stream is in exactly one place: a live group, the redo queue, or done (trained and
  durable, filtered, set aside). None is skipped, none is duplicated;
- at most one group per prompt exists at a time, so a prompt cannot be trained twice by the same lineage;
- no group is dispatched to a step more than `max_staleness` ahead of its oldest sample.

The cost of an operation depends on the samples it moves, not on the samples in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import isfinite
from typing import Protocol

from penstock.control.audit import audit
from penstock.control.sample_table import SampleTable
from penstock.control.samples import NOT_LEASED_TO_YOU, Group, LedgerState, Redo, SetAside, State, StepRecord
from penstock.control.settings import PipelineSettings
from penstock.errors import InvalidTransition, LocalProtocolError, Stale
from penstock.records.ids import MemberId, PromptIndex, SampleId, StepIndex, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import FailedRollout, Rollout

FILTER_KINDS = 16
"""Number of filter reasons that are counted separately; a user's filter may return any number of them."""


class GroupFilter(Protocol):
    """Returns why a complete group with these rewards and lengths is not trained, or None. Must be pure."""

    def __call__(self, rewards: Sequence[float], lengths: Sequence[int], /) -> str | None: ...


class Ledger:
    def __init__(
        self, settings: PipelineSettings, group_filter: GroupFilter | None = None, state: LedgerState | None = None
    ) -> None:
        self.groups_per_step = settings.groups_per_step
        self.group_size = settings.group_size
        self.max_staleness = settings.max_staleness
        self.max_failures = settings.max_failures
        self.max_losses = settings.max_losses
        self.group_filter = group_filter
        self._filtered: list[tuple[PromptIndex, str]] = []
        self.filtered_per_step_allowed = settings.filtered_per_step_allowed
        self.state = state if state is not None else LedgerState(prompt_limit=settings.prompt_limit)
        self._table = SampleTable(self.state, self.group_size)

    # -- queries -------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Samples that are issued and neither trained nor dropped."""
        counts = self.state.counts
        return counts["leased"] + counts["delivered"] + counts["buffered"] + counts["dispatched"]

    @property
    def live_groups(self) -> int:
        """Groups that are issued and neither trained nor dropped; each counts `group_size` samples."""
        return (self.in_flight + self.state.awaiting_count) // self.group_size

    @property
    def open_groups(self) -> int:
        """Groups that are not complete."""
        counts = self.state.counts
        return (counts["leased"] + counts["delivered"] + self.state.awaiting_count) // self.group_size

    @property
    def ready_groups(self) -> int:
        """Complete groups that wait for a batch."""
        return self.state.counts["buffered"] // self.group_size

    @property
    def prompts_left(self) -> bool:
        """Whether another group could be issued, if the capacity allowed it."""
        state = self.state
        return bool(state.redo) or state.prompt_limit is None or state.next_prompt < state.prompt_limit

    def limit_prompts(self, count: int) -> bool:
        """Sets the number of prompts of the stream. False if another number is set already; that one stays."""
        if self.state.prompt_limit is None:
            self.state.prompt_limit = count
        return self.state.prompt_limit == count

    @property
    def oldest_allowed(self) -> int:
        """The lowest weights version whose samples the next step may train."""
        return self.state.next_step - self.max_staleness

    def stragglers(self, busy: Collection[MemberId] = ()) -> int:
        """Open groups that the next batch would most likely outdate, and that may be complete before it: each missing
        member is leased, to a worker that is not `busy`. A member that awaits a worker would begin again."""
        last = self.oldest_allowed
        overtaken = sum(groups for version, groups in self.state.promised_by_version.items() if version <= last)
        return overtaken - len(self._overtaken_that_wait(busy)) if overtaken else 0

    def drop_stragglers(self, busy: Collection[MemberId] = ()) -> tuple[int, list[MemberId]]:
        """Drops the groups that `stragglers` counts, so that their prompts are issued again. Returns their number and
        the members that they were leased to."""
        last, waiting = self.oldest_allowed, self._overtaken_that_wait(busy)
        open_groups = [group for group in self.state.groups.values() if group.stage == "open"]
        late = [group for group in open_groups if group.promised <= last and group.prompt not in waiting]
        holders: dict[MemberId, None] = {}
        for group in late:
            missing = (owner for owner, payload in zip(group.owners, group.payloads, strict=True) if payload is None)
            holders.update(dict.fromkeys(missing))
            self._table.drop_group(group, "outdated", redo=True)
        return len(late), list(holders)

    def _overtaken_that_wait(self, busy: Collection[MemberId]) -> set[PromptIndex]:
        state, last = self.state, self.oldest_allowed
        prompts = {prompt for prompt in state.awaiting if state.groups[prompt].promised <= last}
        for member in busy:
            held = (self._table.group_of(sample) for sample in state.leases.get(member, ()))
            prompts |= {group.prompt for group in held if group.promised <= last}
        return prompts

    def held_by(self, member: MemberId) -> int:
        """Samples leased to a member."""
        return len(self.state.leases.get(member, ()))

    def state_of(self, sample: SampleId) -> State | None:
        """The state of a sample; None once it is dropped, or trained and durable (then only the journal has it)."""
        return self._table.state_of(sample)

    def take_filtered(self) -> tuple[tuple[PromptIndex, str], ...]:
        """Groups that the filter removed since the last call, with the reasons."""
        filtered, self._filtered = tuple(self._filtered), []
        return filtered

    def take_released(self) -> tuple[PayloadRef, ...]:
        """Payloads without a reader; each is returned once."""
        released = tuple(self._table.released)
        self._table.released.clear()
        return released

    # -- leasing ------------------------------------------------------------------------------------------------

    def lease_awaiting(self, member: MemberId, budget: int, min_version: Version) -> list[PromptLease]:
        """Issues single members of open groups again, oldest first, up to `budget` samples."""
        state = self.state
        leases: list[PromptLease] = []
        while budget > 0 and state.awaiting:
            prompt = next(iter(state.awaiting))
            awaiting = state.awaiting[prompt]
            members = awaiting[:budget]
            if len(members) == len(awaiting):
                del state.awaiting[prompt]
            else:
                state.awaiting[prompt] = awaiting[budget:]
            state.awaiting_count -= len(members)
            budget -= len(members)
            leases.append(self._table.lease(state.groups[prompt], member, members, min_version))
        return leases

    def lease_group(self, member: MemberId, budget: int, version: Version, min_version: Version) -> PromptLease:
        """Opens the next group and leases its first `budget` members; the others await the next worker.

        `version` is the one that the worker serves.
        """
        state, size = self.state, self.group_size
        redo = Redo()
        if state.redo:
            prompt = next(iter(state.redo))
            redo = state.redo.pop(prompt)
        elif state.prompt_limit is None or state.next_prompt < state.prompt_limit:
            prompt = state.next_prompt
            state.next_prompt = PromptIndex(prompt + 1)
        else:
            raise LocalProtocolError(f"no prompt is left to lease: all {state.prompt_limit} were issued")
        group = self._table.open_group(prompt, redo, member, version)
        taken = min(budget, size)
        if taken < size:
            state.awaiting[prompt] = list(range(taken, size))
            state.awaiting_count += size - taken
        return self._table.lease(group, member, list(range(taken)), min_version)

    # -- delivery -----------------------------------------------------------------------------------------------

    def deliver(self, member: MemberId, rollout: Rollout, newest: Version) -> str:
        """Records a rollout. Returns why it was refused, or "". A rollout that is already recorded changes nothing."""
        table = self._table
        group, index = table.find(member, rollout.sample)
        if group is None:
            return NOT_LEASED_TO_YOU
        if not table.is_leased(group, index):
            return ""
        if rollout.version > newest:
            table.drop_lease(group, index, "outdated")
            return f"was generated with weights version {rollout.version}, which does not exist (any more)"
        if rollout.version < self.oldest_allowed:
            table.drop_group(group, "outdated", redo=True)
            return f"was generated with weights version {rollout.version}, too old for step {self.state.next_step}"
        if not isfinite(rollout.reward):
            self.fail(member, FailedRollout(rollout.sample, "reward", f"the reward is {rollout.reward}"))
            return f"has the reward {rollout.reward}"
        table.accept(group, index, rollout)
        if group.missing == 0:
            self._complete(group)
        return ""

    def _complete(self, group: Group) -> None:
        state = self.state
        applied = self.group_filter if state.filtered_since_step < self.filtered_per_step_allowed else None
        reason = applied(group.rewards, group.lengths) if applied is not None else None
        if reason is not None:
            state.filtered_since_step += 1
            state.filtered_prompts += 1
            self._filtered.append((group.prompt, reason))
            kind = reason.partition(":")[0]
            if kind not in state.filtered_by and len(state.filtered_by) >= FILTER_KINDS:
                kind = "other"
            state.filtered_by[kind] = state.filtered_by.get(kind, 0) + 1
            self._table.drop_group(group, "filtered", redo=False)
        else:
            self._table.buffer(group)

    def fail(self, member: MemberId, failure: FailedRollout) -> str:
        """Records a failed rollout: the member is issued again, or its prompt is set aside if it failed too often.

        Failures are counted per member: a failed call fails all members that were leased together, and a count per
        group would then set the prompt aside at the first such call.
        """
        group, index = self._table.find(member, failure.sample)
        if group is None or not self._table.is_leased(group, index):
            return NOT_LEASED_TO_YOU
        group.failures[index] += 1
        self._table.drop_lease(group, index, "failed")
        if failure.poison or group.failures[index] >= self.max_failures:
            self._table.drop_group(group, "failed", redo=False)
            self.state.set_aside[group.prompt] = SetAside(group.failures[index], failure.hook, failure.error)
        return ""

    def return_sample(self, member: MemberId, sample: SampleId) -> str:
        """Records an unused lease as returned, to be issued again."""
        group, index = self._table.find(member, sample)
        if group is None or not self._table.is_leased(group, index):
            return NOT_LEASED_TO_YOU
        self._table.drop_lease(group, index, "returned")
        return ""

    def reject(self, member: MemberId, sample: SampleId) -> bool:
        """Drops a leased sample of wrong weights; it is issued again. False if it is not leased."""
        group, index = self._table.find(member, sample)
        if group is None or not self._table.is_leased(group, index):
            return False
        self._table.drop_lease(group, index, "outdated")
        return True

    def release_member(self, member: MemberId, *, died: bool) -> list[PromptIndex]:
        """Revokes all leases of a member. Sets aside the prompts during which too many workers died; returns them."""
        set_aside: list[PromptIndex] = []
        for group in self._table.drop_leases_of(member, "lost"):
            group.losses += died
            if died and self.max_losses is not None and group.losses >= self.max_losses:
                self._table.drop_group(group, "lost", redo=False)
                error = f"{group.losses} workers died while they generated it, the last was {member}"
                self.state.set_aside[group.prompt] = SetAside(max(group.failures), "generate", error)
                set_aside.append(group.prompt)
        return set_aside

    # -- steps --------------------------------------------------------------------------------------------------

    def dispatch(self, *, final: bool, now: float) -> StepRecord:
        """Forms the batch of the next step: the oldest complete groups, at most `groups_per_step`."""
        state = self.state
        step = state.next_step
        chosen: list[Group] = []
        for version in sorted(state.ready_by_version):
            for prompt in state.ready_by_version[version]:
                if len(chosen) == self.groups_per_step:
                    break
                chosen.append(state.groups[prompt])
        record = StepRecord(prompts=[group.prompt for group in chosen], final=final, dispatched_at=now)
        _summarise(record, step, chosen)
        if record.staleness_max > self.max_staleness:
            raise InvalidTransition(f"the batch of step {step} has a sample {record.staleness_max} versions old")
        for group in chosen:
            self._table.dispatch(group)
        state.steps[step] = record
        state.next_step = StepIndex(step + 1)
        state.filtered_since_step = 0
        state.moves += 1
        self._drop_outdated()
        return record

    def _drop_outdated(self) -> None:
        """Drops every group that is too old for the next step: it is too old for all later steps too."""
        state, oldest_allowed = self.state, self.oldest_allowed
        for shelves in (state.ready_by_version, state.open_by_version):
            for version in [version for version in sorted(shelves) if version < oldest_allowed]:
                for prompt in list(shelves[version]):
                    self._table.drop_group(state.groups[prompt], "outdated", redo=True)

    def acknowledge(self, step: StepIndex, missing: tuple[PromptIndex, ...]) -> bool:
        """Records a step as trained, except the groups of `missing`. False if it was acknowledged before."""
        state = self.state
        if step < state.version:
            return False
        record = state.steps.get(step)
        if step > state.version or record is None:
            raise LocalProtocolError(f"step {step} was acknowledged, but the next step to train is {state.version}")
        absent = dict.fromkeys(missing)
        unknown = [prompt for prompt in absent if prompt not in record.prompts]
        if unknown:
            raise LocalProtocolError(f"step {step} reports missing prompts {unknown} that were not in its batch")
        if absent:
            for prompt in [prompt for prompt in record.prompts if prompt in absent]:
                self._table.drop_group(state.groups[prompt], "lost", redo=True)
            record.prompts = [prompt for prompt in record.prompts if prompt not in absent]
            _summarise(record, step, [state.groups[prompt] for prompt in record.prompts])
        for prompt in record.prompts:
            self._table.train(state.groups[prompt])
        state.version = Version(step + 1)
        state.moves += 1
        return True

    def settle(self, durable: StepIndex, last_resort: StepIndex | None = None) -> bool:
        """Records that steps below `durable` are in a checkpoint. False if that was recorded before.

        Records of steps below `last_resort` are dropped too; the others are undone if newer checkpoints are damaged.
        """
        state = self.state
        if durable > state.version:
            raise LocalProtocolError(f"a checkpoint of step {durable} was saved, but only {state.version} were trained")
        settled = durable if last_resort is None else min(durable, last_resort)
        if durable <= state.durable and settled <= state.settled:
            return False
        for step in [step for step in state.steps if step < settled]:
            for prompt in state.steps.pop(step).prompts:
                self._table.settle(prompt)
        state.durable, state.settled = max(state.durable, durable), max(state.settled, settled)
        state.moves += 1
        return True

    def reset_durable(self) -> None:
        """All processes are gone: only a trainer that loads a checkpoint shows which of them is intact."""
        self.state.durable = self.state.settled

    def found(self, step: StepIndex) -> None:
        """A trainer has started at this step, from its checkpoint."""
        self.state.durable = max(self.state.durable, step)

    def roll_back(self, step: StepIndex) -> int:
        """Undoes every step from `step` on; returns the number of prompts that are issued again."""
        state = self.state
        if step < state.settled:
            raise Stale(f"the trainer starts at step {step}, but a checkpoint of step {state.settled} was confirmed")
        redone = self._undo(step)
        self._drop_newer_than(Version(step))
        state.version, state.next_step = Version(step), step
        state.durable = min(state.durable, step)
        return redone

    def undo_after(self, step: StepIndex) -> None:
        """A new trainer starts at the due step: it keeps the batch of that step; batches of later steps are dropped."""
        self._undo(StepIndex(step + 1))
        self._drop_newer_than(Version(step))
        self.state.next_step = min(self.state.next_step, StepIndex(step + 1))

    def _undo(self, first: StepIndex) -> int:
        """Drops the batches of the steps from `first` on; their prompts are queued before all others."""
        state = self.state
        waiting, state.redo = state.redo, {}
        for step in [step for step in state.steps if step >= first]:
            for prompt in state.steps.pop(step).prompts:
                self._table.drop_group(state.groups[prompt], "lost", redo=True)
        redone = len(state.redo)
        state.redo.update(waiting)
        state.moves += 1
        return redone

    def _drop_newer_than(self, version: Version) -> None:
        """Drops groups with samples of versions above `version`: the trainer that produced those weights is gone."""
        waiting = [group for group in self.state.groups.values() if group.stage in ("open", "buffered")]
        for group in waiting:
            if max(group.versions) > version:
                self._table.drop_group(group, "outdated", redo=True)

    def lose_payloads(self) -> int:
        """Drops every group that is not trained: the payloads are gone. Returns the number of prompts."""
        state = self.state
        lost = [group for group in state.groups.values() if group.stage != "trained"]
        for group in lost:
            self._table.drop_group(group, "lost", redo=True)
        for step in [step for step in state.steps if step >= state.version]:
            del state.steps[step]
        state.next_step = StepIndex(state.version)
        state.moves += 1
        return len(lost)

    # -- audit --------------------------------------------------------------------------------------------------

    def conservation(self) -> int:
        """Samples issued minus samples accounted for; always 0."""
        return self.state.next_sample - sum(self.state.counts.values())

    def check(self) -> None:
        """Recounts everything from the rows and raises if an invariant is broken. Linear in size."""
        audit(self.state, group_size=self.group_size, max_staleness=self.max_staleness)
        self._table.check_index()

    def __repr__(self) -> str:
        state = self.state
        states = " ".join(f"{name}={count}" for name, count in state.counts.items())
        return (
            f"<Ledger version={state.version} next_step={state.next_step} durable={state.durable} {states} "
            f"awaiting={state.awaiting_count} redo={len(state.redo)} next_prompt={state.next_prompt}>"
        )


def _summarise(record: StepRecord, step: StepIndex, groups: Sequence[Group]) -> None:
    """Sets the figures of a batch that consists of these groups."""
    ages = [step - version for group in groups for version in group.versions]
    rewards = [reward for group in groups for reward in group.rewards]
    record.reward_mean = sum(rewards) / max(1, len(rewards))
    record.staleness_mean = sum(ages) / max(1, len(ages))
    record.staleness_max = max(ages, default=0)
    lengths = [length for group in groups for length in group.lengths]
    record.length_mean = sum(lengths) / max(1, len(lengths))
