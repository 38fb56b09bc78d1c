"""The places a bundle may occupy: contiguous, and inside one node (or exactly filling several).

Places of one size never overlap, and places of sizes that divide each other nest, so that small bundles packed
together leave room for large ones.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from penstock.records.pool import DeviceId, Topology


@lru_cache(maxsize=1024)
def places(topology: Topology, allowed: tuple[DeviceId, ...], size: int) -> np.ndarray:
    """All places of `size` devices within `allowed`, one per row, in ascending order. Read-only."""
    usable = np.zeros(topology.device_count, dtype=bool)
    usable[list(allowed)] = True
    rows: list[range] = []
    starts = [0, *np.cumsum(topology.nodes).tolist()]
    node = 0
    while node < len(topology.nodes):
        begin, end = starts[node], starts[node + 1]
        node += 1
        if end - begin >= size:
            for low, high in _runs(usable, begin, end):
                aligned = low + (begin - low) % size
                first = aligned if (high - aligned) // size == (high - low) // size else low
                rows.extend(range(at, at + size) for at in range(first, high - size + 1, size))
        else:
            # A bundle larger than a node takes whole neighbouring nodes, or has no place here.
            last = node
            while last < len(topology.nodes) and starts[last] - begin < size:
                last += 1
            if starts[last] - begin == size and usable[begin : starts[last]].all():
                rows.append(range(begin, starts[last]))
                node = last
    found = np.array([list(row) for row in rows], dtype=np.int64).reshape(len(rows), size)
    found.setflags(write=False)
    return found


def _runs(usable: np.ndarray, begin: int, end: int) -> list[tuple[int, int]]:
    """Maximal stretches of usable devices in [begin, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], usable[begin:end], [False])).astype(np.int8)))
    return [(begin + int(low), begin + int(high)) for low, high in zip(edges[::2], edges[1::2], strict=True)]
