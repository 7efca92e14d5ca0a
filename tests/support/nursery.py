"""A process that has imported large libraries, and forks workers that need not import them again.

A module with functions for workers is its program, and calls ``serve``. Each line of standard input is a list of jobs
as JSON. Their processes run at the same time, and the answer is a line with their exit codes. A process that has a
scheduler joins its run before any of them begins its work.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """A function of the program, and the environment and arguments of its process. Its result is saved in a file."""

    function: str
    result: str
    environ: dict[str, str] = field(default_factory=dict)
    keywords: dict[str, Any] = field(default_factory=dict)


class Nursery:
    """The process, as tests use it. program: name of the module with the functions."""

    def __init__(self, program: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip

    def run(self, *jobs: Job) -> list[int]:
        """Run the jobs, and return their exit codes; negative numbers are signals."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([asdict(job) for job in jobs]) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def close(self) -> None:
        """End the process, and workers that are left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def _start(work: Callable[..., Any], job: Job, ready: int, go: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.dup2(2, 1)  # Answers go to standard output.
        os.environ.update(job.environ)
        if "PSDIST_SCHEDULER" in os.environ:
            import psdist

            psdist.init()
        os.close(ready)
        os.read(go, 1)
        torch.save(work(**job.keywords), job.result)
        if "PSDIST_SCHEDULER" in os.environ:
            psdist.init().close()
        code = 0
    except BaseException as error:
        torch.save(f"{type(error).__name__}: {error}", job.result)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(functions: Mapping[str, Callable[..., Any]], jobs: list[Job]) -> list[int]:
    ready, is_ready = os.pipe()
    go, let_go = os.pipe()
    # Each process closes its copy of these ends: reading ends when the last one has.
    pids = [_start(functions[job.function], job, is_ready, go) for job in jobs]
    os.close(is_ready)
    os.read(ready, 1)
    os.write(let_go, b"." * len(jobs))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for end in (ready, go, let_go):
        os.close(end)
    return codes


def program(path: str, directory: str, arguments: list[str] | None = None) -> str:
    """Run a Python file of the project, or anywhere, as a program in a directory, and return its output."""
    os.chdir(directory)
    path = str(ROOT / path)
    output = io.StringIO()
    sys.argv = [path, *(arguments or [])]
    with contextlib.redirect_stdout(output):
        runpy.run_path(path, run_name="__main__")
    return output.getvalue()


def serve(*functions: Callable[..., Any]) -> None:
    """Run jobs of these functions, and programs, until the standard input ends."""
    torch.set_num_threads(1)
    named = {function.__name__: function for function in (program, *functions)}
    for line in sys.stdin:
        print(json.dumps(_run(named, [Job(**job) for job in json.loads(line)])), flush=True)
