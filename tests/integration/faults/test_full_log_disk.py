"""A disk that is full takes lines, metrics and reports from a run, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from psdist.addresses import free_port
from tests.support.mounted import Mount

#: Trains, reports, and prints the digest of the weights. An argument names a directory whose disk it fills first.
_TRAIN = """
import hashlib, logging, sys
from pathlib import Path
import numpy as np, psdist

with psdist.init() as context:
    model = context.client.parameters("model", {"w": np.linspace(-1, 1, 5000, dtype=np.float32)}, psdist.optim.Adam())
    values = model.pull()
    while model.step < 30:
        if model.step == 5 and sys.argv[1:]:
            with open(Path(sys.argv[1]) / "filled", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(4096)):
                        pass
                except OSError as error:
                    print("full:", error.strerror, flush=True)
        values = model.push_pull({"w": values["w"] * 0.5})
        context.report(loss=1 / model.step, samples=8)
        logging.getLogger("psdist").warning("a line that is lost " + "x" * 900)
    print("digest", hashlib.sha256(values["w"].tobytes()).hexdigest(), flush=True)
"""
#: Unless this is set, Python's streams keep what could not be written.
_BUFFERED = {"PYTHONUNBUFFERED": ""}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Mount]:
    mounted = Mount(tmp_path / "disk", "size=512k")
    yield mounted
    mounted.close()


def train(logs: Path, script: Path) -> tuple[str, list[int]]:
    """Run scheduler, server and worker, each with a log file in ``logs``. Returns the output of the worker, and
    the exit statuses."""
    port = free_port("127.0.0.1")
    environ = {**os.environ, **_BUFFERED, "PSDIST_SCHEDULER": f"127.0.0.1:{port}", "PSDIST_TOKEN": "secret"}
    with ExitStack() as stack:

        def start(name: str, *argv: str) -> subprocess.Popen[str]:
            log = stack.enter_context((logs / f"{name}.log").open("ab"))
            process = subprocess.Popen(
                [sys.executable, *argv], env=environ, stdout=subprocess.PIPE, stderr=log, text=True
            )
            stack.callback(process.kill)
            return process

        scheduler = start("scheduler", "-m", "psdist_scheduler", "--port", str(port), "--log-level", "debug")
        server = start("server", "-m", "psdist_server", "--log-level", "debug")
        worker = start("worker", str(script))
        output = worker.communicate(timeout=120)[0]
        for process in (server, scheduler):
            process.terminate()
            process.communicate(timeout=60)
        return output, [each.returncode for each in (scheduler, server, worker)]


def test_programs_whose_log_disk_is_full_train_the_same_and_end_well(disk: Mount, tmp_path: Path) -> None:
    script, roomy = tmp_path / "train.py", tmp_path / "roomy"
    script.write_text(_TRAIN)
    roomy.mkdir()
    output, statuses = train(roomy, script)
    assert statuses == [0, 0, 0] and output.startswith("digest ")
    assert all((roomy / f"{name}.log").stat().st_size for name in ("scheduler", "server", "worker"))
    for name in ("scheduler", "server", "worker"):
        (disk.path / f"{name}.log").touch()
    disk.fill()
    assert train(disk.path, script) == (output, [0, 0, 0])
    assert all((disk.path / f"{name}.log").stat().st_size == 0 for name in ("scheduler", "server", "worker"))


@pytest.mark.parametrize("program", ["psdist_scheduler", "psdist_server"])
def test_a_refusal_that_cannot_be_printed_keeps_its_status(program: str) -> None:
    argv = [sys.executable, "-m", program]
    with Path("/dev/full").open("w") as full:
        for arguments, status in ((["--nonsense"], 2), (["--port", "1000000"], 2)):
            done = subprocess.run([*argv, *arguments], env={**os.environ, **_BUFFERED}, stderr=full, check=False)
            assert done.returncode == status


def test_a_run_whose_disk_becomes_full_trains_to_its_end(disk: Mount, tmp_path: Path) -> None:
    """Its console, its log files, metrics, TensorBoard files and report are on the disk."""
    script = tmp_path / "train.py"
    script.write_text(_TRAIN)
    flags = [*("--log-dir", str(disk.path)), *("--tensorboard", str(disk.path)), *("--progress", "plain")]
    flags += ["--report-file", str(disk.path / "report.json"), "--run-id", "r"]
    argv = [sys.executable, "-m", "psdist.cli.main", "run", *flags, str(script)]
    found = []
    for fills in (False, True):
        with (disk.path / f"console-{fills}.log").open("wb") as console:
            done = subprocess.run(
                [*argv, *([str(disk.path)] if fills else [])],
                env={**os.environ, **_BUFFERED}, stdout=subprocess.PIPE, stderr=console, text=True, check=False,
                timeout=120,
            )  # fmt: skip
        assert done.returncode == 0, done.stdout
        found += re.findall(r"digest (\w+)", done.stdout)
        if not fills:
            report = json.loads((disk.path / "report.json").read_text())
    assert len(found) == 2 and found[0] == found[1]
    assert "full: No space left on device" in done.stdout
    assert json.loads((disk.path / "report.json").read_text()).keys() == report.keys()
