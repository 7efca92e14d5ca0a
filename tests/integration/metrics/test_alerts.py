"""Alerts of ``deploy/monitoring`` in a real Prometheus, which scrapes a real run with real faults."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psdist.addresses import free_port
from tests.support.launched import Run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (apt install it)"),
]
RULES = Path(__file__).resolve().parents[3] / "deploy" / "monitoring" / "alerts.yml"
TOKEN = "of-this-test"
#: The workers train until the file exists. Worker 1 computes slowly, and pushes NaN once the file "nan" exists.
SCRIPT = """
import numpy as np, os, psdist, time
with psdist.init() as context:
    model = context.client.parameters("model", {"w": np.zeros(5000, np.float32)}, psdist.optim.SGD(lr=0.1),
                                      non_finite="skip")
    values, told = model.pull(), False
    while not os.path.exists("enough") or model.step % 10:
        bad = context.rank == 1 and os.path.exists("nan")
        time.sleep(0.05 if context.rank == 1 else 0.005)
        values = model.push_pull({"w": values["w"] * np.float32(np.nan if bad else 1)})
        if model.step == 20:
            print("trained", flush=True)
"""
#: Seconds for an alert to fire.
PATIENCE = 120.0


class Prometheus:
    """A Prometheus with the alert rules, without their waiting times, that scrapes every second."""

    def __init__(self, path: Path, scheduler: str) -> None:
        self.address = f"127.0.0.1:{free_port('127.0.0.1')}"
        rules = re.sub(r"\n +for: .*", "", RULES.read_text()).replace("[2m]", "[15s]").replace("[5m]", "[30s]")
        (path / "alerts.yml").write_text(rules)
        (path / "token").write_text(TOKEN)
        authorization = {"type": "Bearer", "credentials_file": str(path / "token")}
        discovery = {"url": f"http://{scheduler}/targets", "refresh_interval": "1s", "authorization": authorization}
        job = {"job_name": "psdist", "authorization": authorization, "http_sd_configs": [discovery]}
        intervals = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config = {"global": intervals, "rule_files": [str(path / "alerts.yml")], "scrape_configs": [job]}
        (path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML.
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={path}/prometheus.yml", f"--storage.tsdb.path={path}/data",
             f"--web.listen-address={self.address}", "--log.level=error"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def query(self, expression: str) -> list[dict[str, Any]]:
        url = f"http://{self.address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except OSError:  # It starts.
            return []
        return found

    def until(self, expression: str) -> list[dict[str, Any]]:
        """Return the result once there is one."""
        late, pause = time.monotonic() + PATIENCE, threading.Event()
        while not (found := self.query(expression)):
            assert time.monotonic() < late, (expression, self.firing())
            pause.wait(0.2)  # Prometheus has no way to wait for a result.
        return found

    def firing(self) -> set[str]:
        return {one["metric"]["alertname"] for one in self.query('ALERTS{alertstate="firing"}')}

    def until_firing(self, *names: str) -> None:
        for name in names:
            self.until(f'ALERTS{{alertname="{name}", alertstate="firing"}}')


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setenv("PSDIST_TOKEN", TOKEN)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    flags = ("--nservers", "2", "--replicas", "2", "--run-id", "seen", "--storage-path", "kept", "--metrics-port", "0")
    run = Run(tmp_path, SCRIPT, flags=(*flags, "--max-restarts", "0"))
    yield run
    run.stop()


def command(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "psdist.cli.main", *words], capture_output=True, text=True, check=False
    )
    return done.stdout


def until_shown(text: str, *words: str) -> None:
    """Return once a command prints this text."""
    late = time.monotonic() + PATIENCE
    while text not in (found := command(*words, "--timeout", "60")):
        assert time.monotonic() < late, (text, found)


def until_problem(kind: str) -> None:
    """Return once ``psdist status`` names a problem of this kind."""
    until_shown(f'"kind": "{kind}"', "status", "--format", "json")


def test_each_fault_fires_its_alert(run: Run, tmp_path: Path) -> None:
    run.until("trained", 2)
    status = json.loads(command("status", "--format", "json", "--timeout", "60"))
    (tmp_path / "prometheus").mkdir()
    prometheus = Prometheus(tmp_path / "prometheus", status["metrics_address"])
    try:
        prometheus.until('count(up{job="psdist"} == 1) == 5')
        prometheus.until_firing("PsdistStraggler")
        (straggler,) = prometheus.until('ALERTS{alertname="PsdistStraggler"}')
        assert straggler["metric"]["member"] == "worker-1"
        assert prometheus.firing() <= {"PsdistStraggler", "PsdistLoopBlocked"}  # The machine may be busy.

        (tmp_path / "nan").touch()
        prometheus.until_firing("PsdistNotFinite")
        until_problem("not_finite")

        shutil.rmtree(tmp_path / "kept")
        (tmp_path / "kept").write_text("no directory any more")
        command("snapshot", "save", "--timeout", "60")
        prometheus.until_firing("PsdistSnapshotFailed")
        until_problem("snapshot")
        until_shown("gradients of worker worker-1 were left out", "events")

        run.child("psdist_server", "server-1").kill()
        prometheus.until_firing("PsdistMemberLost", "PsdistCopiesMissing")
        until_problem("copies")

        worker = run.child("train.py")
        worker.send_signal(signal.SIGSTOP)
        prometheus.until_firing("PsdistMemberDown")
        worker.send_signal(signal.SIGCONT)

        scheduler = run.child("psdist_scheduler")
        scheduler.send_signal(signal.SIGSTOP)
        prometheus.until_firing("PsdistSchedulerDown")
        scheduler.send_signal(signal.SIGCONT)
        prometheus.until_firing("PsdistLoopBlocked")
    finally:
        prometheus.process.kill()
        prometheus.process.wait()
