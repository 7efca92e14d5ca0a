"""Run the pods of a file of JSON: ends with the reports of all, as JSON. For a network namespace of its own.

Arguments: the file. It has processes (name, role, argv, env, probes), services first. Services end by SIGTERM once the
workers have. As soon as the workers train, the scheduler that leads is killed. A scheduler that ended is started again,
as Kubernetes does: if there is only one, once the servers are not ready any more. The file "led" tells the workers that
a scheduler leads again.

The file "hosts" beside it, which is /etc/hosts here, has the names of the running pods. Those with "named_once_ready"
have a name while their readiness probe succeeds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 300
LEADS = "listening at"


class Pods:
    """The running pods, and their logs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.found: list[dict[str, Any]] = json.loads(path.read_text())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        #: Bytes of each pod's log when its process was started.
        self._starts: dict[str, int] = {}
        #: Pod that is not started again now, as if its node was lost.
        self._lost = ""
        self._pause = threading.Event()
        self._named: set[str] = set()
        self._hosts = os.open(path.with_name("hosts"), os.O_WRONLY)
        self._name({pod["name"] for pod in self.found if pod["role"] not in ("scheduler", "server", "worker")})
        threading.Thread(target=self._follow_readiness, daemon=True).start()

    def log(self, name: str) -> Path:
        return self._path.with_name(f"{name}.log")

    def start(self, pod: dict[str, Any]) -> None:
        name = pod["name"]
        with self.log(name).open("ab") as log:
            self._starts[name] = log.tell()
            process = subprocess.Popen(pod["argv"], env=pod["env"], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._processes[name] = process
        if not pod.get("named_once_ready"):
            self._name(self._named | {name})

    def _name(self, names: set[str]) -> None:
        """Let only these pods have a name. The file is never empty to its readers."""
        lines = [
            "127.0.0.1 localhost",
            *(f"{pod['address']} {pod['name']}" for pod in self.found if pod["name"] in names),
        ]
        content = ("\n".join(lines) + "\n").encode()
        os.pwrite(self._hosts, content, 0)
        os.ftruncate(self._hosts, len(content))
        self._named = names

    def _follow_readiness(self) -> None:
        while True:
            for pod in self.found:
                if pod.get("named_once_ready") and pod["name"] in self._processes:
                    name = {pod["name"]}
                    self._name(self._named | name if self.is_ready(pod) else self._named - name)
            self._pause.wait(0.5)

    def is_ready(self, pod: dict[str, Any]) -> bool:
        """Return the result of a readiness probe."""
        return subprocess.run(pod["probes"][1], env=pod["env"], stdout=subprocess.DEVNULL).returncode == 0

    def are_named(self, role: str) -> bool:
        """Return True if the names of all pods of a role resolve."""
        try:
            return all(socket.getaddrinfo(pod["name"], None) for pod in self.of(role))
        except OSError:
            return False

    def of(self, role: str) -> list[dict[str, Any]]:
        """Return the pods of a role."""
        return [pod for pod in self.found if pod["role"] == role]

    def says(self, pod: dict[str, Any], text: str) -> bool:
        """Return True if its present process runs, and has logged the text."""
        name = pod["name"]
        return (
            self._processes[name].poll() is None and text.encode() in self.log(name).read_bytes()[self._starts[name] :]
        )

    def await_true(self, is_true: Callable[[], bool], what: str, seconds: float = 0.2) -> None:
        """Ask repeatedly until something is true. Meanwhile start schedulers again that ended, if there are two."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_true():
            assert time.monotonic() < deadline, what
            schedulers = self.of("scheduler")
            for pod in schedulers if len(schedulers) > 1 else ():
                name = pod["name"]
                if name != self._lost and name in self._processes and self._processes[name].poll() is not None:
                    self.start(pod)
            self._pause.wait(seconds)

    def await_probe(self, argv: list[str], env: dict[str, str]) -> None:
        """Repeat a probe until it succeeds, as Kubernetes does."""
        self.await_true(lambda: subprocess.run(argv, env=env, stdout=subprocess.DEVNULL).returncode == 0, str(argv))

    def leaders(self) -> list[dict[str, Any]]:
        """Return the schedulers that lead."""
        return [pod for pod in self.of("scheduler") if self.says(pod, LEADS)]

    def fail_over(self) -> dict[str, Any]:
        """Kill the leading scheduler, and wait until the other one leads. Returns a report."""
        self.await_true(lambda: all(self.says(pod, "trains") for pod in self.of("worker")), "training")
        self.await_true(lambda: len(self.leaders()) == 1, "a leader")
        (leader,) = self.leaders()
        killed, self._lost = time.monotonic(), leader["name"]
        self._processes[leader["name"]].kill()
        self._processes[leader["name"]].wait()
        named = True
        if len(self.of("scheduler")) == 1:
            self.await_true(lambda: not any(map(self.is_ready, self.of("server"))), "servers without a scheduler")
            self._pause.wait(5)  # a round of all probes
            named = self.are_named("server")
            self.start(leader)
        self.await_true(lambda: bool(self.leaders()), "the other scheduler", 0.02)
        seconds, led = time.monotonic() - killed, [pod["name"] for pod in self.leaders()]
        self._lost = ""
        self._path.with_name("led").touch()
        return {"killed": leader["name"], "leads": led, "seconds": seconds, "named": named}

    def await_end(self, pod: dict[str, Any]) -> int:
        """Return the status of a pod that ends by itself."""
        self.await_true(lambda: self._processes[pod["name"]].poll() is not None, f"{pod['name']} ends")
        return self._processes[pod["name"]].wait()

    def end(self, pod: dict[str, Any]) -> int:
        """End a pod as Kubernetes does, and return its status."""
        self._processes[pod["name"]].terminate()
        return self._processes[pod["name"]].wait(LIMIT_SECONDS)

    def kill(self) -> None:
        """Kill all that still run."""
        for process in self._processes.values():
            process.kill()


def main(path: Path) -> None:
    pods = Pods(path)
    for pod in pods.found:
        pods.start(pod)
        if startup := pod["probes"][:1]:
            pods.await_probe(startup[0], pod["env"])
    statuses: dict[str, Any] = {}
    services = [pod for pod in pods.found if pod["role"] != "worker"]
    try:
        for pod in services:
            for probe in pod["probes"][1:]:
                pods.await_probe(probe, pod["env"])
        statuses["failover"] = pods.fail_over()
        for pod in pods.of("worker"):
            statuses[pod["name"]] = pods.await_end(pod)
    finally:
        for pod in reversed(services):
            statuses[pod["name"]] = pods.end(pod)
        pods.kill()
    print(json.dumps(statuses))


main(Path(sys.argv[1]))
