"""psdist.ray.run on a cluster of several nodes on this machine, with nodes that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import psdist
from psdist.errors import ConfigurationError, LaunchFailedError, WaitTimeoutError

ray = pytest.importorskip("ray", reason="needs Ray: pip install ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")  # A part of Ray.
from ray.util.placement_group import remove_placement_group  # noqa: E402 - as above

import psdist.ray  # noqa: E402 - after the check that Ray is installed
from psdist.ray.run import reserve  # noqa: E402 - as above

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

_STEPS, _STOP_AT, _SIZE = 60, 20, 100_000
#: Ray notices a dead node after about three of these, and by default after some 20 s.
_HEALTH = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
_ON_HEAD = {"CPU": 1, "head": 1}
_ONE_PER_NODE = {"CPU": 1, "server": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head node with room for workers and one server."""
    head = {"num_cpus": 8, "resources": {"head": 3, "server": 1, "worker": 1}, "_system_config": _HEALTH}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head | {"include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Gate:
    """Events by name, for the test and the workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, threading.Event] = {}
        self._notes: dict[str, Any] = {}

    def _event(self, name: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())

    def open(self, name: str, note: Any = None) -> None:
        self._notes[name] = note
        self._event(name).set()

    def wait(self, name: str) -> Any:
        self._event(name).wait()
        return self._notes[name]


@pytest.fixture
def gate(cluster: Any) -> Any:
    return ray.remote(Gate).options(num_cpus=0, max_concurrency=16, resources={"head": 0.01}).remote()


def train(gate: Any, slow_rank: int = -1) -> dict[str, Any]:
    """Make ``_STEPS`` steps, and wait at one of them until the test says so. Returns the weights, and the longest time
    between two later steps in seconds."""
    pauses = []
    with psdist.init() as context:
        rank, initial = context.rank, {"w": np.zeros(_SIZE, np.float32)}
        ray.get(gate.open.remote(f"node-{rank}", (ray.get_runtime_context().get_node_id(), os.getpid())))
        weights = context.client.parameters("w", initial, psdist.optim.SGD(0.1))
        first, values = weights.step, {}
        while weights.step < _STEPS:
            if weights.step == _STOP_AT and rank == 0:
                gate.open.remote("reached")
                ray.get(gate.wait.remote("killed"))
            before = time.monotonic()
            values = weights.push_pull({"w": np.full(_SIZE, rank * 0.37 + weights.step * 0.11, np.float32)})
            pauses.append(time.monotonic() - before)
            context.report(loss=weights.step)
        return {"w": values.get("w", np.zeros(0)).copy(), "pause": max(pauses[_STOP_AT:], default=0.0), "first": first}


def start(gate: Any, **settings: Any) -> tuple[threading.Thread, dict[str, Any]]:
    """Start a run in a thread. Returns it, and the dict that receives its result or error."""
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            found["result"] = psdist.ray.run(train, gate, num_workers=2, insecure=True, **settings)
        except Exception as error:  # Any: the test looks at it.
            found["error"] = error
            ray.get(gate.open.remote("reached"))

    thread = threading.Thread(target=run)
    thread.start()
    ray.get(gate.wait.remote("reached"))
    assert "error" not in found, found
    return thread, found


def kill(node: Any) -> None:
    """Kill all processes of a node, as if its machine lost power."""
    roots = [psutil.Process(one.process.pid) for each in node.all_processes.values() for one in each]
    for process in [*(child for root in roots for child in root.children(recursive=True)), *roots]:
        process.send_signal(signal.SIGKILL)


def undisturbed(cluster: Any, gate: Any, servers: int) -> Any:
    thread, found = start(gate, num_servers=servers, replicas=2, resources_per_worker=_ON_HEAD)
    ray.get(gate.open.remote("killed"))
    thread.join()
    return found["result"].returned[0]["w"]


def test_loses_nothing_with_a_node_of_a_server(cluster: Any, gate: Any) -> None:
    other = ray.remote(Gate).options(num_cpus=0, max_concurrency=16).remote()
    expected = undisturbed(cluster, other, 3)
    nodes = [cluster.add_node(num_cpus=2, resources={"server": 1}) for _ in range(2)]
    thread, found = start(
        gate, num_servers=3, replicas=2, resources_per_worker=_ON_HEAD, resources_per_server=_ONE_PER_NODE
    )
    kill(nodes[1])
    ray.get(gate.open.remote("killed"))
    thread.join()
    result = found["result"]
    print(f"longest pause {result.returned[0]['pause']:.2f} s")
    assert result.returned[0]["w"].tobytes() == expected.tobytes()
    assert result.returned[1]["w"].tobytes() == expected.tobytes()
    for node in nodes:
        cluster.remove_node(node, allow_graceful=False)


def test_continues_without_a_node_of_a_worker_and_uses_a_new_one(cluster: Any, gate: Any) -> None:
    node = cluster.add_node(num_cpus=2, resources={"worker": 1})
    thread, found = start(gate, num_servers=2, replicas=2, resources_per_worker={"CPU": 1, "worker": 1})
    places = {rank: ray.get(gate.wait.remote(f"node-{rank}")) for rank in (0, 1)}
    if places[0][0] == node.node_id:
        pytest.fail("rank 0, which waits for the test, is on the node that the test kills")
    kill(node)
    added = cluster.add_node(num_cpus=2, resources={"worker": 1})
    ray.get(gate.open.remote("killed"))
    thread.join()
    result = found["result"]
    print(f"longest pause {result.returned[0]['pause']:.2f} s; the worker came back at {result.returned[1]['first']}")
    assert result.returned[0]["w"].size == _SIZE
    assert ray.get(gate.wait.remote("node-1"))[0] == added.node_id
    for each in (node, added):
        cluster.remove_node(each, allow_graceful=False)


def test_restarts_killed_processes(cluster: Any, gate: Any, tmp_path: Path) -> None:
    thread, found = start(
        gate, num_servers=2, replicas=2, resources_per_worker=_ON_HEAD, storage_path=tmp_path, run_id="restarts"
    )
    programs = [
        process for process in psutil.process_iter(["cmdline"])
        if "restarts" in (words := process.info["cmdline"] or []) and "--lifeline-fd" in words
    ]  # fmt: skip
    servers = [process for process in programs if "server-1" in process.info["cmdline"]]
    schedulers = [process for process in programs if "--store" in process.info["cmdline"]]
    for process in (*servers, schedulers[0].parent()):
        process.kill()  # The scheduler ends with its actor, and the next one takes its port.
    ray.get(gate.open.remote("killed"))
    thread.join()
    result = found["result"]
    assert len(servers) == len(schedulers) == 1
    assert result.storage_path == str(tmp_path) and any((tmp_path / "commits").iterdir())
    assert result.metrics["loss"] > 0

    again = psdist.ray.run(
        train, gate, num_workers=2, num_servers=2, insecure=True, storage_path=tmp_path, run_id="restarts"
    )
    assert again.returned[0]["first"] == _STEPS


def test_saves_at_an_interrupt(cluster: Any, gate: Any, tmp_path: Path) -> None:
    def interrupt() -> None:
        ray.get(gate.wait.remote("reached"))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        psdist.ray.run(train, gate, num_workers=2, num_servers=1, insecure=True, storage_path=tmp_path)
    thread.join()
    assert any((tmp_path / "commits").iterdir())


def test_a_drained_server_does_not_end_the_run(cluster: Any, gate: Any) -> None:
    thread, found = start(gate, num_servers=2, replicas=1, resources_per_worker=_ON_HEAD, run_id="drained")
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "drained" in words and "server-1" in words:
            process.terminate()
            process.wait()
    ray.get(gate.open.remote("killed"))
    thread.join()
    assert found["result"].returned[0]["w"].size == _SIZE


def fail() -> None:
    with psdist.init() as context:
        raise ValueError(f"rank {context.rank} cannot continue")


def test_tells_how_a_run_failed(cluster: Any) -> None:
    with pytest.raises(LaunchFailedError, match="cannot continue") as failed:
        psdist.ray.run(fail, num_workers=2, num_servers=1, insecure=True)
    assert failed.value.details["rank"] in ("0", "1")
    with pytest.raises(WaitTimeoutError, match=r"no room for 3 servers with 1 CPU, 1 moon each.*free now"):
        psdist.ray.run(
            fail, num_servers=3, resources_per_server={"CPU": 1, "moon": 1}, placement_timeout=1, insecure=True
        )
    with pytest.raises(LaunchFailedError, match=r"the scheduler ended with exit status \d+:\n(?s:.*)/proc/none"):
        psdist.ray.run(fail, num_servers=1, insecure=True, storage_path="/proc/none")
    with pytest.raises(ConfigurationError, match="psdist-ray-none"):
        psdist.ray.run(fail, num_servers=1, insecure=True, certs=None, storage_path="psdist-ray-none")
    assert not list(Path(tempfile.gettempdir()).glob("psdist-ray-*")), "a store is left behind"
    # Ray frees room some time after an actor's end: this waits until all of it is free.
    remove_placement_group(reserve("workers", {"CPU": ray.cluster_resources()["CPU"]}, 1, "PACK", 60.0))


_ALONE = """
import numpy as np, psdist, psdist.ray, ray

def train():
    with psdist.init() as context:
        weights = context.client.parameters("w", {"w": np.zeros(4, np.float32)}, psdist.optim.SGD(1.0))
        return float(weights.push_pull({"w": np.full(4, context.rank, np.float32)})["w"][0])

ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
print("nodes", *{node["NodeManagerAddress"] for node in ray.nodes()})
print("trained", psdist.ray.run(train, num_workers=2).returned)
"""


def test_a_cluster_of_one_machine_needs_no_permission() -> None:
    done = subprocess.run([sys.executable, "-c", _ALONE], capture_output=True, text=True, check=False, timeout=250)
    assert "trained {0: -0.5, 1: -0.5}" in done.stdout, done.stdout + done.stderr
    assert "nodes 127.0.0.1" not in done.stdout, "otherwise this tests nothing"
