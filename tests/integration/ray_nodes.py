"""A Ray cluster of several nodes on this machine, for tests: starts on call, and ends with its standard input.

`python ray_nodes.py CPUS CPUS ...`: one node for each number, the first is the head. Prints one line of JSON with the
address and the pids of the raylets, the head's first. For each line on standard input it prints one with the actors
and placement groups that there are.
"""

from __future__ import annotations

import json
import sys

import ray  # type: ignore[import-not-found]
from ray.cluster_utils import Cluster  # type: ignore[import-not-found]
from ray.util import list_named_actors, placement_group_table  # type: ignore[import-not-found]


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    head, *others = map(int, sys.argv[1:])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": head, "include_dashboard": False})
    nodes = [cluster.head_node, *(cluster.add_node(num_cpus=cpus) for cpus in others)]
    say(address=cluster.address, raylets=[node.all_processes["raylet"][0].process.pid for node in nodes])
    for _ in sys.stdin:
        ray.init(address=cluster.address, log_to_driver=False)
        groups = [one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED"]
        say(actors=list_named_actors(all_namespaces=True), groups=groups)
        ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
