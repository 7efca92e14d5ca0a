"""Run the pods of a file of JSON: ends with the reports of all, as JSON. For a network namespace of its own.

Arguments: the file. It has processes (argv, env, probes), services first. Workers are those without probes. Services
end by SIGTERM once the workers have.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 300


def await_probe(argv: list[str], env: dict[str, str]) -> None:
    """Repeat a probe until it succeeds, as Kubernetes does."""
    pause, deadline = threading.Event(), time.monotonic() + LIMIT_SECONDS
    while subprocess.run(argv, env=env, stdout=subprocess.DEVNULL).returncode != 0:
        assert time.monotonic() < deadline, argv
        pause.wait(0.2)


def main(path: Path) -> None:
    pods: list[dict[str, Any]] = json.loads(path.read_text())
    running = []
    for pod in pods:
        log = path.with_name(f"{pod['name']}.log").open("wb")
        process = subprocess.Popen(pod["argv"], env=pod["env"], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        running.append(process)
        if startup := pod["probes"][:1]:
            await_probe(startup[0], pod["env"])
    statuses = {}
    services = [(pod, process) for pod, process in zip(pods, running, strict=True) if pod["probes"]]
    try:
        for pod, _ in services:
            for probe in pod["probes"][1:]:
                await_probe(probe, pod["env"])
        for pod, process in zip(pods, running, strict=True):
            if not pod["probes"]:
                statuses[pod["name"]] = process.wait(LIMIT_SECONDS)
    finally:
        for pod, process in reversed(services):
            process.terminate()
            statuses[pod["name"]] = process.wait(LIMIT_SECONDS)
        for process in running:
            process.kill()
    print(json.dumps(statuses))


main(Path(sys.argv[1]))
