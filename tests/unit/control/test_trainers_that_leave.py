"""A trainer that unregisters has done its work, unless it reports a failure."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

import pytest

from penstock.records.ids import PipelineName
from penstock.wire import messages

P = PipelineName("p")


@pytest.mark.parametrize(("failed", "phase"), [(False, "complete"), (True, "draining")])
def test_the_last_step_is_safe_with_a_trainer_that_left_well_and_not_with_one_that_failed(drive, failed, phase):
    """It may have failed to write the last checkpoint. Another one trains the step again."""
    d = drive(steps=2)
    d.join("w")
    d.fill()
    d.train(0)
    d.checkpoint(1)
    d.fill()
    d.train(1)
    d.send(messages.Unregister(P, "t", "OSError: no such device", failed=failed))
    assert d.control.phase == phase
    if failed:
        d.join(trainer="t2", step=1)
        assert d.books.version == 1
    else:
        refusal = d.send(messages.Register(P, "t2", "trainer", step=1))
        assert isinstance(refusal, messages.Refused)
