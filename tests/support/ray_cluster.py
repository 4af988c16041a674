"""A real Ray cluster, all of whose machines are this one.

with ray_cluster(2, cpus=2) as cluster:
    with kernel_with("ray", **cluster.environment) as kernel:
        ...                                               # RAY_ADDRESS leads to it

Ray wants its cluster in the process that made it, and leaves threads, handlers and files there: that process is one of
its own, below.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.daemons import MARK
from tests.support.hygiene import describe, gone_within, marked
from tests.support.kernels import ROOT
from tests.support.libraries import library

PLACE = "NBTRAIN_TEST_PLACE"
"""In the environment of each machine's processes: its number."""
ENDED = 10.0
"""Seconds in which Ray's processes are gone."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    environment: dict[str, str]
    """of a kernel that is to join it"""
    _process: subprocess.Popen[str]

    def processes(self) -> list[psutil.Process]:
        """Ray's own, and what they have started."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def tell(self, **order: Any) -> Any:
        """Have the cluster's process do something: `tell(add=2)`, `tell(remove=1)`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        while True:
            line = self._process.stdout.readline()
            assert line, "the cluster's process has ended"
            if line.startswith("{"):
                return json.loads(line)


@contextmanager
def ray_settings() -> Iterator[dict[str, str]]:
    """The environment of a Ray that keeps its files, and its secrets, to itself."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", ""), library("ray")]))
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short, as sockets are below it
    settings = {
        "PYTHONPATH": path,
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        yield settings
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_cluster(machines: int, cpus: int = 2) -> Iterator[RayCluster]:
    with ray_settings() as settings:
        mark = secrets.token_hex(16)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_cluster"], env=os.environ | settings | {MARK: mark},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            found = RayCluster(settings, process)
            address = found.tell(cpus=cpus, machines=machines)["address"]
            settings["RAY_ADDRESS"] = address
            yield found
        finally:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
            left = gone_within(ENDED, lambda: [describe(one) for one in marked(MARK, mark)])
            for one in marked(MARK, mark):
                one.kill()
    assert not left, f"Ray left behind: {left}"


def _serve() -> None:
    """In the process of the cluster."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=False)
    machines: dict[int, Any] = {}
    cpus = 1
    try:
        for line in sys.stdin:
            order = json.loads(line)
            cpus = order.get("cpus", cpus)
            for _ in range(order.get("machines", 0)):
                number = len(machines)
                place = {PLACE: str(number)}
                machines[number] = cluster.add_node(num_cpus=cpus, include_dashboard=False, env_vars=place)
            if "remove" in order:
                cluster.remove_node(machines[order["remove"]], allow_graceful=False)
            cluster.wait_for_nodes()
            print(json.dumps({"address": cluster.address}), flush=True)
    finally:
        theirs = psutil.Process().children(recursive=True)
        cluster.shutdown()
        for one in theirs:
            if one.is_running():
                one.kill()


if __name__ == "__main__":
    _serve()
