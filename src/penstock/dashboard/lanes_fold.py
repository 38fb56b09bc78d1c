"""Folds the pool's events of the journal into lanes: which process had which device, and when."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

MOST_STAYS = 4000
MOST_MOVES = 200
PRIORITIES: Final = ("initialising", "training", "scoring", "generating")


class Stay(NamedTuple):
    """A period in which one process used one device for one activity. `until` is None while it lasts."""

    device: int
    pipeline: str
    member: str
    doing: str
    since: float
    until: float | None


class Move(NamedTuple):
    """An order to a worker, or devices granted to a trainer."""

    at: float
    pipeline: str
    member: str
    what: str
    devices: tuple[int, ...]


class LanesFold:
    """Takes the pool's events in order. Journals that lack the pool's decisions leave it empty."""

    def __init__(self) -> None:
        self.past: deque[Stay] = deque(maxlen=MOST_STAYS)
        self.present: dict[int, Stay] = {}
        self.moves: deque[Move] = deque(maxlen=MOST_MOVES)
        self.busy_s: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """By device and activity, of ended stays."""
        self.began_at: float | None = None
        self.latest_at = 0.0
        self.events = 0
        self._pipelines: dict[str, str] = {}
        self._requests: dict[tuple[str, int], str] = {}
        self._granted: dict[tuple[str, int], tuple[int, ...]] = {}
        self._orders: dict[int, tuple[str, str, tuple[int, ...]]] = {}

    def __repr__(self) -> str:
        return f"<LanesFold {len(self.present)} devices in use, {len(self.past)} past stays>"

    def take(self, at: float, event: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
        self.events += 1
        self.began_at = at if self.began_at is None else self.began_at
        self.latest_at = at
        member = event.get("member", "")
        if member and "pipeline" in event:
            self._pipelines[member] = event["pipeline"]
        match event["type"]:
            case "pool_devices_requested":
                if event.get("release") is not None:
                    self._free(at, self._granted.pop((member, event["release"]), ()), member)
                self._requests[member, event["request"]] = PRIORITIES[event["priority"]]
            case "pool_devices_released" | "pool_request_cancelled":
                self._requests.pop((member, event["request"]), None)
                self._free(at, self._granted.pop((member, event["request"]), ()), member)
            case "pool_move_done" | "pool_move_failed":
                self._moved(at, event)
            case "pool_life_began":
                for stay in list(self.present.values()):
                    self._free(at, [stay.device], stay.member)
                self._requests.clear()
                self._granted.clear()
            case "pool_member_lost":
                self._free(at, [stay.device for stay in self.present.values() if stay.member == member], member)
                for table in (self._requests, self._granted):
                    for key in [key for key in table if key[0] == member]:
                        del table[key]
        self._decided(at, notes)

    def _moved(self, at: float, event: Mapping[str, Any]) -> None:
        member, action, devices = self._orders.pop(event["order"], ("", "", ()))
        if event["type"] == "pool_move_done" and action == "wake":
            self._occupy(at, devices, member, "generating")
        elif event["type"] == "pool_move_done" or event.get("released"):
            self._free(at, devices, member)

    def _decided(self, at: float, notes: Mapping[str, Any]) -> None:
        for member, number, action, devices in notes.get("ordered", ()):
            self._orders[number] = (member, action, tuple(devices))
            self._occupy(at, devices, member, "waking" if action == "wake" else "leaving")
            self._note(at, member, action, devices)
        for member, request, devices in notes.get("granted", ()):
            doing = self._requests.pop((member, request), "training")
            self._granted[member, request] = tuple(devices)
            self._occupy(at, devices, member, doing)
            self._note(at, member, doing, devices)
        for member, _ in notes.get("fenced", ()):
            mine = [stay.device for stay in self.present.values() if stay.member == member]
            self._occupy(at, mine, member, "fenced")
            self._note(at, member, "fenced", mine)
        while len(self._orders) > MOST_MOVES:  # orders that were never answered
            del self._orders[next(iter(self._orders))]

    def _note(self, at: float, member: str, what: str, devices: Iterable[int]) -> None:
        self.moves.append(Move(at, self._pipelines.get(member, ""), member, what, tuple(devices)))

    def _occupy(self, at: float, devices: Iterable[int], member: str, doing: str) -> None:
        for device in devices:
            self._end(at, device)
            self.present[device] = Stay(device, self._pipelines.get(member, ""), member, doing, at, None)

    def _free(self, at: float, devices: Iterable[int], member: str) -> None:
        for device in list(devices):
            if device in self.present and self.present[device].member == member:
                self._end(at, device)

    def _end(self, at: float, device: int) -> None:
        stay = self.present.pop(device, None)
        if stay is not None:
            self.past.append(stay._replace(until=at))
            self.busy_s[device][stay.doing] += at - stay.since
