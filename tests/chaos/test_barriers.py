"""Workers that give up at barriers, at random: no worker is left waiting, and none passes without the others.

``ROUNDS`` in the environment is the number of barriers, ``SEED`` selects their time limits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from psdist.launcher.embedded import EmbeddedCluster

ROUNDS = int(os.environ.get("ROUNDS", "300"))
SEED = int(os.environ.get("SEED", "0"))
CLIENTS = 4

#: Writes, for each barrier, when the call that passed it started and ended, in seconds of the machine's clock.
_SCRIPT = """
import random, sys, time
import numpy as np
import psdist
from psdist.errors import WaitTimeoutError

rank, rounds, seed, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
rng, passed, given_up = random.Random(f"{seed} {rank}"), np.zeros((rounds, 2)), 0
with psdist.Client(rank=rank) as client:
    client.barrier("begin")
    for number in range(rounds):
        while True:
            limit = None if rng.random() < 0.4 else rng.expovariate(200.0)
            begin = time.monotonic()
            try:
                client.barrier(f"round-{number % 3}", timeout=limit)
            except WaitTimeoutError:
                given_up += 1
            else:
                break
        passed[number] = begin, time.monotonic()
np.save(path, passed)
print(given_up)
"""


@pytest.mark.long
@pytest.mark.timeout(120 + ROUNDS)
def test_nobody_hangs_and_nobody_passes_alone(tmp_path: Path) -> None:
    print("seed", SEED)
    (tmp_path / "script.py").write_text(_SCRIPT)
    with closing(EmbeddedCluster(servers=1)) as cluster:
        environment = os.environ | {"PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token}
        environment |= {"WORLD_SIZE": str(CLIENTS)}
        clients = [
            subprocess.Popen(
                [sys.executable, "script.py", str(rank), str(ROUNDS), str(SEED), f"{rank}.npy"],
                cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE,
            )
            for rank in range(CLIENTS)
        ]  # fmt: skip
        given_up = [int(client.communicate()[0]) for client in clients]
    assert all(client.returncode == 0 for client in clients)
    assert sum(given_up) > ROUNDS / 10, f"of {ROUNDS} barriers nobody gave up at more than {sum(given_up)}"
    passed = np.stack([np.load(tmp_path / f"{rank}.npy") for rank in range(CLIENTS)])
    begins, ends = passed[..., 0], passed[..., 1]
    alone = np.flatnonzero(begins.max(axis=0) > ends.min(axis=0))
    assert not alone.size, f"barriers {alone[:9]} were passed by some before the others came"
