"""The lines of steps: one each time a step is trained, with the figures of what was trained."""

# pyright: reportArgumentType=false
# Ids are written plainly here.

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from penstock.control.io.metric_lines import MetricLines
from penstock.wire import messages


class Written(list[Mapping[str, Any]]):
    write = list.append


def lines_to(written: Written) -> MetricLines:
    return MetricLines(written, SimpleNamespace(now=lambda: 0.0))


def acknowledged(step: int, member: str = "t") -> messages.AckStep:
    return messages.AckStep("p", member, step)


def test_a_step_that_is_trained_again_has_a_second_line(drive):
    d = drive()
    d.join("w")
    d.publish(0)
    written = Written()
    lines = lines_to(written)
    d.fill()
    d.train(0)
    lines.write_step(acknowledged(0), d.control)
    d.join(trainer="t2", step=0)
    d.publish(0, member="t2")
    for _ in range(2):
        d.deliver(d.lease(), rewards=(0.0, 0.0))
    d.train(0, "t2")
    for _ in range(2):
        lines.write_step(acknowledged(0, "t2"), d.control)
    assert [(line["step"], line["reward"]) for line in written] == [(0, 1.0), (0, 0.0)]


def test_the_first_line_after_a_restart_does_not_count_what_was_dropped_long_before(drive):
    d = drive(max_staleness=1, groups_per_step=1, steps=50, straggler_wait_s=0.0)
    d.join("w", "slow")
    d.publish(0)
    before, after = Written(), Written()
    lines = lines_to(before)
    for step in range(3):
        if step == 0:
            (half,) = d.lease(2, "slow")
            d.send(messages.Deliver("p", "slow", (d.rollout(half.samples[0], 0, ring="slow"),)))
        d.fill(1, version=step)
        d.train(step)
        d.publish(step + 1)
        lines.write_step(acknowledged(step), d.control)
    assert sum(line["dropped"] for line in before) == d.books.dropped_finished == 1
    lines = lines_to(after)
    lines.complete({"p": d.control}, [orjson.dumps(line) for line in before])
    d.fill(1, version=3)
    d.train(3)
    lines.write_step(acknowledged(3), d.control)
    assert [(line["step"], line["dropped"]) for line in after] == [(3, 0)]


@pytest.mark.parametrize(("lost", "figures"), [(0, (0.0, 0.0, 0)), (1, (1.0, 1.0, 1)), (None, (0.5, 0.5, 1))])
def test_groups_that_were_not_trained_do_not_count_in_the_figures_of_the_step(drive, lost, figures):
    d = drive(max_staleness=1, groups_per_step=2)
    d.join("w", "gone")
    d.publish(0)
    d.fill(2)
    old = d.lease(2, "w")
    d.deliver(old, "w", rewards=(1.0, 1.0))
    d.train(0)
    d.publish(1)
    new = d.lease(2, "gone", 1)
    d.deliver(new, "gone", rewards=(0.0, 0.0))
    d.batch(1)
    d.ack(1, missing=() if lost is None else ((old, new)[lost][0].prompt,))
    summary = d.control.state.recent[-1]
    assert summary.samples == (4 if lost is None else 2)
    assert (summary.reward_mean, summary.staleness_mean, summary.staleness_max) == figures


def test_a_step_without_any_group_has_no_reward(drive):
    d = drive(groups_per_step=1)
    d.join("w")
    d.fill()
    written = Written()
    d.ack(0, missing=(d.batch(0).groups[0].prompt,))
    lines_to(written).write_step(acknowledged(0), d.control)
    assert [(line["reward"], line["samples"], line["staleness_max"]) for line in written] == [(None, 0, 0)]
