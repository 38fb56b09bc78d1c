"""The last line of defence: no step is given a sample that is too old, whatever went wrong before."""

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.control.io.metric_lines import Lengths, MetricLines
from penstock.errors import InvalidTransition
from penstock.wire import messages


def test_a_batch_with_a_sample_that_is_too_old_is_never_dispatched(drive):
    driver = drive(max_staleness=1, groups_per_step=2)
    driver.join("w")
    driver.publish(0)
    driver.fill()
    ledger = copy.deepcopy(driver.control.ledger)
    for group in ledger.state.groups.values():  # as if `_drop_outdated` had missed them
        group.versions = [version - 2 for version in group.versions]
    with pytest.raises(InvalidTransition, match="2 versions old"):
        ledger.dispatch(final=False, now=0.0)
    for group in ledger.state.groups.values():
        group.versions = [version + 2 for version in group.versions]
    ledger.dispatch(final=False, now=0.0)


def test_the_lengths_of_outdated_samples_are_counted_and_those_of_filtered_ones_are_not(drive):
    driver = drive(max_staleness=1, groups_per_step=2)
    driver.join("w")
    driver.publish(0)
    driver.fill()
    ledger = copy.deepcopy(driver.control.ledger)
    outdated, filtered = ledger.state.groups.values()
    expected = sum(outdated.lengths)
    ledger._table.drop_group(filtered, "filtered", redo=False)
    ledger._table.drop_group(outdated, "outdated", redo=True)
    assert (ledger.state.dropped_finished, ledger.state.dropped_length) == (len(outdated.samples), expected)


class Written(list[Mapping[str, Any]]):
    write = list.append


def test_a_step_shows_the_lengths_of_what_came_too_late_beside_what_it_trained(drive):
    """Long samples are outdated more often than short ones, and nothing showed how much longer they were."""
    d = drive(max_staleness=1, groups_per_step=1, straggler_wait_s=0.0)
    d.join("w", "slow")
    d.publish(0)
    late = d.lease(2, member="slow")
    for step in range(3):
        d.fill(version=step)
        d.train(step)
        d.publish(step + 1)
    rollouts = [msgspec.structs.replace(d.rollout(sample, 0, ring="slow"), length=40) for sample in late[0].samples]
    request = messages.Deliver("p", "slow", tuple(rollouts))  # type: ignore[arg-type]
    answer = d.send(request)
    assert answer.refused == late[0].samples
    written = Written()
    lines = MetricLines(written, SimpleNamespace(now=lambda: 0.0))  # type: ignore[arg-type]
    lines.note_delivery(request, answer.refused, d.control.ledger.oldest_allowed)
    wrong = messages.Deliver("p", "slow", tuple(msgspec.structs.replace(one, version=3) for one in rollouts))  # type: ignore[arg-type]
    lines.note_delivery(wrong, answer.refused, d.control.ledger.oldest_allowed)  # refused, but not for their age
    for step in (1, 2):
        lines.write_step(messages.AckStep("p", "t", step), d.control)  # type: ignore[arg-type]
    assert [(line["dropped"], line.get("dropped_length_mean")) for line in written] == [(2, 40.0), (0, None)]
    assert [line["generated_length_mean"] for line in written] == [22.5, 5.0]  # two samples of 5 trained in each step
    assert lines.biased() == {
        "p": "trained samples are 70.0% shorter than generated ones, of which 33% were dropped as outdated: raise "
        "train.straggler_wait_s or train.max_staleness (last 32 steps)"
    }


@pytest.mark.parametrize(("length", "shown"), [(101, False), (130, True), (70, True)])
def test_a_difference_of_lengths_is_shown_from_two_percent_on(length: int, shown: bool) -> None:
    assert bool(Lengths(90, 90 * 100.0, 10, 10.0 * length).bias()) == shown
    assert not Lengths(90, 90 * 100.0).bias()
    assert not Lengths().bias()
