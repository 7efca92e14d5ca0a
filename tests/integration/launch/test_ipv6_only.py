"""A host whose only address is ``::1``: a network namespace without 127.0.0.1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_NAMESPACE = ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--net")
_ONLY_IPV6 = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && "
_TRAIN = """
import numpy as np, os, psdist
with psdist.init() as context:
    weights = context.client.parameters("w", {"w": np.zeros(10, np.float32)}, psdist.optim.SGD(lr=0.1))
    weights.push({"w": np.ones(10, np.float32)})
    print("trained", os.environ["MASTER_ADDR"])
"""
#: The scheduler's own default: it ends immediately, because its lifeline is closed.
_SCHEDULER = "from psdist.cli import main; main.scheduler()"


def in_namespace(path: Path, command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*_NAMESPACE, "sh", "-c", _ONLY_IPV6 + command],
        cwd=path,
        env={**os.environ, "PSDIST_TOKEN": "secret", "PYTHON": sys.executable, "XDG_STATE_HOME": str(path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module", autouse=True)
def _needs_namespaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("probe")
    if shutil.which("unshare") is None or in_namespace(path, "test -e /proc/net/if_inet6").returncode:
        pytest.skip("needs network namespaces, ip, and IPv6")


def test_psdist_run_uses_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    done = in_namespace(tmp_path, '"$PYTHON" -m psdist run --storage-path none train.py')
    assert done.returncode == 0 and "trained ::1" in done.stdout, done.stdout + done.stderr


def test_programs_listen_there_by_default_and_not_if_told_otherwise(tmp_path: Path) -> None:
    command = f"""
: | "$PYTHON" -c "{_SCHEDULER}" --lifeline-fd 0
"$PYTHON" -c "{_SCHEDULER}" --host 127.0.0.1
"""
    done = in_namespace(tmp_path, command)
    text = done.stderr
    assert "listening at [::1]:" in text and "127.0.0.1:0 cannot be bound" in text, text
