"""Reports of scripts under ``psdist run``: on the console, in the file and for TensorBoard; and without a launcher."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from psdist.launcher.embedded import EmbeddedCluster
from tests.support.event_files import EventFile
from tests.support.launched import Run

#: Both workers make 40 steps; rank r reports 10 * (r + 1) samples of loss r for each.
SCRIPT = """
import numpy as np, psdist, sys
steps = int(sys.argv[1])
with psdist.init() as context:
    model = context.client.parameters("model", {"w": np.zeros(5000, np.float32)}, psdist.optim.SGD(lr=0.1))
    values = model.pull()
    while model.step < steps:
        if "--buckets" in sys.argv:
            values = model.push_pull_async({"w": values["w"] - 1}).wait()
        else:
            values = model.push_pull({"w": values["w"] - 1})
        context.report(loss=np.float32(context.rank), samples=10 * (context.rank + 1), lr=0.5)
    print("at", model.step, flush=True)
    if "--wait" in sys.argv:
        while True:
            values = model.push_pull({"w": values["w"] - 1})
            context.report(loss=0.0, samples=1)
"""


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_phases(line: dict[str, Any]) -> None:
    """Check that phases add up to the step, and shares to the whole."""
    phases = [line[f"{name}_ms"] for name in ("compute", "push", "wait", "pull")]
    assert sum(phases) == pytest.approx(line["step_ms"]) and all(phase >= 0 for phase in phases)
    assert line["communication_share"] + line["compute_efficiency"] == pytest.approx(1)
    assert line["step_ms"] * line["reports"] == pytest.approx(1000 * line["seconds"] * line["workers"])


@pytest.mark.parametrize(
    ("transport", "way"),
    [
        ("tcp", ("--buckets",)),
        pytest.param("shm", (), marks=pytest.mark.long),
        pytest.param("grpc", (), marks=pytest.mark.long),
    ],
)
def test_files_have_everything_that_was_reported(
    tmp_path: Path, runs: list[Run], transport: str, way: tuple[str, ...]
) -> None:
    flags = ("--log-dir", "logs", "--tensorboard", "tb", "--run-id", "digits", "--storage-path", "none")
    run = Run(tmp_path, SCRIPT, "40", *way, transport=transport, flags=(*flags, "--metrics-interval", "0.05"))
    runs.append(run)
    status, text = run.end()
    assert status == 0, text
    lines = lines_of(tmp_path / "logs" / "digits" / "metrics.jsonl")
    assert sum(line["reports"] for line in lines) == 80
    assert sum(line["samples"] for line in lines) == 40 * 30
    assert sum(line["loss"] * line["samples"] for line in lines) == pytest.approx(40 * 20)
    assert lines[-1]["step"] == 40 and [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    # For each worker: its gradients, and the weights once more, for its first pull.
    assert sum(line["push_bytes"] for line in lines) == 2 * 40 * 20_000
    assert sum(line["pull_bytes"] for line in lines) == 2 * 41 * 20_000
    for line in lines:
        check_phases(line)
        assert line["lr"] == pytest.approx(0.5) and line["staleness_max"] == 0 and line["workers"] in (1, 2)
    for phase in ("compute", "push", "wait", "pull"):
        assert sum(line[f"{phase}_ms"] for line in lines) > 0
    (path,) = (tmp_path / "tb" / "digits").iterdir()
    events = EventFile(path)
    assert events.restarts == [lines[0]["step"]]
    for name, tag in (("loss", "loss"), ("wait_ms", "psdist/wait_ms"), ("samples", "psdist/samples")):
        assert events.scalars[tag] == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in lines]
    (shown,) = re.findall(r"psdist: (step 40  .*)", text)
    assert re.search(r"loss \S+  lr 0\.5  .* samples/s  .* ms \(compute .*\)  communication \d+%  .* worker", shown)


def test_an_agent_files_the_workers_of_its_node(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with closing(EmbeddedCluster(servers=1)) as cluster:
        environment = os.environ | {"PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token}
        command = [sys.executable, "-c", "from psdist.cli.main import worker; worker()"]
        flags = ["--nproc-per-node", "2", "--node-rank", "0", "--run-id", cluster.run_id]
        flags += ["--log-dir", "logs", "--tensorboard", "tb"]
        done = subprocess.run(
            [*command, *flags, "train.py", "12"], cwd=tmp_path, env=environment,
            capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = lines_of(tmp_path / "logs" / cluster.run_id / "metrics-node-0.jsonl")
    assert sum(line["reports"] for line in lines) == 24 and lines[-1]["step"] == 12
    (path,) = (tmp_path / "tb" / cluster.run_id / "node-0").iterdir()
    assert EventFile(path).scalars["lr"][-1] == (12, 0.5)
    assert re.search(r"psdist: step 12  .* 2 workers\n", done.stderr), done.stderr


def test_a_script_that_reports_nothing_prints_and_writes_nothing(tmp_path: Path, runs: list[Run]) -> None:
    script = SCRIPT.replace("context.report", "str")
    script = re.sub(r"str\(.*\)", "pass", script)
    runs.append(run := Run(tmp_path, script, "3", flags=("--log-dir", "logs", "--storage-path", "none")))
    status, text = run.end()
    assert status == 0 and "step " not in text, text
    (path,) = (tmp_path / "logs").rglob("metrics.jsonl")
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PSDIST_TENSORBOARD": "file/below"}, "TensorBoard files cannot be written to file/below"),
        ({"PSDIST_PROGRESS": "loud"}, "PSDIST_PROGRESS: 'loud' is not one of auto, plain, off"),
        ({"PSDIST_METRICS_INTERVAL": "-1"}, "it must be at least 0 seconds"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, environment: dict[str, str], message: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "train.py").write_text("print('started')")
    done = subprocess.run(
        [sys.executable, "-m", "psdist.cli.main", "run", "train.py"],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)} | environment,
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr and "started" not in done.stdout, done.stderr


ALONE = """
import json, numpy as np, psdist
from psdist.trackers import Tracker

class Keep:
    def start(self, run_id): print("start", bool(run_id))
    def log(self, values, step): print(json.dumps([step, values]))
    def close(self): print("close")

context = psdist.init()
tracker: Tracker = Keep()
context.add_tracker(tracker)
model = context.client.parameters("model", {"w": np.zeros(8, np.float32)}, psdist.optim.SGD(lr=0.1), psdist.ASP())
model.gradient_buffers()
assert context.client.phases.seconds() == [0.0] * 4, "time begins with the first step"
for step in range(3):
    model.push_pull({"w": np.ones(8)})
    context.report(loss=step, accuracy=np.float64(0.5), samples=4)
"""


@pytest.mark.parametrize("progress", ["auto", "plain"])
def test_a_script_alone_has_its_trackers_and_a_line_if_it_asks_for_it(tmp_path: Path, progress: str) -> None:
    """Check a script that ends without closing anything: remaining reports are delivered at the exit."""
    (tmp_path / "alone.py").write_text(ALONE)
    done = subprocess.run(
        [sys.executable, "alone.py"], env=os.environ | {"PSDIST_PROGRESS": progress}, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    start, *logged, close = done.stdout.splitlines()
    assert (start, close) == ("start True", "close")
    numbers = [json.loads(line) for line in logged]
    assert numbers[-1][0] == 3 and sum(values["samples"] for _, values in numbers) == 12
    for _, values in numbers:
        assert values["accuracy"] == 0.5 and values["workers"] == 1
        check_phases(values)
    assert len(re.findall(r"psdist: step 3  loss", done.stderr)) == (progress == "plain"), done.stderr
