"""Rotation, quarantine, healing, and the rule that some port is always asked."""

from __future__ import annotations

import pytest

from penstock.errors import InvalidTransition, LocalProtocolError
from penstock.payload.ports import CallFailed, CallSucceeded, HealPort, Ports, QuarantinePort


def test_ports_are_called_in_turn() -> None:
    ports = Ports([1, 2, 3])
    assert [ports.choose(0.0) for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]
    ports.check()


def test_a_sick_port_is_skipped_until_its_time() -> None:
    ports = Ports([1, 2], first_s=10)
    assert ports.handle(CallFailed(1, "reset"), 5.0) == [QuarantinePort(1, "reset", 15.0)]
    assert [ports.choose(14.9) for _ in range(3)] == [2, 2, 2]
    assert ports.quarantined(14.9) == {1: "reset"}
    assert ports.quarantined(15.0) == {}
    assert {ports.choose(15.0) for _ in range(2)} == {1, 2}


def test_quarantine_grows_with_failures_in_a_row_and_ends_with_a_success() -> None:
    ports = Ports([1], first_s=1, cap_s=5)
    until = [ports.handle(CallFailed(1, "timed_out"), 0.0)[0] for _ in range(4)]
    assert [effect.until for effect in until if isinstance(effect, QuarantinePort)] == [1, 2, 4, 5]
    assert ports.handle(CallSucceeded(1), 0.0) == [HealPort(1, 4)]
    assert ports.handle(CallSucceeded(1), 0.0) == []
    assert ports.quarantined(0.0) == {}


def test_when_all_are_sick_the_first_to_recover_is_asked_at_once() -> None:
    ports = Ports([1, 2, 3], first_s=10)
    for port, when in ((2, 0.0), (1, 1.0), (3, 2.0)):
        ports.handle(CallFailed(port, "refused"), when)
    assert ports.choose(3.0) == 2


def test_a_port_already_tried_for_the_payload_is_avoided() -> None:
    ports = Ports([1, 2, 3], first_s=10)
    assert ports.choose(0.0, avoid={1}) == 2
    ports.handle(CallFailed(2, "reset"), 0.0)
    ports.handle(CallFailed(3, "reset"), 1.0)
    assert ports.choose(2.0, avoid={1}) == 2  # sick, but not tried yet
    assert ports.choose(2.0, avoid={1, 2, 3}) == 1


@pytest.mark.parametrize("ports", [[], [1, 1]])
def test_a_server_has_ports(ports: list[int]) -> None:
    with pytest.raises(LocalProtocolError):
        Ports(ports)


def test_an_unknown_port_is_a_bug() -> None:
    with pytest.raises(InvalidTransition):
        Ports([1]).handle(CallSucceeded(2), 0.0)
