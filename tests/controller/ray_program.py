"""A program on a Ray cluster of two hosts, both of them here: one worker on each, then the second host dies."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import meshloom as loom
from meshloom.controller import starting


def main() -> None:
    starting.PATIENCE = 20.0  # Ray takes its time to say that a host is dead
    hosts = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = hosts.add_node(num_cpus=1)
    ray.init(address=hosts.address, log_to_driver=False)
    try:
        loom.launch(workers=3, on="ray", timeout=20, threads=1)
    except loom.LaunchError as error:
        print("too many:", str(error).splitlines()[0], flush=True)
    with loom.launch(workers=2, on="ray", timeout=20, threads=1) as cluster:
        x = loom.arange(6, mesh=cluster.open_mesh(2))
        print("sum:", x.sum().item(), flush=True)
        pids = [each["pid"] for each in cluster.counters()]
        parents = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] for pid in pids}
        print("raylets:", len(parents), flush=True)
        hosts.remove_node(second, allow_graceful=False)
        start = time.monotonic()
        try:
            while time.monotonic() - start < 40:
                x.sum().item()
                time.sleep(0.05)
        except loom.MeshloomError as error:
            print("lost:", f"{time.monotonic() - start:.1f}", " | ".join(str(error).splitlines()), flush=True)
    print("alive:", sum(each["Alive"] for each in ray.nodes()), flush=True)  # it is the user's, and goes on
    ray.shutdown()
    hosts.shutdown()
    print("left:", [pid for pid in pids if os.path.exists(f"/proc/{pid}")], flush=True)


if __name__ == "__main__":
    sys.exit(main())
