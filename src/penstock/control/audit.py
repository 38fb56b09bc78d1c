"""Recounts a ledger from its rows. Uses only the invariants of the sample table, not its implementation."""

from __future__ import annotations

from collections import Counter

from penstock.control.samples import NO_VERSION, NOT_LEASED, Group, LedgerState
from penstock.errors import InvalidTransition


def audit(state: LedgerState, *, group_size: int, max_staleness: int) -> None:
    """Raises InvalidTransition for the first broken invariant. Takes time linear in the number of samples held."""
    found = dict.fromkeys(("leased", "delivered", "buffered", "dispatched", "trained"), 0)
    awaiting = 0
    for prompt, group in state.groups.items():
        _require(group.prompt == prompt, f"the group of prompt {group.prompt} is stored under {prompt}")
        for index, sample in enumerate(group.samples):
            if sample == NOT_LEASED:
                awaiting += 1
                _require(index in state.awaiting.get(prompt, ()), f"member {index} of prompt {prompt} is not queued")
                continue
            leased = group.stage == "open" and group.payloads[index] is None
            where = "leased" if leased else "delivered" if group.stage == "open" else group.stage
            found[where] += 1
            held = sample in state.leases.get(group.owners[index], {})
            _require(held == leased, f"sample {sample} is {where}, which contradicts the leases of its owner")
        if group.stage in ("open", "buffered"):
            _audit_index(state, group, state.next_step - max_staleness)
    found["trained"] += state.settled_prompts * group_size
    for where, count in found.items():
        _require(state.counts[where] == count, f"{state.counts[where]} samples are counted as {where}, {count} found")
    _require(awaiting == state.awaiting_count, f"{state.awaiting_count} members counted as awaiting, {awaiting} found")
    _require(awaiting == sum(map(len, state.awaiting.values())), "the awaiting queue has members that do not await")
    _require(found["leased"] == sum(map(len, state.leases.values())), "leases are held for samples that do not exist")
    _require(state.counts["dropped"] == sum(state.dropped.values()), "dropped samples and their reasons disagree")
    missing = state.next_sample - sum(state.counts.values())
    _require(missing == 0, f"{missing} of {state.next_sample} issued samples are unaccounted for")
    promised = Counter(group.promised for group in state.groups.values() if group.stage == "open")
    _require(promised == state.promised_by_version, "the open groups and the versions they were leased under disagree")
    _audit_prompts(state)


def _audit_index(state: LedgerState, group: Group, oldest_allowed: int) -> None:
    delivered = [version for version in group.versions if version != NO_VERSION]
    _require(group.missing == len(group.samples) - len(delivered), f"{group} miscounts its missing members")
    _require(group.oldest == min(delivered, default=NO_VERSION), f"{group} misstates its oldest version")
    if delivered:
        index = state.open_by_version if group.stage == "open" else state.ready_by_version
        _require(group.prompt in index.get(group.oldest, {}), f"prompt {group.prompt} is not in its index by version")
        _require(group.oldest >= oldest_allowed, f"prompt {group.prompt} is kept although it is outdated")


def _audit_prompts(state: LedgerState) -> None:
    places = len(state.groups) + len(state.redo) + state.settled_prompts + state.filtered_prompts
    places += len(state.set_aside)
    _require(state.next_prompt == places, f"{state.next_prompt} prompts were taken, {places} are accounted for")
    _require(not state.groups.keys() & state.redo.keys(), "a prompt is both live and queued to be issued again")
    in_steps = sorted(prompt for step in state.steps.values() for prompt in step.prompts)
    given = sorted(prompt for prompt, group in state.groups.items() if group.stage in ("dispatched", "trained"))
    _require(in_steps == given, f"the steps hold prompts {in_steps}, the groups {given}")
    ordered = state.settled <= state.durable <= state.version <= state.next_step
    steps = f"settled {state.settled}, durable {state.durable}, version {state.version}, next step {state.next_step}"
    _require(ordered, f"{steps} are out of order")


def _require(held: bool, otherwise: str) -> None:
    if not held:
        raise InvalidTransition(f"the sample table is broken: {otherwise}")
