"""Contenders: psdist and its peers, and the environments of peers that psdist does not need."""

from __future__ import annotations

import atexit
import datetime
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from benchmarks.contenders import DIRECTORY, PEER_VENVS, Contender, module
from benchmarks.turns import Settings
from psdist.security.certificates import issue, make_authority
from psdist.security.roles import Role

#: Packages of each environment.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "ray": ("ray==2.60.*", "numpy", "torch"),
    "tensorflow": ("tensorflow-cpu==2.21.*",),
    "flight": ("pyarrow==26.*",),
}
#: Files of a TLS identity, and the roles that need one.
_TLS: Final = ("ca", "cert", "key")
_TLS_ROLES: Final = (Role.SERVER, Role.WORKER)
#: Environment of each peer.
ENVIRONMENTS: Mapping[str, str] = {
    "ray": "ray", "ray_dataflow": "ray", "tensorflow": "tensorflow", "flight": "flight",
}  # fmt: skip


def psdist(
    settings: Settings, transport: str, name: str = "psdist", environment: Mapping[str, str] | None = None
) -> Contender:
    """Return psdist as a user starts it: ``psdist run`` with its own choice of threads.

    It has no storage, so that it writes no snapshot in another's turn, and leaves none.
    """
    command = module(
        "psdist.cli.main", "run", "--nservers", str(settings.servers), "--nproc-per-node", str(settings.workers),
        "--replicas", str(settings.replicas), "--storage-path", "none", "--max-restarts", "0",
        "-m", "benchmarks.worker", settings.text(),
    )  # fmt: skip
    return Contender(name, (command,), settings.workers, {"PSDIST_TRANSPORT": transport, **(environment or {})})


def unreplicated(settings: Settings) -> Contender:
    """psdist without copies of its shards, otherwise the same."""
    return psdist(replace(settings, replicas=1), settings.transport, "unreplicated")


def tls(settings: Settings) -> Contender:
    """psdist with mutual TLS on every connection, otherwise the same."""
    found, cores = ("--scheduler-file", f"{DIRECTORY}/scheduler"), len(os.sched_getaffinity(0))
    files = _tls_files()
    flags = ("--log-level", "warning", *(word for name in _TLS for word in (f"--tls-{name}", files["server", name])))
    scheduler = module(
        "psdist_scheduler", "--address-file", f"{DIRECTORY}/scheduler", "--replicas", str(settings.replicas),
        "--min-workers", str(settings.workers), "--min-servers", str(settings.servers), "--idle-timeout", "1", *flags,
    )  # fmt: skip
    threads = ("--kernel-threads", str(max(1, cores // settings.servers)))
    servers = [
        module("psdist_server", *found, *threads, "--server-id", f"server-{number}", *flags)
        for number in range(settings.servers)
    ]
    workers = (
        sys.executable, "-c", "from psdist.cli.main import worker; worker()", *found, "--nproc-per-node",
        str(settings.workers), "--max-restarts", "0", "-m", "benchmarks.worker", settings.text(),
    )  # fmt: skip
    environment = {"PSDIST_TRANSPORT": settings.transport, "PSDIST_TOKEN": secrets.token_urlsafe(32)}
    environment |= {f"PSDIST_TLS_{name.upper()}": files["worker", name] for name in _TLS}
    return Contender("tls", (scheduler, *servers, workers), settings.workers, environment)


@cache
def _tls_files() -> dict[tuple[str, str], str]:
    """Return the files of the TLS identities by role and kind. This process removes them at its end."""
    directory = Path(tempfile.mkdtemp(prefix="psdist-bench-tls-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    now = datetime.datetime.now(datetime.UTC)
    ca = make_authority("benchmark", 2, now)
    files: dict[tuple[str, str], str] = {}
    for role in _TLS_ROLES:
        pair = issue(ca, role, "", (), 1, now)
        for name, content in zip(_TLS, (ca.cert, pair.cert, pair.key), strict=True):
            files[role, name] = str(directory / f"{role}-{name}.pem")
            Path(files[role, name]).write_bytes(content)
    return files


def gloo(settings: Settings) -> Contender:
    """torch.distributed's all-reduce and fused Adam on each worker."""
    ranks = range(settings.workers)
    commands = tuple(module("benchmarks.peers.gloo", replace(settings, rank=rank).text()) for rank in ranks)
    return Contender("gloo", commands, settings.workers, {"GLOO_SOCKET_IFNAME": "lo"})


def _echo(
    settings: Settings, name: str, server: str, client: str, peer: str = "echo", python: str = sys.executable
) -> Contender:
    def command(role: str, rank: int) -> tuple[str, ...]:
        return module(f"benchmarks.peers.{peer}", replace(settings, role=role, rank=rank).text(), python=python)

    servers = tuple(command(server, rank) for rank in range(settings.servers))
    clients = tuple(command(client, rank) for rank in range(settings.workers))
    return Contender(name, servers + clients, settings.servers + settings.workers)


def echo(settings: Settings) -> Contender:
    """Raw grpc.aio with default options."""
    return _echo(settings, "echo", "server", "client")


def echo_tuned(settings: Settings) -> Contender:
    """Raw grpc.aio with psdist's options."""
    return _echo(settings, "echo_tuned", "server-tuned", "client-tuned")


def echo_tcp(settings: Settings) -> Contender:
    """Raw TCP under uvloop."""
    return _echo(settings, "echo_tcp", "server", "client", "tcp_echo")


def flight(settings: Settings) -> Contender:
    """pyarrow.flight: gRPC in C++."""
    return _echo(settings, "flight", "server", "client", "flight", python_of("flight"))


def round_trips(settings: Settings, role: str) -> Contender:
    """Small messages there and back by raw grpc.aio: ``unary`` or ``stream``."""
    return _echo(settings, f"grpc_{role}", "server", role)


def _kernel(settings: Settings, role: str) -> Contender:
    return Contender(role, (module("benchmarks.peers.kernel", replace(settings, role=role).text()),), 1)


def kernel(settings: Settings) -> Contender:
    """Return the lower bound: the step's arithmetic alone."""
    return _kernel(settings, "kernel")


def memcpy(settings: Settings) -> Contender:
    """One gradient copied."""
    return _kernel(settings, "memcpy")


def _ray(settings: Settings, name: str, role: str) -> Contender:
    command = module("benchmarks.peers.ray_actors", replace(settings, role=role).text(), python=python_of("ray"))
    return Contender(name, (command,), 1)


def ray(settings: Settings) -> Contender:
    """Sharded parameter-server actors that the workers call."""
    return _ray(settings, "ray", "")


def ray_dataflow(settings: Settings) -> Contender:
    """Return the same actors, driven by Ray's scheduler."""
    return _ray(settings, "ray_dataflow", "dataflow")


def tensorflow(settings: Settings) -> Contender:
    """ParameterServerStrategy."""

    def command(role: str, rank: int) -> tuple[str, ...]:
        own = replace(settings, role=role, rank=rank).text()
        return module("benchmarks.peers.tensorflow_ps", own, python=python_of("tensorflow"))

    servers = [command("ps", rank) for rank in range(settings.servers)]
    workers = [command("worker", rank) for rank in range(settings.workers)]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    everyone = (command("chief", 0), *servers, *workers)
    return Contender("tensorflow", everyone, len(everyone), quiet)


PEERS: Mapping[str, Callable[[Settings], Contender]] = {
    one.__name__: one
    for one in (
        unreplicated,
        tls,
        gloo,
        ray,
        ray_dataflow,
        tensorflow,
        echo,
        echo_tuned,
        echo_tcp,
        flight,
        kernel,
        memcpy,
    )
}


def python_of(environment: str) -> str:
    """Return the interpreter of an environment."""
    return str(PEER_VENVS / environment / "bin" / "python")


def missing(peer: str) -> str:
    """Return why a peer cannot take part; empty if it can."""
    if environment := ENVIRONMENTS.get(peer):
        if (PEER_VENVS / environment / "installed").exists():
            return ""
        return f"not installed: --install-peers puts {PACKAGES[environment][0]} into {PEER_VENVS.name}/{environment}"
    if peer == "gloo" and importlib.util.find_spec("torch") is None:
        return "not installed: make bench installs torch into .venv"
    return ""


def install(environment: str) -> None:
    """Make an environment. Raises CalledProcessError."""
    directory = PEER_VENVS / environment
    venv.create(directory, with_pip=True)
    subprocess.run([python_of(environment), "-m", "pip", "install", "--quiet", *PACKAGES[environment]], check=True)
    (directory / "installed").touch()
