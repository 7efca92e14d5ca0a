"""Two schedulers with a store in etcd: when the leader is killed, frozen or cut off from etcd, the standby leads, the
old one persists nothing more, and training continues, exact to the byte. All processes can be restarted, one by one."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from psdist.settings import exit_codes
from tests.support.chaos.proxy import HELD, Fault, FaultProxy
from tests.support.etcd import Etcd, running
from tests.support.standby_cluster import cluster, results

STEPS = 1500
#: Rounds in which all servers and schedulers are restarted, and steps that take longer than all rounds.
ROUNDS = int(os.environ.get("ROLLING_ROUNDS", "2"))
ROLLING_STEPS = 1000 * ROUNDS
ROOT = Path(__file__).parents[3]
#: Commit of the last release.
RELEASE = (ROOT / "tests/compat/release.txt").read_text().split()[0]


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def undisturbed(etcd: Etcd, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run without faults."""
    with cluster(tmp_path_factory.mktemp("run") / "run", etcd.url("undisturbed")) as made:
        return results(made, made.train(STEPS))[0]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["kill", "freeze", "end"])
def test_the_standby_takes_over(etcd: Etcd, undisturbed: str, tmp_path: Path, fault: str) -> None:
    with cluster(tmp_path / "run", etcd.url(fault)) as made:
        workers = made.train(STEPS)
        made.until("worker-0", "trains")
        struck = time.monotonic()
        made.schedulers[0].send_signal({"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "end": signal.SIGTERM}[fault])
        led = made.until("scheduler-1", "listening") - struck
        digest, longest = results(made, workers)
        print(f"{fault}: the standby led after {led:.2f} s, longest step {longest:.2f} s")
        assert digest == undisturbed
        if fault == "freeze":
            made.schedulers[0].send_signal(signal.SIGCONT)
            assert made.schedulers[0].wait(60) == exit_codes.UNAVAILABLE
            assert "does not lead the run any more" in made.log("scheduler-0")
            assert "Traceback" not in made.log("scheduler-0")
        assert made.status()["run_id"] == "run"


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_leader_that_etcd_does_not_hear_stops(etcd: Etcd, undisturbed: str, tmp_path: Path) -> None:
    host, port = etcd.endpoints[0].split(":")
    proxy = FaultProxy((host, int(port)), random.Random(0))
    place = await proxy.start()
    try:
        with ExitStack() as stack:
            manager = cluster(tmp_path / "run", etcd.url("cut"), f"etcd://{place}/cut")
            made = await asyncio.to_thread(stack.enter_context, manager)
            workers = made.train(STEPS)
            await asyncio.to_thread(made.until, "worker-0", "trains")
            struck, proxy.fault = time.monotonic(), HELD
            led = await asyncio.to_thread(made.until, "scheduler-1", "listening") - struck
            status = await asyncio.to_thread(made.schedulers[0].wait, 60)
            proxy.fault = Fault()
            digest, longest = await asyncio.to_thread(results, made, workers)
            print(f"cut: the standby led after {led:.2f} s, longest step {longest:.2f} s")
            assert digest == undisturbed
            assert status == exit_codes.UNAVAILABLE
    finally:
        await proxy.close()


def released(directory: Path) -> Path:
    """Unpack the sources of the last release. Skips the test in a clone without its commit."""
    archive = directory / "release.tar"
    command = ["git", "archive", "--output", str(archive), RELEASE, "psdist", "servers"]
    if subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode:
        pytest.skip(f"this clone lacks the commit of the last release, {RELEASE}: git fetch --unshallow --tags")
    with tarfile.open(archive) as packed:
        packed.extractall(directory / "release", filter="data")
    return directory / "release"


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("begins", ["now", "release"])
def test_all_processes_are_restarted_one_by_one(etcd: Etcd, tmp_path: Path, begins: str) -> None:
    """With two copies nothing is lost or counted twice, and each worker makes every step, also if all processes are of
    the last release at first: each restarted one is then of this release, and the workers remain of the last one."""
    source = released(tmp_path) if begins == "release" else None
    with cluster(tmp_path / "still", etcd.url(f"still-{begins}")) as made:
        undisturbed, _ = results(made, made.train(ROLLING_STEPS, 0.0, servers=3))
    store = etcd.url(f"rolling-{begins}")
    with cluster(tmp_path / "run", store, source=source) as made:
        workers = made.train(ROLLING_STEPS, 0.01, servers=3)
        made.until("worker-0", "trains")
        made.source = None
        leader = 0
        for number in range(1, ROUNDS + 1):
            for _ in range(2):
                made.schedulers[leader].terminate()
                assert made.schedulers[leader].wait(120) == exit_codes.OK, made.log(f"scheduler-{leader}")
                made.start_scheduler(leader, store)
                # It must wait before the other one ends, or that one might lead again once it is restarted.
                made.until(f"scheduler-{leader}", "leads it", number + (leader == 1))
                leader = 1 - leader
                made.until(f"scheduler-{leader}", "listening", number + (leader == 0))
            for server in range(3):
                made.servers[server].terminate()
                assert made.servers[server].wait(120) == exit_codes.OK, made.log(f"server-{server}")
                made.start_server(server)
                made.until(f"server-{server}", '"serving"', number + 1)
        left = [worker for worker in workers if worker.poll() is None]
        digest, longest = results(made, workers)
        print(f"{ROUNDS} rounds: longest step {longest:.2f} s")
        assert left, "training ended before the restarts did: raise ROLLING_STEPS"
        assert digest == undisturbed
