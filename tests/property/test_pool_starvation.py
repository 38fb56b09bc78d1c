"""No open pipeline starves: the stated bound holds for random mixes of pipelines, bundles, weights and faults."""

from __future__ import annotations

import heapq
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pool import events as ev
from penstock.pool.places import places
from penstock.pool.pool import Pool
from penstock.pool.settings import PoolSection
from penstock.records.ids import MemberId, PipelineName
from penstock.records.pool import DeviceId, Topology
from profiles import examples

SETTINGS: dict[str, Any] = {
    "turn_s": 5.0,
    "wake_s": 4.0,
    "drain_s": 3.0,
    "sleep_s": 3.0,
    "report_s": 2.0,
    "fence_s": 4.0,
    "demand_lease_s": 30.0,
    "bench_s": 2.0,
}


class Crowd:
    """Pipelines that always have work. The first is healthy; workers of the others may be slow, failing or hung."""

    def __init__(self, pool: Pool, random: Random, faulty: set[str]) -> None:
        self.pool = pool
        self.random = random
        self.faulty = faulty
        self.now = 0.0
        self.answers: list[tuple[float, int, ev.Event]] = []
        self.fenced = 0

    def tell(self, event: ev.Event) -> None:
        effects = self.pool.handle(event, self.now)
        self.pool.check()
        for effect in effects:
            if isinstance(effect, ev.WakeWorker | ev.SleepWorker):
                self._answer(effect)
            elif isinstance(effect, ev.FenceMember):
                self.fenced += 1
                self._later(self.random.uniform(0, 6), ev.MemberLost(effect.pipeline, effect.member))

    def _answer(self, effect: ev.WakeWorker | ev.SleepWorker) -> None:
        number = effect.order.number
        done = ev.MoveDone(effect.pipeline, effect.member, number)
        luck = self.random.random() if effect.pipeline in self.faulty else 1.0
        if luck < 0.2:
            return
        if luck < 0.4:
            released = self.random.random() < 0.5
            self._later(1.0, ev.MoveFailed(effect.pipeline, effect.member, number, released, "injected"))
        else:
            self._later(self.random.uniform(0, effect.order.within_s), done)

    def _later(self, delay_s: float, event: ev.Event) -> None:
        heapq.heappush(self.answers, (self.now + delay_s, self.random.getrandbits(60), event))

    def second(self) -> None:
        end = self.now + 1.0
        while self.answers and self.answers[0][0] <= end:
            self.now, _, event = heapq.heappop(self.answers)
            self.tell(event)
        self.now = end
        self.tell(ev.TimePassed())


@settings(max_examples=examples(25), deadline=None)
@given(
    nodes=st.sampled_from([(2,), (4,), (8,), (4, 4)]),
    shapes=st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.0, 20.0])),
        min_size=2,
        max_size=7,
    ),
    faulty=st.sets(st.integers(1, 6), max_size=3),
    payback=st.sampled_from([0.0, 30.0]),
    seed=st.integers(0, 2**16),
)
def test_every_healthy_pipeline_is_served_within_the_bound(nodes, shapes, faulty, payback, seed):
    topology = Topology(nodes)
    inference = tuple(DeviceId(device) for device in range(topology.device_count))
    pool = Pool(topology, PoolSection(payback=payback, **SETTINGS))
    random = Random(seed)
    names = [PipelineName(f"p{number}") for number in range(len(shapes))]
    crowd = Crowd(pool, random, {names[number] for number in faulty if number < len(names)})
    for name, (bundle, weight, start_s) in zip(names, shapes, strict=True):
        bundle = bundle if len(places(topology, inference, bundle)) else 1
        crowd.tell(ev.PipelineOpened(name, inference, bundle=bundle, weight=weight, start_s=start_s))
        for number in range(topology.device_count // bundle + 1):
            crowd.tell(ev.WorkerJoined(name, MemberId(f"{name}-{number}")))
        crowd.tell(ev.DemandCounted(name, random.choice([3, 100, 10_000]), 0))
    bound_s = pool.settings.longest_wait_s(
        pipelines_ahead=len(names) - 1,
        heaviest=max(weight for _, weight, _ in shapes),
        start_s=max(start_s for _, _, start_s in shapes),
    )
    served: set[str] = set()
    for _ in range(int(2 * bound_s)):
        crowd.second()
        for share in pool.status(crowd.now).shares:
            if share.awake:
                served.add(share.pipeline)
            if share.pipeline not in crowd.faulty:
                assert share.waited_s <= bound_s, f"{share.pipeline} waited {share.waited_s:.0f} s, bound {bound_s:.0f}"
    assert served >= set(names) - crowd.faulty
