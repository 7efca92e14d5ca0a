"""A run over several hosts, as an operator starts it. Every role has its own command, and names reach the name service
late. A host is added, one is restarted, and the scheduler's host is rebooted. The weights are those of an undisturbed
run, byte for byte, and every member is named after its host.

Hosts are network namespaces with names of their own, which needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from psdist.errors import ConfigurationError
from tests.support.chaos.faults import WorkerNetwork

HOSTS: Final = ("head", "gpu-a", "gpu-b", "gpu-c")
STEPS: Final = 600
#: Each worker pushes the same whole number in a step, so that their mean does not depend on the number of workers.
SCRIPT: Final = f"""
import hashlib, threading
import numpy as np
import psdist
with psdist.init() as context:
    p = context.client.parameters("p", {{"w": np.zeros(1 << 15, np.float32)}}, psdist.optim.Adam(lr=1e-3))
    pace = threading.Event()
    while p.step < {STEPS}:
        gradient = np.random.default_rng(p.step).integers(-8, 9, 1 << 15).astype(np.float32)
        p.push_pull({{"w": gradient}})
        if p.step % 20 == 0:
            print("step", p.step, flush=True)
        pace.wait(0.02)
    print("digest", hashlib.sha256(p.pull()["w"].tobytes()).hexdigest(), flush=True)
"""
#: Half of the ranks are on another host, so the sum needs a connection between hosts.
GLOO: Final = """
import torch
import torch.distributed as dist
import psdist
dist.init_process_group("gloo")
total = torch.tensor([2.0 ** dist.get_rank()])
dist.all_reduce(total)
with psdist.init() as context:
    assert (context.rank, context.world_size) == (dist.get_rank(), dist.get_world_size())
    print("rank", dist.get_rank(), "sum", int(total), flush=True)
dist.destroy_process_group()
"""
_PROGRAMS: Final = {
    "scheduler": (sys.executable, "-m", "psdist_scheduler"),
    "server": (sys.executable, "-m", "psdist_server"),
    "worker": (sys.executable, "-c", "import sys; from psdist.cli.main import worker; sys.exit(worker())"),
    "status": (sys.executable, "-m", "psdist.cli.main", "status", "--format", "json"),
    "run": (sys.executable, "-m", "psdist.cli.main", "run", "--nproc-per-node", "2", "train.py"),
}
#: Takes the host's name and its own list of names, then becomes the command.
_BECOME: Final = 'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && shift && exec "$@"'
_SECONDS: Final = 120.0


class Hosts:
    """The hosts, and the processes that run on them."""

    def __init__(self, path: Path, network: WorkerNetwork) -> None:
        self.path, self._network = path, network
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PSDIST_")}
        self._environment |= {
            "PSDIST_TOKEN": "secret",
            "PSDIST_INSECURE": "1",
            "XDG_RUNTIME_DIR": str(path),
            "TMPDIR": str(path),
        }
        #: Names that every host's resolver reads.
        self._names = path / "names"
        self._names.write_text("127.0.0.1 localhost\n")
        (path / "train.py").write_text(SCRIPT)

    def publish(self, host: str) -> None:
        """Tell all hosts the address of this one."""
        with self._names.open("a") as names:
            names.write(f"{self.address(host)} {host}\n")

    def address(self, host: str) -> str:
        """Return the address of a host."""
        return self._network.address(HOSTS.index(host))

    def start(self, name: str, host: str, program: str, *flags: str) -> None:
        """Start a program on a host, under a name of this test's."""
        inside = (*self._network.inside(HOSTS.index(host)), "unshare", "--uts", "sh", "-c", _BECOME, host)
        with (self.path / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*inside, str(self._names), *_PROGRAMS[program], *flags], env=self._environment, cwd=self.path,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def start_scheduler(self) -> None:
        """Start the scheduler on its host."""
        self.start(
            "scheduler", "head", "scheduler", "--host", "0.0.0.0", "--port", "29600", "--insecure", "--run-id", "hosts",
            "--store", "store.sqlite", "--replicas", "2", "--min-servers", "2", "--min-workers", "2",
            "--idle-timeout", "2",
        )  # fmt: skip

    def start_host(self, host: str) -> None:
        """Start a server and the workers' launcher on a host."""
        to_scheduler, listen = ("--scheduler", "head:29600"), ("--host", "0.0.0.0", "--insecure", "--port", "29601")
        self.start(f"server-{host}", host, "server", *to_scheduler, *listen)
        self.start(f"worker-{host}", host, "worker", *to_scheduler, "--nnodes", "1:3", "train.py")

    def status(self) -> Any:
        """Return the output of ``psdist status`` on the scheduler's host."""
        self.start("status", "head", "status", "--scheduler", "head:29600")
        assert self.processes["status"].wait(_SECONDS) == 0, self.logs
        text = (self.path / "status.log").read_text()
        return json.loads(text[text.rindex("\n{") if "\n{" in text else 0 :])

    def log(self, name: str) -> str:
        """Return the output of a process."""
        return (self.path / f"{name}.log").read_text()

    @property
    def logs(self) -> str:
        """Return the output of all processes."""
        return "\n".join(f"--- {file.name}\n{file.read_text()[-6000:]}" for file in sorted(self.path.glob("*.log")))

    def step(self) -> int:
        """Return the newest step that a worker printed."""
        lines = [line for host in HOSTS[1:] for line in self._lines(host) if " step " in f" {line}"]
        return max((int(line.rpartition("step ")[2]) for line in lines), default=0)

    def _lines(self, host: str) -> list[str]:
        log = self.path / f"worker-{host}.log"
        return log.read_text().splitlines() if log.exists() else []

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until ``condition`` is true."""
        until = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < until, f"no {what} in {_SECONDS:g} s\n{self.logs}"
            try:
                self.processes["scheduler" if "scheduler" in self.processes else "server-gpu-a"].wait(0.1)
            except subprocess.TimeoutExpired:
                continue

    def kill(self, *names: str) -> None:
        """Send SIGKILL, as when a host loses its power."""
        for name in names:
            self.processes[name].kill()
            self.processes[name].wait()

    def stop(self) -> None:
        """End all processes that still run."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """The hosts; nothing runs on them yet."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "mount"))):
        pytest.skip("network namespaces need root, ip, unshare and mount")
    with ExitStack() as stack:
        try:
            network = WorkerNetwork(len(HOSTS))
        except ConfigurationError as error:
            pytest.skip(str(error))
        stack.callback(network.close)
        built = Hosts(tmp_path, network)
        stack.callback(built.stop)
        yield built


def digest(text: str) -> set[str]:
    """Return the digests of weights that workers printed."""
    return {line.rpartition("digest ")[2].strip() for line in text.splitlines() if "digest " in line}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_over_hosts_that_come_go_and_reboot_has_the_bytes_of_one_host(hosts: Hosts) -> None:
    alone = subprocess.run(
        [*_PROGRAMS["run"]], cwd=hosts.path, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
    )
    # The scheduler has no name yet, and is not running.
    for host in ("gpu-a", "gpu-b"):
        hosts.start_host(host)
    hosts.wait_for(lambda: "'head'" in hosts.log("server-gpu-a") or "head" in hosts.log("server-gpu-a"), "notice")
    hosts.publish("head")
    hosts.start_scheduler()
    hosts.wait_for(lambda: hosts.step() >= 60, "training")
    assert f"listening at {hosts.address('head')}:29600" in hosts.log("scheduler")
    # A host is added.
    hosts.start_host("gpu-c")
    hosts.wait_for(lambda: "step " in hosts.log("worker-gpu-c"), "worker on the new host")
    # A host is restarted.
    hosts.kill("server-gpu-b", "worker-gpu-b")
    at = hosts.step()
    hosts.start_host("gpu-b")
    hosts.wait_for(lambda: hosts.step() >= at + 60, "training after a restart")
    servers = {m["id"]: m for m in hosts.status()["members"] if m["role"] == "server" and m["state"] == "live"}
    assert set(servers) == {"gpu-a", "gpu-b", "gpu-c"}, servers
    assert {member["address"] for member in servers.values()} == {f"{hosts.address(host)}:29601" for host in servers}
    # The scheduler's host reboots.
    hosts.kill("scheduler")
    at = hosts.step()
    hosts.wait_for(lambda: hosts.step() >= at + 40, "training without a scheduler")
    hosts.start_scheduler()
    hosts.wait_for(lambda: all(process.poll() is not None for process in hosts.processes.values()), "end")
    statuses = {name: process.returncode for name, process in hosts.processes.items()}
    assert set(statuses.values()) == {0}, f"{statuses}\n{hosts.logs}"
    assert digest(hosts.logs) == digest(alone.stdout) != set()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_torch_distributed_finds_its_store_across_hosts(hosts: Hosts) -> None:
    """Check that gloo listens at the address of the host's own name."""
    pytest.importorskip("torch")
    (hosts.path / "train.py").write_text(GLOO)
    for host in HOSTS[:3]:
        hosts.publish(host)
    hosts.start_scheduler()
    hosts.start("server", "head", "server", "--scheduler", "head:29600", "--host", "0.0.0.0", "--insecure")
    hosts.start("server-2", "gpu-a", "server", "--scheduler", "head:29600", "--host", "0.0.0.0", "--insecure")
    for host in ("gpu-a", "gpu-b"):
        flags = ("--scheduler", "head:29600", "--nnodes", "2", "--nproc-per-node", "2", "train.py")
        hosts.start(f"worker-{host}", host, "worker", *flags)
    hosts.wait_for(lambda: all(process.poll() is not None for process in hosts.processes.values()), "end")
    statuses = {name: process.returncode for name, process in hosts.processes.items()}
    assert set(statuses.values()) == {0}, f"{statuses}\n{hosts.logs}"
    assert sorted(line.rpartition("rank ")[2] for line in hosts.logs.splitlines() if " sum " in line) == [
        f"{rank} sum 15" for rank in range(4)
    ]
