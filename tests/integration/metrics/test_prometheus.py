"""Metrics for Prometheus of a real run: every process shows those of the catalog, and the scheduler lists all ports."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from psdist.monitoring.exporter import METRICS
from tests.support.launched import Run

#: The workers train until the file exists.
SCRIPT = """
import numpy as np, os, psdist, sys
with psdist.init() as context:
    model = context.client.parameters("model", {"w": np.zeros(5000, np.float32)}, psdist.optim.SGD(lr=0.1),
                                      compression="bfloat16")
    values, told = model.pull(), False
    while not os.path.exists("enough") or model.step % 10:
        values = model.push_pull({"w": values["w"] - 1})
        context.report(loss=0.25)
        if model.step == 20:
            if context.rank == 0:
                context.client.snapshot()
            print("trained", flush=True)
"""
TOKEN = "of-this-test"
#: One sample: its labels, and its value.
Samples = dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("PSDIST_TOKEN", TOKEN)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    flags = ("--nservers", "2", "--replicas", "2", "--run-id", "seen", "--storage-path", "kept", "--metrics-port", "0")
    run = Run(tmp_path, SCRIPT, flags=(*flags, "--metrics-interval", "0.1"))
    yield run
    run.stop()


def page(address: str, path: str) -> str:
    request = urllib.request.Request(f"http://{address}{path}", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def scrape(address: str) -> Samples:
    """Return the samples of all families, by the name of the metric in the catalog."""
    found: Samples = {}
    for family in text_string_to_metric_families(page(address, "/metrics")):
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = [(sample.labels, sample.value) for sample in family.samples if "_created" not in sample.name]
    return found


def status() -> dict[str, Any]:
    command = [sys.executable, "-m", "psdist.cli.main", "status", "--format", "json", "--timeout", "60"]
    shown: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return shown


def targets_once_complete(scheduler: str) -> list[dict[str, Any]]:
    """Return the targets once all five processes have named their address, which comes with a heartbeat."""
    late, pause = time.monotonic() + 60, threading.Event()
    while len(targets := json.loads(page(scheduler, "/targets"))) < 5 and time.monotonic() < late:
        pause.wait(0.1)  # No call waits for a heartbeat.
    return list(targets)


def test_every_process_shows_the_metrics_of_the_catalog(run: Run, tmp_path: Path) -> None:
    run.until("trained", 2)
    scheduler = status()["metrics_address"]
    targets = targets_once_complete(scheduler)
    roles = sorted(target["labels"]["member_role"] for target in targets)
    assert roles == ["scheduler", "server", "server", "worker", "worker"]
    for target in targets:
        (address,), role = target["targets"], target["labels"]["member_role"]
        samples = scrape(address)
        ours = {name for name in samples if name.startswith("psdist_")}
        assert ours == {metric.name for metric in METRICS if role in metric.roles}
        ((labels, _),) = samples["psdist_process_info"]
        assert (labels["run_id"], labels["member_id"]) == ("seen", target["labels"]["member"])
        if role == "worker":
            check_worker(samples)
    check_scheduler(scrape(scheduler))
    (tmp_path / "enough").touch()
    assert run.end()[0] == 0


def check_worker(samples: Samples) -> None:
    ((labels, steps),) = samples["psdist_steps_total"]
    assert labels == {"parameters": "model"} and steps >= 20
    sizes = {labels["direction"]: (labels, size) for labels, size in samples["psdist_bytes_total"]}
    labels, size = sizes["push"]
    assert labels["codec"] == "bfloat16" and labels["transport"] == "shm" and size % 10_000 == 0 and size >= 200_000
    assert sizes["pull"][0]["codec"] == "float32"
    assert samples["psdist_reported"] == [({"metric": "loss"}, 0.25)]
    counts = [value for labels, value in samples["psdist_step_seconds"] if labels.get("le") == "+Inf"]
    assert len(counts) == 4 and len(set(counts)) == 1 and counts[0] >= 18


def check_scheduler(samples: Samples) -> None:
    members = {(labels["role"], labels["state"]): count for labels, count in samples["psdist_members"]}
    assert members["server", "live"] == members["worker", "live"] == 2
    shards = {labels["state"]: count for labels, count in samples["psdist_shards"]}
    assert shards["full"] > 0 and shards["short"] == shards["lost"] == 0
    assert samples["psdist_snapshots"][0][1] >= 1 and samples["psdist_snapshot_age_seconds"][0][1] < 600
