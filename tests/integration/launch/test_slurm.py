"""psdist under a real Slurm of three nodes on this machine: the job of ``psdist generate slurm``, and wrong starts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm import SlurmCluster, why_not

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(600),
]
_PSDIST = (sys.executable, "-m", "psdist.cli.main")
_WORKER = (sys.executable, "-c", "from psdist.cli.main import worker; worker()")
_TRAINS = """
import hashlib, sys, time
import numpy as np, psdist
with psdist.init() as context:
    weights = context.client.parameters("model", {"w": np.arange(1000, dtype=np.float32)}, psdist.optim.Adam(lr=0.1))
    values, first = weights.pull(), weights.step
    while weights.step < 200:
        rng = np.random.default_rng([weights.step, context.rank])
        values = weights.push_pull({"w": (values["w"] * rng.uniform(0, 1, 1000)).astype(np.float32)})
        if weights.step == 20:
            print("at step 20", flush=True)
        if len(sys.argv) > 1:
            time.sleep(0.02)  # Long enough for a signal to arrive before the end.
    digest = hashlib.sha256(values["w"].tobytes()).hexdigest()
    print(f"rank {context.rank} of {context.world_size}: {first} to {weights.step}, {digest}", flush=True)
"""
_DONE = re.compile(r"rank (\d) of (\d): (\d+) to (\d+), (\w+)")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Start a cluster of three nodes."""
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), 3)
    yield cluster
    cluster.close()


def results(text: str) -> list[tuple[str, ...]]:
    return sorted(_DONE.findall(text))


def test_a_job_saves_at_the_signal_and_resumes_exactly(cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINS)
    flags = ("--nodes", "3", "--nservers", "3", "--replicas", "2", "--time", "20", "--cpus-per-node", "1")
    generated = cluster.call(*_PSDIST, "generate", "slurm", *flags, "train.py", "slowly", cwd=tmp_path)
    (tmp_path / "job.sh").write_text(generated + "\n")
    job = cluster.submit(tmp_path / "job.sh")
    output = tmp_path / f"psdist-{job}.out"

    def trains() -> bool:
        text = output.read_text() if output.exists() else ""
        assert cluster.job(job, "JobState") in ("PENDING", "RUNNING") and cluster.job(job, "Restarts") == "0", text
        return "at step 20" in text

    cluster.until(trains)
    cluster.call("scancel", "--signal=TERM", job)
    cluster.until(lambda: cluster.job(job, "JobState") == "FAILED")
    assert cluster.job(job, "ExitCode") == "143:0", output.read_text()
    stopped = re.search(
        r"worker-0 \S+ \S+, worker-1 \S+ \S+, worker-2 \S+ \S+ stopping: 'model' at step (\d+)", output.read_text()
    )
    assert stopped is not None, output.read_text()

    cluster.call("scontrol", "requeue", job)
    # Nodes refuse a job that begins in the second in which its previous attempt ended.
    cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    cluster.until(lambda: cluster.job(job, "JobState") in ("COMPLETED", "FAILED"))
    assert cluster.job(job, "JobState") == "COMPLETED", output.read_text()
    alone = subprocess.run(
        [*_PSDIST, "run", "--nproc-per-node", "3", "--storage-path", "none", "train.py"],
        cwd=tmp_path, text=True, capture_output=True, check=True,
    )  # fmt: skip
    (digest,) = {found[-1] for found in results(alone.stdout)}
    expected = [(str(rank), "3", stopped[1], "200", digest) for rank in range(3)]
    assert results(output.read_text()) == expected, output.read_text()
    assert not list((tmp_path / ".psdist").iterdir()), "the token is left behind"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((sys.executable, "train.py"), ("srun started 2 processes", "srun --ntasks-per-node=1 psdist-worker")),
        ((*_PSDIST, "run", "train.py"), ("srun started psdist run 2 times", "psdist generate slurm")),
        ((*_WORKER, "--scheduler", "h:1", "--nnodes", "3", "train.py"), ("--nnodes is 3", "SLURM_STEP_NUM_TASKS is 2")),
    ],
    ids=["script", "run", "worker"],
)  # fmt: skip
def test_wrong_starts_are_refused_with_the_remedy(
    cluster: SlurmCluster, tmp_path: Path, command: tuple[str, ...], words: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(_TRAINS)
    text = cluster.call("srun", "--nodes=2", "--ntasks=2", *command, cwd=tmp_path, check=False)
    assert all(word in text for word in words) and "error" in text, text
    assert not results(text)
