"""Unknown flags of other launchers are answered with psdist's own."""

from __future__ import annotations

import re

import pytest

from psdist.cli import run, worker
from psdist.launcher.local import LocalSettings
from psdist.settings import foreign_flags
from psdist.settings.flags import CommandLine, flags_of
from psdist.settings.foreign_flags import as_arguments
from psdist.settings.programs import scheduler_line

LINES = {"run": run.command_line(), "worker": worker.command_line(), "scheduler": scheduler_line()}


@pytest.mark.parametrize(
    ("program", "words", "answer"),
    [
        ("run", "--workers 4", "use --nproc-per-node N"),
        ("run", "--num-processes 4", "use --nproc-per-node N"),
        ("run", "--num_processes=4", "use --nproc-per-node N"),
        ("run", "-np 4", "use --nproc-per-node N"),
        ("run", "-n 4", "use --nproc-per-node N"),
        ("run", "--ntasks 4", "use --nproc-per-node N"),
        ("run", "--resume", "--run-id NAME"),
        ("run", "--nnodes 2", "psdist-worker --scheduler HOST:PORT"),
        ("run", "--rdzv_endpoint host:1", "psdist-worker --scheduler HOST:PORT"),
        ("run", "--hostfile hosts", "psdist-worker on each host"),
        ("run", "--standalone", "leave it out"),
        ("run", "--nproc 2", "did you mean --nproc-per-node?"),
        ("worker", "--num-machines 2", "use --nnodes N"),
        ("worker", "-H a,b", "start psdist-worker on each host"),
        ("worker", "--storage-path x", "pass --storage-path PATH to psdist-scheduler"),
        ("worker", "--logs-specs x", "use --log-dir DIR"),
        ("scheduler", "--workers 4", "use --min-workers N"),
    ],
)
def test_a_flag_of_another_launcher_is_answered_with_psdists_own(program: str, words: str, answer: str) -> None:
    own, _ = LINES[program].split([*words.split(), "train.py"])
    text = LINES[program].unknown(own)
    assert text.startswith(f"there is no flag {re.split('[ =]', words)[0]}: ") and answer in text


@pytest.mark.parametrize(
    "own", ["--nproc-per-node 2", "--nproc_per_node=2", "-m", "-r 3", "-r3", "-t0:1", "-h", "--help"]
)
def test_own_flags_are_known(own: str) -> None:
    assert LINES["run"].unknown(own.split()) == ""


@pytest.mark.parametrize("program", LINES)
def test_no_row_hides_a_flag_and_each_remedy_names_existing_ones(program: str) -> None:
    line: CommandLine = LINES[program]
    known = {name for flag in line.flags for name in flag.spellings}
    assert not known & line.elsewhere.keys()
    others = {name for each in LINES.values() for flag in each.flags for name in flag.spellings}
    for remedy in line.elsewhere.values():
        assert set(re.findall(r"--[a-z-]+", remedy)) <= others, remedy


def test_flags_become_arguments_of_psdist_launch() -> None:
    names = [flag.dest for flag in flags_of(LocalSettings)]
    for message, expected in {
        "--replicas 2 needs more than --nservers 1: copies": "replicas=2 needs more than nservers=1: copies",
        "--run-id NAME, --module and --no-python": "run_id=NAME, module and no_python",
        "psdist-worker --scheduler HOST:PORT": "psdist-worker --scheduler HOST:PORT",
    }.items():
        assert as_arguments(message, names) == expected
    assert "nproc_per_node=N" in as_arguments(foreign_flags.OF_RUN["-n"], names)
