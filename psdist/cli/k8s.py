"""``psdist generate k8s``: files for kustomize, and a runtime of Kubeflow Trainer."""

from __future__ import annotations

import os
import re
import secrets
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psdist.cli.generated import GeneratedRun, fill, template_names
from psdist.cli.run import SCRIPT_USAGE
from psdist.errors import ConfigurationError
from psdist.machine import make_directory
from psdist.security.roles import CERTIFICATE_ROLES, DOMAIN, SERVICE_ROLES, Role, service_name
from psdist.security.tokens import create
from psdist.settings.config import check_run_id
from psdist.settings.exit_codes import LATE, OK, statuses
from psdist.settings.flags import CommandLine, flags_of, integer, named_file, read, setting
from psdist.version import __version__

_FOLDER: Final = "k8s"
#: A label of DNS, short enough for the suffixes of objects and pods.
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
#: Words that YAML takes for something else than text.
_YAML_WORDS: Final = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
_IMAGE: Final = re.compile(
    r"[a-z0-9][a-z0-9./:_-]*?(:(?!latest$)[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})"
)
_QUANTITY: Final = re.compile(r"\d{1,9}(\.\d{1,3})?(m|[KMGTP]i?)?")
_KUBERNETES_TITLE: Final = "Kubernetes"
#: Pause before scheduler and servers get SIGTERM, in which the workers of a deleted run agree on their last step.
_PRE_STOP_SECONDS: Final = 10
#: Part of the grace period that is left for the last snapshot, after a drain.
_SAVING_SECONDS: Final = 50
#: Part of the grace period that is left to an agent, after its workers have ended.
_AGENT_SECONDS: Final = 10
_START_SECONDS: Final = 600
#: Roles of pods that do not get the run's own token: a server, a worker with the user's script, and Prometheus.
_POD_ROLES: Final = (Role.SERVER, Role.WORKER, Role.READER)
_PROBE_SECONDS: Final = 5
_METRICS_PORT: Final = 29603
#: Pods of workers or servers that a certificate can name: a chain of certificates has at most 100 kB.
_NAMED_PODS: Final = 512


def name_text(value: str) -> str:
    """Return the name of a run if objects of Kubernetes may have it. Raises ConfigurationError."""
    if not _NAME.fullmatch(value) or value in _YAML_WORDS:
        raise ConfigurationError(
            f"{value!r:.60} is not possible: use 1 to 40 of a-z 0-9 -, beginning with a letter, "
            f"but none of {', '.join(_YAML_WORDS)}"
        )
    return value


def image_text(value: str) -> str:
    """Return an image that is always the same. Raises ConfigurationError."""
    if not _IMAGE.fullmatch(value):
        raise ConfigurationError(
            f"{value!r:.200} names no version: append :TAG (not latest) or @sha256:DIGEST, so that a pod that is "
            "restarted has the same program as the others"
        )
    return value


def quantity_text(value: str) -> str:
    """Return a quantity of Kubernetes. Raises ConfigurationError."""
    if not _QUANTITY.fullmatch(value) or float(value.rstrip("mKMGTPi")) == 0:
        raise ConfigurationError(f"{value!r:.40} is not a quantity: write a number above 0, such as 2, 500m or 8Gi")
    return value


def _default_image() -> str:
    return f"psdist:{__version__}"


def _size(help_text: str, default: str) -> str:
    found: str = setting(help_text, quantity_text, default, "QUANTITY", group=_KUBERNETES_TITLE)
    return found


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings(GeneratedRun):
    """Settings of a run on Kubernetes. out: directory for the files."""

    out: Path | None = setting("directory for the files, which is created", named_file, None, "DIR")
    name: str = setting("name of the run's objects", name_text, "psdist", "NAME")
    image: str = setting(
        "image with psdist and the script (default: psdist with this version)", image_text, "", "IMAGE",
        group=_KUBERNETES_TITLE,
    )  # fmt: skip
    run_id: str = setting("name of the run (default: --name)", check_run_id, "", "NAME", group=_KUBERNETES_TITLE)
    server_cpus: int = setting("processors of each server", integer(1, 1024), 2, "N", group=_KUBERNETES_TITLE)
    server_memory: str = _size("memory of each server", "4Gi")
    worker_cpus: int = setting("processors of each worker pod", integer(1, 1024), 2, "N", group=_KUBERNETES_TITLE)
    worker_memory: str = _size("memory of each worker pod", "4Gi")
    snapshot_storage: str = _size("size of the volume with the snapshots", "100Gi")
    grace_seconds: int = setting(
        "longest time of a pod to end: to move its shards, and to write the last snapshot", integer(120, 86400), 300,
        group=_KUBERNETES_TITLE,
    )  # fmt: skip
    restarts_max: int = setting(
        "restarts of each worker pod, after those of its scripts", integer(0, 1000), 3, "N", name="--max-restarts",
        group=_KUBERNETES_TITLE,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is None:
            raise ConfigurationError("no directory for the files: pass --out DIR")


def command_line() -> CommandLine:
    """Return the command line of ``psdist generate k8s``."""
    return CommandLine(
        "psdist generate k8s",
        "Writes files for kubectl apply -k: a Deployment of the scheduler, a StatefulSet of servers, a Job of workers, "
        "overlays for GPUs, buckets, etcd, a standby, TLS and metrics, and a runtime for Kubeflow Trainer.",
        flags_of(KubernetesSettings),
        SCRIPT_USAGE,
        "Example: psdist generate k8s --out run --image registry/train:1 --nodes 4 --replicas 2 --nservers 3 train.py; "
        "kubectl apply -k run/storage; kubectl apply -k run/base.",
        first=("--out", "--nodes", "--nproc-per-node", "--nservers", "--replicas"),
    )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Write the files. Raises ConfigurationError, before anything is written, if the directory has files."""
    settings = read(KubernetesSettings, given, command=tuple(given.command))
    assert settings.out is not None
    found = files(settings)
    try:
        make_directory(settings.out)
        if any(settings.out.iterdir()):
            raise ConfigurationError(f"the directory {settings.out} has files: choose another --out, or remove them")
        for name, text in found.items():
            path = settings.out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        _write_tokens(settings.out / "base")
    except OSError as error:
        raise ConfigurationError(f"{settings.out} cannot be written: {error.strerror}. Choose another --out") from None
    if not _has_tls(settings):
        print(
            f"overlays/tls is left out: certificates name each pod, and at most {_NAMED_PODS} of each kind. "
            f"Use fewer --nodes than {settings.nodes}, with a larger --nproc-per-node, or make certificates otherwise"
        )
    count, out = len(found) + 1 + len(_POD_ROLES), settings.out
    print(f"{count} files; start the run: kubectl apply -k {out}/storage, then -k {out}/base")
    return OK


def _write_tokens(folder: Path) -> None:
    """Write the run's own token, and one of each role that needs no more."""
    token = secrets.token_urlsafe(32)
    for name, text in {"token": token, **{f"{role}-token": create(token, role) for role in _POD_ROLES}}.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{text}\n")


def files(settings: KubernetesSettings) -> dict[str, str]:
    """Return the text of each file by its path below the directory. The tokens are not among them."""
    values = _values(settings)
    left_out = () if _has_tls(settings) else (f"{_FOLDER}/overlays/tls/",)
    names = [name for name in template_names(_FOLDER) if not name.startswith(left_out)]
    found = {name.removeprefix(f"{_FOLDER}/"): fill(name, values) for name in names}
    # The tokens must not be committed with the other files.
    return found | {"base/.gitignore": "token\n*-token\n"}


def _has_tls(settings: KubernetesSettings) -> bool:
    return max(settings.nodes, settings.servers) <= _NAMED_PODS


def _dns_names(role: Role, settings: KubernetesSettings) -> list[str]:
    """Return the DNS names of a role's certificate: the hosts of its pods, and the names that state the role."""
    name = settings.name
    hosts = {
        "scheduler": [f"{name}-scheduler", *_schedulers(name), "localhost"],
        "server": [*(f"{name}-servers-{index}.{name}-servers" for index in range(settings.servers)), "localhost"],
        "worker": [f"{name}-workers-{index}.{name}-workers" for index in range(settings.nodes)],
    }.get(role, [])
    return [DOMAIN, *hosts, *(map(service_name, hosts) if role in SERVICE_ROLES else ())]


def _schedulers(name: str) -> list[str]:
    """Return the hosts of two schedulers."""
    return [f"{name}-scheduler-{index}.{name}-scheduler" for index in range(2)]


def _argument(text: str) -> str:
    """Return an argument of a container, in quotes of YAML. Kubernetes expands ``$(NAME)``, and takes ``$$`` for $."""
    doubled = text.replace("$", "$$").replace("\\", r"\\").replace('"', r"\"")
    # JSON writes characters beyond the first 65,536 as two, which YAML does not know.
    return '"' + "".join(each if " " <= each <= "~" else f"\\U{ord(each):08x}" for each in doubled) + '"'


def _values(settings: KubernetesSettings) -> dict[str, object]:
    """Return the values of all places in the templates."""
    grace = settings.grace_seconds
    return {
        "NAME": settings.name,
        "RUN_ID": settings.run_id or settings.name,
        "IMAGE": settings.image or _default_image(),
        "NODES": settings.nodes,
        "PROCESSES": settings.processes,
        "WORKERS": settings.workers,
        "SERVERS": settings.servers,
        "REPLICAS": settings.replicas,
        "SAVE_INTERVAL": settings.save_interval,
        "GRACE": grace,
        "PRE_STOP": _PRE_STOP_SECONDS,
        "DRAIN_TIMEOUT": grace - _PRE_STOP_SECONDS - _SAVING_SECONDS,
        "STOP_TIMEOUT": grace - _AGENT_SECONDS,
        "START_TIMEOUT": _START_SECONDS,
        # A server that waits for its scheduler ends by itself before its probe fails.
        "STARTUP_FAILURES": _START_SECONDS // _PROBE_SECONDS + 12,
        # With two copies a node must not have two servers; otherwise they are only spread.
        "MIN_DOMAINS": f"minDomains: {settings.servers}" if settings.replicas > 1 else "",
        "WHEN_UNSATISFIABLE": "DoNotSchedule" if settings.replicas > 1 else "ScheduleAnyway",
        **{f"{role.upper()}_DNS_NAMES": f"[{', '.join(_dns_names(role, settings))}]" for role in CERTIFICATE_ROLES},
        "SCHEDULERS": ",".join(f"{host}:29600" for host in _schedulers(settings.name)),
        "SERVER_CPUS": settings.server_cpus,
        "SERVER_MEMORY": settings.server_memory,
        "WORKER_CPUS": settings.worker_cpus,
        "WORKER_MEMORY": settings.worker_memory,
        "SNAPSHOT_STORAGE": settings.snapshot_storage,
        "METRICS_PORT_LAST": max(_METRICS_PORT, _METRICS_PORT + settings.processes - 1),
        "RESTARTS": settings.restarts_max,
        "SERVER_RESTARTS": settings.restarts_max * settings.servers,
        "ARGS": f"[{', '.join(map(_argument, ('--', *settings.command)))}]",
        # An agent that has lost its run is not restarted alone.
        "FAIL_JOB": [status for status in statuses("launcher", "stop", "requeue") if status != LATE],
        "FAIL_INDEX": [LATE],
        "SCHEDULER_STOPS": list(statuses("scheduler", "stop")),
        "SERVER_STOPS": list(statuses("server", "stop")),
        "WORKER_STOPS": list(statuses("launcher", "stop")),
    }
