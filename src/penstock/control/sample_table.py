"""The rows of the ledger, and all operations that change them.

Only this module creates samples, changes their state and removes them, and only `_move` changes the counts. The ledger
decides which operation to apply.
"""

from __future__ import annotations

from typing import cast

from penstock.control.samples import MOVES, NO_VERSION, NOT_LEASED, Group, LedgerState, Reason, Redo, State
from penstock.errors import InvalidTransition
from penstock.records.ids import MemberId, PromptIndex, SampleId, Version
from penstock.records.payload import PayloadRef
from penstock.records.prompt import PromptLease
from penstock.records.rollout import Rollout


class SampleTable:
    def __init__(self, state: LedgerState, group_size: int) -> None:
        self.state = state
        self.group_size = group_size
        self.released: list[PayloadRef] = []
        """Payloads of dropped samples since the owner last cleared this list."""
        self._group_of: dict[SampleId, Group] = {
            sample: group for group in state.groups.values() for sample in group.samples if sample != NOT_LEASED
        }

    # -- queries ------------------------------------------------------------------------------------------------

    def find(self, member: MemberId, sample: SampleId) -> tuple[Group | None, int]:
        """The group of a sample and its index in it, if it was leased to this member and still exists."""
        group = self._group_of.get(sample)
        if group is None:
            return None, -1
        index = group.samples.index(sample)
        return (group, index) if group.owners[index] == member else (None, -1)

    def group_of(self, sample: SampleId) -> Group:
        """The group of a sample that is held."""
        return self._group_of[sample]

    def state_of(self, sample: SampleId) -> State | None:
        """The state of a sample; None once it is dropped, or trained and durable (then only the journal has it)."""
        group = self._group_of.get(sample)
        if group is None:
            return None
        if group.stage != "open":
            return group.stage
        return "leased" if group.payloads[group.samples.index(sample)] is None else "delivered"

    @staticmethod
    def is_leased(group: Group, index: int) -> bool:
        return group.stage == "open" and group.payloads[index] is None

    # -- forward ------------------------------------------------------------------------------------------------

    def open_group(self, prompt: PromptIndex, redo: Redo, member: MemberId, version: Version) -> Group:
        """Creates a group without leases; `version` is the one that its first worker serves."""
        state, size = self.state, self.group_size
        group = Group(
            prompt=prompt,
            attempt=redo.attempt,
            failures=list(redo.failures) or [0] * size,
            losses=redo.losses,
            stage="open",
            samples=[NOT_LEASED] * size,
            owners=[member] * size,
            payloads=[None] * size,
            rewards=[0.0] * size,
            versions=[NO_VERSION] * size,
            lengths=[0] * size,
            missing=size,
            promised=version,
        )
        state.groups[prompt] = group
        state.promised_by_version[version] = state.promised_by_version.get(version, 0) + 1
        return group

    def lease(self, group: Group, member: MemberId, members: list[int], min_version: Version) -> PromptLease:
        """Issues new samples for some members of an open group."""
        state = self.state
        first = state.next_sample
        samples = cast(tuple[SampleId, ...], tuple(range(first, first + len(members))))
        state.next_sample = SampleId(first + len(members))
        held = state.leases.setdefault(member, {})
        for index, sample in zip(members, samples, strict=True):
            group.samples[index] = sample
            group.owners[index] = member
            self._group_of[sample] = group
            held[sample] = None
        self._move(None, "leased", len(members))
        return PromptLease(group.prompt, group.attempt, samples, tuple(members), min_version)

    def accept(self, group: Group, index: int, rollout: Rollout) -> None:
        """leased -> delivered."""
        group.payloads[index] = rollout.payload
        group.rewards[index] = rollout.reward
        group.versions[index] = rollout.version
        group.lengths[index] = rollout.length
        group.missing -= 1
        self._end_lease(group, index)
        if group.oldest == NO_VERSION or rollout.version < group.oldest:
            open_groups = self.state.open_by_version
            self._remove_from_index(open_groups, group)
            group.oldest = rollout.version
            open_groups.setdefault(group.oldest, {})[group.prompt] = None
        self._move("leased", "delivered", 1)

    def buffer(self, group: Group) -> None:
        """delivered -> buffered, the whole group."""
        self._close(group)
        group.stage = "buffered"
        self.state.ready_by_version.setdefault(group.oldest, {})[group.prompt] = None
        self._move("delivered", "buffered", self.group_size)

    def dispatch(self, group: Group) -> None:
        """buffered -> dispatched."""
        self._remove_from_index(self.state.ready_by_version, group)
        group.stage = "dispatched"
        self._move("buffered", "dispatched", self.group_size)

    def train(self, group: Group) -> None:
        """dispatched -> trained. Keeps only the fields that a rollback needs."""
        group.stage = "trained"
        group.payloads, group.rewards, group.versions, group.lengths = [], [], [], []
        self._move("dispatched", "trained", self.group_size)

    def settle(self, prompt: PromptIndex) -> None:
        """Removes the row of a trained group that can no longer be undone; its count stays."""
        for sample in self.state.groups.pop(prompt).samples:
            del self._group_of[sample]
        self.state.settled_prompts += 1

    # -- dropping -----------------------------------------------------------------------------------------------

    def drop_lease(self, group: Group, index: int, reason: Reason) -> None:
        """Drops one leased sample; its member of the group awaits a new one."""
        state = self.state
        self._end_lease(group, index)
        del self._group_of[group.samples[index]]
        group.samples[index] = NOT_LEASED
        state.awaiting.setdefault(group.prompt, []).append(index)
        state.awaiting_count += 1
        self._move("leased", "dropped", 1, reason)

    def drop_leases_of(self, member: MemberId, reason: Reason) -> list[Group]:
        """Drops every sample leased to a member; returns their groups, each once."""
        groups: dict[PromptIndex, Group] = {}
        for sample in list(self.state.leases.get(member, ())):
            group = groups.setdefault(self._group_of[sample].prompt, self._group_of[sample])
            self.drop_lease(group, group.samples.index(sample), reason)
        return list(groups.values())

    def drop_group(self, group: Group, reason: Reason, *, redo: bool) -> None:
        """Drops a whole group in any stage; with `redo` its prompt is queued to be issued again."""
        state = self.state
        stage = group.stage
        if stage == "open":
            leased = delivered = 0
            for index, sample in enumerate(group.samples):
                if sample == NOT_LEASED:
                    continue
                if group.payloads[index] is None:
                    self._end_lease(group, index)
                    leased += 1
                else:
                    delivered += 1
            state.awaiting_count -= len(state.awaiting.pop(group.prompt, ()))
            self._close(group)
            self._move("leased", "dropped", leased, reason)
            self._move("delivered", "dropped", delivered, reason)
        else:
            if stage == "buffered":
                self._remove_from_index(state.ready_by_version, group)
            self._move(stage, "dropped", self.group_size, reason)
        if reason == "outdated":
            pairs = zip(group.lengths, group.payloads, strict=True)
            finished = [length for length, payload in pairs if payload is not None]
            state.dropped_finished += len(finished)
            state.dropped_length += sum(finished)
        self.released.extend(payload for payload in group.payloads if payload is not None)
        for sample in group.samples:
            if sample != NOT_LEASED:
                del self._group_of[sample]
        del state.groups[group.prompt]
        if redo:
            state.redo[group.prompt] = Redo(group.attempt + 1, tuple(group.failures), group.losses)

    # -- indices ------------------------------------------------------------------------------------------------

    def _end_lease(self, group: Group, index: int) -> None:
        owner = group.owners[index]
        held = self.state.leases[owner]
        del held[group.samples[index]]
        if not held:
            del self.state.leases[owner]

    def _close(self, group: Group) -> None:
        """Removes a group from the indices of open groups."""
        promised = self.state.promised_by_version
        promised[group.promised] -= 1
        if not promised[group.promised]:
            del promised[group.promised]
        self._remove_from_index(self.state.open_by_version, group)

    @staticmethod
    def _remove_from_index(by_version: dict[Version, dict[PromptIndex, None]], group: Group) -> None:
        prompts = by_version.get(group.oldest)
        if prompts is not None:
            prompts.pop(group.prompt, None)
            if not prompts:
                del by_version[group.oldest]

    def _move(self, source: State | None, target: State, samples: int, reason: Reason | None = None) -> None:
        if (source, target) not in MOVES:
            raise InvalidTransition(f"a sample cannot go from {source} to {target}")
        state = self.state
        if source is not None:
            state.counts[source] -= samples
        state.counts[target] += samples
        if reason is not None:
            state.dropped[reason] += samples
        state.moves += samples

    def check_index(self) -> None:
        """Raises if the index of samples does not match the groups."""
        rows = {sample for group in self.state.groups.values() for sample in group.samples if sample != NOT_LEASED}
        if self._group_of.keys() != rows:
            raise InvalidTransition("the sample table is broken: the index of samples does not match the groups")
