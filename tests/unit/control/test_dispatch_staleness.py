"""The last line of defence: no step is given a sample that is too old, whatever went wrong before."""

import copy

import pytest

from penstock.errors import InvalidTransition


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


def test_the_lengths_of_dropped_samples_are_counted(drive):
    driver = drive(max_staleness=1, groups_per_step=2)
    driver.join("w")
    driver.publish(0)
    driver.fill()
    ledger = copy.deepcopy(driver.control.ledger)
    group = next(iter(ledger.state.groups.values()))
    expected = sum(group.lengths)
    ledger._table.drop_group(group, "outdated", redo=True)
    assert (ledger.state.dropped_finished, ledger.state.dropped_length) == (len(group.samples), expected)
