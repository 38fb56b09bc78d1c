"""Recounts a ledger from its rows. Uses nothing of how the sample table is kept, only what it promises."""

from __future__ import annotations

from collections import Counter

from penstock.control.samples import NO_VERSION, NOT_LEASED, Group, LedgerState
from penstock.errors import InvalidTransition


def audit(state: LedgerState, *, group_size: int, max_staleness: int) -> None:
    """Raises InvalidTransition, naming the first promise found broken. Costs time linear in what is held."""
    found = dict.fromkeys(("leased", "delivered", "buffered", "dispatched", "trained"), 0)
    awaiting = 0
    for prompt, group in state.groups.items():
        _must(group.prompt == prompt, f"the group of prompt {group.prompt} is filed under {prompt}")
        for index, sample in enumerate(group.samples):
            if sample == NOT_LEASED:
                awaiting += 1
                _must(index in state.awaiting.get(prompt, ()), f"member {index} of prompt {prompt} awaits nothing")
                continue
            leased = group.stage == "open" and group.payloads[index] is None
            where = "leased" if leased else "delivered" if group.stage == "open" else group.stage
            found[where] += 1
            held = sample in state.leases.get(group.owners[index], {})
            _must(held == leased, f"sample {sample} is {where}, its owner's lease says otherwise")
        if group.stage in ("open", "buffered"):
            _audit_shelf(state, group, state.next_step - max_staleness)
    found["trained"] += state.settled_prompts * group_size
    for where, count in found.items():
        _must(state.counts[where] == count, f"{state.counts[where]} samples are booked as {where}, {count} found")
    _must(awaiting == state.awaiting_count, f"{state.awaiting_count} members booked as awaiting, {awaiting} found")
    _must(awaiting == sum(map(len, state.awaiting.values())), "the awaiting queue names members that do not await")
    _must(found["leased"] == sum(map(len, state.leases.values())), "leases are held for samples that do not exist")
    _must(state.counts["dropped"] == sum(state.dropped.values()), "dropped samples and their reasons disagree")
    missing = state.next_sample - sum(state.counts.values())
    _must(missing == 0, f"{missing} of {state.next_sample} issued samples are unaccounted for")
    promised = Counter(group.promised for group in state.groups.values() if group.stage == "open")
    _must(promised == state.promised_by_version, "the open groups and the versions they were leased under disagree")
    _audit_prompts(state)


def _audit_shelf(state: LedgerState, group: Group, oldest_allowed: int) -> None:
    delivered = [version for version in group.versions if version != NO_VERSION]
    _must(group.missing == len(group.samples) - len(delivered), f"{group} miscounts its missing members")
    _must(group.oldest == min(delivered, default=NO_VERSION), f"{group} misstates its oldest version")
    if delivered:
        shelves = state.open_by_version if group.stage == "open" else state.ready_by_version
        _must(group.prompt in shelves.get(group.oldest, {}), f"prompt {group.prompt} is not on its shelf")
        _must(group.oldest >= oldest_allowed, f"prompt {group.prompt} is kept although it is outdated")


def _audit_prompts(state: LedgerState) -> None:
    places = len(state.groups) + len(state.redo) + state.settled_prompts + state.filtered_prompts
    places += len(state.set_aside)
    _must(state.next_prompt == places, f"{state.next_prompt} prompts were taken, {places} are accounted for")
    _must(not state.groups.keys() & state.redo.keys(), "a prompt is both live and queued to be issued again")
    in_steps = sorted(prompt for step in state.steps.values() for prompt in step.prompts)
    given = sorted(prompt for prompt, group in state.groups.items() if group.stage in ("dispatched", "trained"))
    _must(in_steps == given, f"the steps hold prompts {in_steps}, the groups say {given}")
    ordered = state.settled <= state.durable <= state.version <= state.next_step
    steps = f"settled {state.settled}, durable {state.durable}, version {state.version}, next step {state.next_step}"
    _must(ordered, f"{steps} are out of order")


def _must(held: bool, otherwise: str) -> None:
    if not held:
        raise InvalidTransition(f"the sample table is broken: {otherwise}")
