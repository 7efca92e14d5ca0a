"""Workers of a launched run, one of them hit by SIGKILL amid collectives: the survivors notice and continue with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import os
import signal
import threading
import time

import numpy as np

import psdist
from psdist.errors import WorkerLostError

context = psdist.init()
rank, done = context.rank, 0
while done < 60:
    group = context.collectives
    began = time.monotonic()
    try:
        # A worker that starts again learns from the others where they are.
        done = int(group.all_reduce(done, "max"))
        while done < 60:
            began = time.monotonic()
            assert (group.all_reduce(np.full(1_000_000, rank + done)) == 3 + 3 * done).all()
            done += 1
            if done == 20 and rank == 2 and context.client.incarnation == 1:
                threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()
    except WorkerLostError as error:
        print(f"rank {rank} noticed after {time.monotonic() - began:.2f} s: {error}", flush=True)
print(f"rank {rank} done", flush=True)
context.close()
"""


def test_survivors_continue_with_a_killed_worker_that_starts_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "psdist", "run", "--nproc-per-node", "3", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    assert sorted(re.findall(r"rank (\d) done", output)) == ["0", "1", "2"]
    noticed = re.findall(r"rank (\d) noticed after [\d.]+ s: rank 2 is gone", output)
    assert set(noticed) == {"0", "1"}, output
