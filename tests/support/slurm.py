"""A Slurm cluster on this machine, in a folder of its own: munged, slurmctld and one slurmd per node. No cgroups."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from psdist.addresses import free_port

#: Programs that a cluster needs.
PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
_CONFIGURATION = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={path}/m/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPort={port}
SlurmctldPidFile={path}/slurmctld.pid
SlurmdPidFile={path}/%n.pid
SlurmdSpoolDir={path}/spool-%n
StateSaveLocation={path}/state
SlurmctldLogFile={path}/slurmctld.log
SlurmdLogFile={path}/%n.log
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MinJobAge=3600
ReturnToService=2
PropagateResourceLimits=NONE
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_WAIT_SECONDS: Final = 240
_PAUSE_SECONDS: Final = 0.1


def why_not() -> str:
    """Return why this machine cannot have a cluster; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed (apt install slurm-wlm munge)"
    # Debian's slurmd may run several times on one host, each as one node.
    return "" if os.geteuid() == 0 else "slurmd starts jobs as other users, so it needs root"


class SlurmCluster:
    """A running cluster of ``nodes`` nodes. ``environment`` makes Slurm's commands use it."""

    def __init__(self, path: Path, nodes: int) -> None:
        self.path = path
        self.environment = {**os.environ, "SLURM_CONF": str(path / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._write(nodes)
        munged = ("--key-file", path / "m/key", "--pid-file", path / "m/pid", "--log-file", path / "m/log")
        try:
            self._start(
                "munged", "-F", "--force", "--socket", path / "m/socket", "--seed-file", path / "m/seed", *munged
            )
            self.until((path / "m/socket").exists)
            self._start("slurmctld", "-D", "-c")
            for number in range(1, nodes + 1):
                self._start("slurmd", "-D", "-N", f"n{number}")
            self.until(lambda: self.call("sinfo", "--noheader", "--states=idle", "-o", "%D", check=False) == str(nodes))
        except BaseException:
            self.close()
            raise

    def _write(self, nodes: int) -> None:
        for name in ("m", "state"):
            (self.path / name).mkdir(mode=0o700)
        (self.path / "m/key").write_bytes(secrets.token_bytes(128))
        (self.path / "m/key").chmod(0o400)
        host = socket.gethostname()
        rows = [
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port('127.0.0.1')} CPUs=2"
            for number in range(1, nodes + 1)
        ]
        values = {"host": host, "user": getpass.getuser(), "path": self.path, "port": free_port("127.0.0.1")}
        (self.path / "slurm.conf").write_text(_CONFIGURATION.format(**values, nodes="\n".join(rows)))

    def _start(self, *argv: str | Path) -> None:
        output = (self.path / f"{argv[0]}-{len(self._processes)}.out").open("wb")
        with output:
            self._processes.append(
                subprocess.Popen(argv, env=self.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
            )

    def until(self, is_true: Callable[[], object]) -> None:
        """Wait until something is true of another process, which tells nobody."""
        pause, deadline = threading.Event(), time.monotonic() + _WAIT_SECONDS
        while not is_true():
            ended = [each.args for each in self._processes if each.poll() is not None]
            assert not ended and time.monotonic() < deadline, (ended, self.logs())
            pause.wait(_PAUSE_SECONDS)

    def logs(self) -> str:
        """Return the output and the logs of the cluster's processes."""
        return "\n".join(
            file.read_text(errors="replace") for file in self.path.iterdir() if file.suffix in (".out", ".log")
        )

    def call(self, *argv: str | Path, cwd: Path | None = None, check: bool = True) -> str:
        """Return the output of a command of Slurm, errors included."""
        done = subprocess.run(
            argv, env=self.environment, cwd=cwd, text=True, check=False, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=_WAIT_SECONDS,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout
        return done.stdout.strip()

    def submit(self, script: Path) -> str:
        """Submit a script in its directory, and return the job's number."""
        return self.call("sbatch", "--parsable", script.name, cwd=script.parent)

    def job(self, number: str, field: str) -> str:
        """Return a field of a job, such as ``JobState``."""
        found = re.search(rf"\b{field}=(\S+)", self.call("scontrol", "show", "job", number))
        assert found is not None
        return found[1]

    def close(self) -> None:
        """End all jobs, then the cluster."""
        if len(self._processes) > 1:
            self.call("scancel", "--full", "--signal=KILL", "--user", getpass.getuser(), check=False)
            self.call("scancel", "--user", getpass.getuser(), check=False)
            self.until(lambda: not self.call("squeue", "--noheader", check=False))
        for process in reversed(self._processes):
            process.terminate()
            process.wait(_WAIT_SECONDS)
