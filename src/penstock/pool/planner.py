"""A plan is a pure function of a snapshot: requests first, by class and arrival; then generation, by share.

Promises:

- A request above generation takes devices from generation at once, and promised devices from a lower class. It never
  takes devices that another request holds.
- A pipeline with work and no worker comes before every pipeline that would grow, longest wait first. If all places it
  could use are occupied it takes turns: it reserves the place that can be taken first, where a worker's place can be
  taken when its turn has ended. No worker is woken in a reserved place, so it is never available later than promised.
- Between pipelines that are served a busy bundle moves only if the taker is short of its ideal share by a whole bundle,
  and either the giver is a whole bundle above its own and the move pays, or the taker is below its equal part and the
  giver above: planning again after the moves are done converges.
- Idle devices, and those of workers without work, go to pipelines that can use them, where that pays. Waking stops
  where the remaining work cannot use more workers.
- Equal snapshots give equal plans; ties are resolved by the smaller name and the lower device.

Cost: one sort of the places per distinct (bundle, devices) pair and constant work per move; one pass over the places
for each pipeline that has to take turns.
"""

from __future__ import annotations

from penstock.pool.generation import Generation
from penstock.pool.occupancy import Occupancy
from penstock.pool.plan import Plan, Snapshot
from penstock.pool.requests import serve_requests


def make_plan(snapshot: Snapshot) -> Plan:
    """Returns the next moves."""
    occupancy = Occupancy(snapshot)
    serve_requests(snapshot, occupancy)
    Generation(snapshot, occupancy).distribute()
    return occupancy.plan()
