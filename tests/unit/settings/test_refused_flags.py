"""Flags and variables that a program refuses, with exit status 2 and the reason: wrong, unknown or without effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from psdist.cli import run, worker
from psdist.cli.commands import call
from psdist.settings.programs import scheduler_settings, server_settings

#: Readers of a program's command line.
PROGRAMS: Mapping[str, Callable[[list[str], dict[str, str]], Any]] = {
    "run": lambda argv, environ: run.command_line().parse([*argv, "x.py"], environ),
    "run to the end": lambda argv, environ: call(run, [*argv, "x.py"], environ),
    "worker": lambda argv, environ: worker.command_line().parse([*argv, "x.py"], environ),
    "scheduler": scheduler_settings,
    "server": server_settings,
}
ADDRESS = "--scheduler h:1"
ETCD = "--store etcd://10.0.0.1:2379/p"

#: Program, its flags, and words of its message.
FLAGS: list[tuple[str, str, list[str]]] = [
    ("run", "--nservers 0", ["--nservers", "0", "at least 1"]),
    ("run", "--nproc-per-node many", ["--nproc-per-node", "'many'"]),
    ("run", "--nproc-per-node gpu", ["gpu is not supported"]),
    ("run", "--start-method fork", ["--start-method", "fork", "spawn"]),
    ("run", "--failure-timeout nan", ["--failure-timeout", "nan"]),
    ("run", "--signals-to-handle SIGKILL", ["SIGKILL"]),
    ("run", "--run-id ../x", ["--run-id", "'../x'"]),
    ("run", "-r 4", ["--redirects", "'4'"]),
    ("run", "--local-ranks-filter a", ["--local-ranks-filter", "'a'"]),
    ("run", "--nproc 2", ["no flag --nproc: did you mean --nproc-per-node?"]),
    ("run", "--storage-path none --keep-last 5", ["has no effect without --storage-path"]),
    ("run", "--storage-path none --keep-every 9", ["has no effect without --storage-path"]),
    ("run", "--storage-path none --no-save-at-end", ["has no effect without --storage-path"]),
    ("run", "-np 2", ["no flag -np: use --nproc-per-node N"]),
    ("run", "--storage-path none --fresh", ["has no effect without --storage-path"]),
    ("run to the end", "-r 3", ["--log-dir"]),
    ("worker", "--rdzv-backend etcd-v2", ["etcd-v2", "--scheduler"]),
    ("worker", "--rdzv-backend zeus", ["zeus", "c10d"]),
    ("worker", "--rdzv-conf timeout=900", ["--rdzv-conf", "--start-timeout"]),
    ("worker", "--rdzv_conf=timeout=900", ["--rdzv_conf", "--start-timeout"]),
    ("worker", "--nnodes 2 --log-line-prefix-template x", ["--role"]),
    ("worker", "--n_proc_per_node=2", ["did you mean --nproc-per-node?"]),
    ("worker", "--max-restart 2", ["did you mean --max-restarts?"]),
    ("worker", "--xyzzy", ["there is no flag --xyzzy\n"]),
    ("worker", f"{ADDRESS} --master-port 3", ["--master-port 3 has no effect without --master-addr or --standalone"]),
    ("scheduler", "--storage-path ftp://x", ["s3://"]),
    ("scheduler", "--storage-path s3://", ["s3://"]),
    ("scheduler", "--save-interval 5m", ["--storage-path"]),
    ("scheduler", "--save-interval often --storage-path x", ["'often'"]),
    ("scheduler", "--keep-last 0", ["at least 1"]),
    ("scheduler", "--host 10.0.0.1 --insecure", ["PSDIST_TOKEN"]),
    ("scheduler", "--port 65536", ["65535"]),
    ("scheduler", "--advertise nowhere", ["HOST:PORT"]),
    ("scheduler", "--token-file absent", ["absent"]),
    ("scheduler", "--create-token", ["PSDIST_TOKEN_FILE"]),
    ("scheduler", "stray", ["stray"]),
    ("scheduler", "--standby", ["--standby needs a store that two schedulers can reach"]),
    ("scheduler", "--standby --store memory", ["--standby needs a store that two schedulers can reach"]),
    ("scheduler", ETCD, ["without encryption: use etcds://"]),
    ("scheduler", ETCD.replace("etcd:", "etcds:"), ["needs --tls-ca, --tls-cert and --tls-key"]),
    ("scheduler", ETCD.removesuffix("/p"), ["names no prefix"]),
    ("server", "", ["PSDIST_SCHEDULER"]),
    ("server", f"{ADDRESS} --device gpu", ["neither cpu, cuda nor cuda:N"]),
    ("server", f"{ADDRESS} --device cuda:", ["neither cpu, cuda nor cuda:N"]),
    ("server", f"{ADDRESS} --device cuda:0,cuda:1", ["neither cpu, cuda nor cuda:N"]),
    ("server", "--schedular 2", ["no flag --schedular: did you mean --scheduler?"]),
]

#: Program, its flags and variables, and words of its message.
VARIABLES: list[tuple[str, str, dict[str, str], str]] = [
    ("run", "", {"PET_NPROC_PER_NODE": "-1"}, "PET_NPROC_PER_NODE"),
    ("scheduler", "--host 0.0.0.0", {"PSDIST_TOKEN": "t"}, "--insecure"),
    ("scheduler", "", {"PSDIST_TOKEN": "two\nlines"}, "PSDIST_TOKEN"),
    ("scheduler", "", {"PSDIST_FAILURE_TIMEOUT": "0"}, "PSDIST_FAILURE_TIMEOUT"),
    ("scheduler", "--create-token", {"PSDIST_TOKEN_FILE": "no/token"}, "No such file"),
    ("server", "", {"PSDIST_TOKEN": "t", "PSDIST_SCHEDULER": "h:1"}, "the token would be sent to h:1"),
]


def refusal(capsys: pytest.CaptureFixture[str], program: str, flags: str, environ: dict[str, str]) -> str:
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program](flags.split(), environ)
    assert ended.value.code == 2, flags
    return capsys.readouterr().err


def test_a_refused_flag_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    for program, flags, words in FLAGS:
        text = refusal(capsys, program, flags, {})
        assert all(word in text for word in words), text
        assert ("did you mean" in text) == any("did you mean" in word for word in words), text


def test_a_refused_variable_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for program, flags, environ, words in VARIABLES:
        assert words in refusal(capsys, program, flags, environ)
