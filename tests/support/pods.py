"""Pods of rendered manifests as real processes, in a network namespace that knows their names.

Their names mean the loopback, or each an address of it of its own, which then stands for 0.0.0.0. They resolve when
Kubernetes' DNS would know them. Only paths are of this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.support.kustomize import Object

_DRIVER: Final = Path(__file__).parent / "scripts/pods_on_loopback.py"
_MODULES: Final = {
    "psdist-scheduler": ("-m", "psdist_scheduler"),
    "psdist-server": ("-m", "psdist_server"),
    "psdist-worker": ("-c", "from psdist.cli.main import worker; worker()"),
}


def pods(
    objects: list[Object], schedulers: Sequence[str], servers: Sequence[str], workers: Sequence[str], path: Path
) -> Iterator[dict[str, Any]]:
    """Yield the pods of a run: their names, which are parts of their host names, and their processes."""
    with_pods = [each for each in objects if "template" in each.get("spec", {})]
    found = {
        each["spec"]["template"]["spec"]["containers"][0]["name"]: each["spec"]["template"]["spec"]
        for each in with_pods
    }
    services = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Service"}
    for role, names in (("scheduler", schedulers), ("server", servers), ("worker", workers)):
        service = {"scheduler": "psdist-scheduler", "server": "psdist-servers", "worker": "psdist-workers"}[role]
        for number, name in enumerate(names):
            host = name if name == service else f"{name}.{service}"
            # A headless Service names each of its pods, once that is ready if it does not say otherwise.
            is_headless = services[service].get("clusterIP") == "None"
            is_hidden = is_headless and not services[service].get("publishNotReadyAddresses", False)
            yield _pod(found[role], role, number, host, path) | {"named_once_ready": is_hidden}


def _pod(template: Object, role: str, number: int, host: str, path: Path) -> dict[str, Any]:
    (container,) = template["containers"]
    fields = {"PSDIST_SERVER_ID": host.partition(".")[0], "POD_NAME": host.partition(".")[0], "POD_INDEX": str(number)}
    fields |= {"PSDIST_NODE_RANK": str(number), "PSDIST_KERNEL_THREADS": "1"}
    variables = {each["name"]: each.get("value", fields.get(each["name"])) for each in container["env"]}
    for name, value in variables.items():
        for field in fields:
            value = value.replace(f"$({field})", fields[field])
        variables[name] = value.replace("/etc/psdist-tls", str(path / "tls" / role))
    here = {
        "PSDIST_TOKEN_FILE": str(path / "run/base" / token_key(template)),
        "PSDIST_STORAGE_PATH": str(path / "snapshots"),
    }
    if "://" not in variables.get("PSDIST_STORE", ""):
        here["PSDIST_STORE"] = str(path / "scheduler.sqlite")
    variables |= {name: value for name, value in here.items() if name in variables}
    probes = [container[kind] for kind in ("startupProbe", "readinessProbe", "livenessProbe") if kind in container]
    return {
        "name": host,
        "role": role,
        "address": "127.0.0.1",
        "argv": [sys.executable, *_MODULES[container["command"][0]], *container.get("args", ())],
        "env": {**os.environ, **variables},
        "probes": [_argv(probe, "localhost") for probe in probes],
    }


def token_key(template: Object) -> str:
    """Return the key of the Secret with the tokens that a pod sees as its token."""
    (volume,) = [each["secret"] for each in template["volumes"] if each["name"] == "token"]
    (item,) = volume["items"]
    assert item["path"] == "token"
    return str(item["key"])


def _argv(probe: Object, host: str) -> list[str]:
    """Return the command of a probe, which Kubernetes itself makes if it is one of gRPC."""
    if "exec" in probe:
        return [sys.executable, *probe["exec"]["command"][1:]]
    asked = probe["grpc"]
    return [sys.executable, "-m", "psdist.cli.health", f"{host}:{asked['port']}", "3", asked.get("service", "")]


def with_own_address(pod: dict[str, Any], last: int) -> dict[str, Any]:
    """Return a pod that listens at an address of the loopback of its own, as pods with the same port must."""
    address = f"127.0.0.{last}"
    probes = [[each.replace("localhost", address) for each in argv] for argv in pod["probes"]]
    env = {name: address if value == "0.0.0.0" else value for name, value in pod["env"].items()}
    return pod | {"address": address, "probes": probes, "env": env}


def run_pods(running: list[dict[str, Any]], path: Path) -> tuple[dict[str, Any], str]:
    """Run pods until the workers have ended. Returns the reports of the driver, and the logs."""
    (path / "pods.json").write_text(json.dumps(running))
    (path / "hosts").touch()
    script = 'ip link set lo up && mount --bind "$1" /etc/hosts && exec "$2" "$3" "$4"'
    ended = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh",
         path / "hosts", sys.executable, _DRIVER, path / "pods.json"],
        cwd=path, capture_output=True, text=True,
    )  # fmt: skip
    logs = "\n".join(f"--- {file.name}\n{file.read_text()[-4000:]}" for file in sorted(path.glob("*.log")))
    assert ended.returncode == 0, ended.stderr + logs
    return json.loads(ended.stdout), ended.stdout + logs
