"""``psdist stacks`` of a real run: members that answer, one that holds its interpreter, and one that is stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launched import Run

SCRIPT = """
import ctypes, os, numpy as np, psdist
context = psdist.init()
model = context.client.parameters("model", {"w": np.zeros(9, np.float32)}, psdist.optim.SGD(lr=0.1), psdist.BSP())
def hold_the_interpreter():
    print("pid", os.getpid(), flush=True)
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
def stand_still():
    print("pid", os.getpid(), flush=True)
    os.kill(os.getpid(), 19)
if context.rank:
    [hold_the_interpreter, stand_still][context.rank - 1]()
model.push_pull({"w": np.zeros(9, np.float32)})
"""
STACKS = (sys.executable, "-m", "psdist.cli.main", "stacks", "--run-id", "hanging", "--timeout", "30")


def stacks(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STACKS, *flags], capture_output=True, text=True, check=False, timeout=120)


def test_all_members_are_shown_and_a_frozen_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("PSDIST_TOKEN", "a-token-that-nobody-guesses")
    flags = ("--nservers", "1", "--nproc-per-node", "3", "--run-id", "hanging", "--storage-path", "none")
    with Run(tmp_path, SCRIPT, flags=flags) as run:
        run.until(r"pid \d+", 2)
        ended = stacks("--format", "json")
        assert ended.returncode == 0, ended.stderr
        found = {member["member"]: member for member in json.loads(ended.stdout)}
        assert list(found) == ["scheduler", "server-0", "worker-0", "worker-1", "worker-2"]
        assert "in push_pull" in found["worker-0"]["stacks"] and not found["worker-0"]["missing"]
        assert "in hold_the_interpreter" in found["worker-1"]["stacks"] and not found["worker-1"]["missing"]
        assert found["worker-2"]["missing"] == "its process is stopped, as by SIGSTOP or a debugger"
        assert "thread 'kernel-" in found["server-0"]["stacks"], found["server-0"]
        assert "task" in found["scheduler"]["stacks"]
        shown = stacks()
        assert "=== worker-2 (rank 2), pid " in shown.stdout and "no stacks: its process is stopped" in shown.stdout
        made = [*STACKS[:3], "token", "create", "--role", "reader", "--out", "reader"]
        subprocess.run(made, check=True, timeout=120, cwd=tmp_path)
        refused = stacks("--token-file", str(tmp_path / "reader"))
        assert refused.returncode == 78 and "GetStacks needs the role admin" in refused.stderr, refused.stderr
