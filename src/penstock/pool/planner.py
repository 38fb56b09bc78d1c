"""A plan is a pure function of a snapshot: requests first, by class and arrival; then generation, by share.

Promises:

- A request above generation takes devices from generation at once, and from a lower class what that is only promised;
  what another request holds, never.
- A pipeline with work and no worker comes before every pipeline that would grow, longest wait first. If all places it
  could use are occupied it takes turns: it keeps the place that becomes takeable first, where a worker becomes
  takeable when its turn is over. No worker is woken in a kept place, so it never becomes takeable later than promised.
- Between pipelines that are served a busy bundle moves only if the taker is short of its ideal share by a whole bundle,
  and either the giver is a whole bundle above its own and the move pays, or the taker is below its equal part and the
  giver above: made again after its moves are done, plans come to rest.
- Idle devices, and workers that have nothing to do, go to pipelines that can use them, where that pays. Waking stops
  where the remaining work cannot use more workers.
- Equal snapshots give equal plans; ties fall to the smaller name and the lower device.

Cost: one sort of the places per distinct (bundle, devices) pair and constant work per move; one pass over the places
for each pipeline that has to take turns.
"""

from __future__ import annotations

from penstock.pool.generation import Generation
from penstock.pool.occupancy import Occupancy
from penstock.pool.plan import Plan, Snapshot
from penstock.pool.requests import serve_requests


def make_plan(snapshot: Snapshot) -> Plan:
    """What to do next, given everything that is known."""
    occupancy = Occupancy(snapshot)
    serve_requests(snapshot, occupancy)
    Generation(snapshot, occupancy).share_out()
    return occupancy.plan()
