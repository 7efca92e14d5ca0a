"""Workers of a benchmark that belong to a run of psdist and to a process group of torch over gloo."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

ROOT: Final = Path(__file__).resolve().parent.parent
#: Variable with the folder of a run, for its workers.
_VARIABLE: Final = "BENCH_TORCH_WORKERS"


def run(module: str, options: argparse.Namespace, arguments: Sequence[str]) -> Any:
    """Start ``options.workers`` processes of ``module`` with ``--worker``, and servers. Returns one worker's output."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "psdist.cli.main", "run", "--nservers", str(options.servers),
            "--nproc-per-node", str(options.workers), "--storage-path", "none", "--max-restarts", "0",
            "-m", module, "--worker", *arguments,
        ]  # fmt: skip
        environment = {**os.environ, _VARIABLE: folder, "PSDIST_TRANSPORT": options.transport}
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=sys.stderr)
        return json.loads((Path(folder) / "written.json").read_text())


def join_gloo(rank: int, world: int) -> None:
    """Make torch's process group of all workers."""
    store = f"file://{Path(os.environ[_VARIABLE]) / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)


def write(value: Any) -> None:
    """Send a JSON value to the process that started the workers."""
    (Path(os.environ[_VARIABLE]) / "written.json").write_text(json.dumps(value))
