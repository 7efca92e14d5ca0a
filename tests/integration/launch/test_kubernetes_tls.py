"""The certificates, settings and probes of the TLS overlay for Kubernetes, with real processes.

A network namespace has the names of the pods, which all mean its loopback. Only paths are of this machine.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psdist.cli.generate import k8s

pytest.importorskip("yaml", reason="PyYAML reads the generated files")
pytest.importorskip("cryptography", reason="it issues the certificates")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support.kustomize import Object, render

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "mount"))), reason="needs root and namespaces"
    ),
]
_DRIVER = Path(__file__).parents[2] / "support/scripts/pods_on_loopback.py"
_MODULES = {
    "psdist-scheduler": ("-m", "psdist_scheduler"),
    "psdist-server": ("-m", "psdist_server"),
    "psdist-worker": ("-c", "from psdist.cli.main import worker; worker()"),
}
_TRAINS = """
import numpy as np, psdist
with psdist.init() as context:
    weights = context.client.parameters("m", {"w": np.ones(60_000, np.float32)}, psdist.optim.SGD(lr=0.5))
    values = weights.push_pull({"w": np.full(60_000, context.rank, np.float32)})
    total = context.collectives.all_reduce(np.full(3, 1 + context.rank, np.float32))
    print("trained", values["w"][0], total, flush=True)
"""


class CertManager:
    """Issues what the objects of kind Certificate ask for, with a CA of its own."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "psdist CA")])
        self.certificate = self._sign(
            self._name, self._key, [x509.BasicConstraints(ca=True, path_length=None)], datetime.timedelta(days=1)
        )

    def issue(self, spec: Object, folder: Path) -> None:
        """Write the files of a Certificate's Secret."""
        assert spec["privateKey"]["algorithm"] == "ECDSA" and spec["privateKey"]["size"] == 256
        assert spec["usages"] == ["digital signature", "server auth", "client auth"]
        key = ec.generate_private_key(ec.SECP256R1())
        names = [*map(x509.DNSName, spec["dnsNames"]), *map(x509.UniformResourceIdentifier, spec["uris"])]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, spec["commonName"])])
        extensions = [
            x509.BasicConstraints(ca=False, path_length=None),
            x509.SubjectAlternativeName(names),
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
        ]
        hours = int(spec["duration"].removesuffix("h"))
        certificate = self._sign(subject, key, extensions, datetime.timedelta(hours=hours))
        folder.mkdir(parents=True)
        (folder / "tls.crt").write_bytes(certificate)
        (folder / "ca.crt").write_bytes(self.certificate)
        (folder / "tls.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (folder / "tls.key").chmod(0o440)

    def _sign(self, subject: Any, key: Any, extensions: list[Any], lifetime: datetime.timedelta) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now).not_valid_after(now + lifetime)
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def pods(objects: list[Object], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the pods of a run of one server and two workers, by their host names."""
    found = {each["kind"]: each["spec"]["template"]["spec"] for each in objects if "template" in each.get("spec", {})}
    for kind, role, hosts in (
        ("Deployment", "scheduler", ("psdist-scheduler",)),
        ("StatefulSet", "server", ("psdist-servers-0.psdist-servers",)),
        ("Job", "worker", ("psdist-workers-0.psdist-workers", "psdist-workers-1.psdist-workers")),
    ):
        for number, host in enumerate(hosts):
            yield host, pod(found[kind], role, number, host, path)


def pod(template: Object, role: str, number: int, host: str, path: Path) -> dict[str, Any]:
    """Return the process of a pod."""
    (container,) = template["containers"]
    fields = {"PSDIST_SERVER_ID": host.partition(".")[0], "POD_NAME": host.partition(".")[0], "POD_INDEX": str(number)}
    fields |= {"PSDIST_NODE_RANK": str(number), "PSDIST_KERNEL_THREADS": "1"}
    variables = {each["name"]: each.get("value", fields.get(each["name"])) for each in container["env"]}
    for name, value in variables.items():
        for field in fields:
            value = value.replace(f"$({field})", fields[field])
        variables[name] = value.replace("/etc/psdist-tls", str(path / "tls" / role))
    here = {
        "PSDIST_TOKEN_FILE": str(path / "run/base/token"),
        "PSDIST_STORE": str(path / "scheduler.sqlite"),
        "PSDIST_STORAGE_PATH": str(path / "snapshots"),
    }
    variables |= {name: value for name, value in here.items() if name in variables}
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    probes = [[sys.executable, *container[kind]["exec"]["command"][1:]] for kind in kinds if kind in container]
    return {
        "name": host,
        "argv": [sys.executable, *_MODULES[container["command"][0]], *container.get("args", ())],
        "env": {**os.environ, **variables},
        "probes": probes,
    }


def test_pods_train_with_the_certificates_of_the_manifests(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINS)
    flags = ("--out", str(tmp_path / "run"), "--nodes", "2", "--nservers", "1")
    assert k8s.run(k8s.command_line().parse([*flags, "train.py"], {}), {}) == 0
    objects = render(tmp_path / "run/overlays/tls")
    issuer = CertManager()
    for each in objects:
        if each["kind"] == "Certificate" and not each["spec"].get("isCA"):
            issuer.issue(each["spec"], tmp_path / "tls" / each["metadata"]["name"].removeprefix("psdist-"))
    found = dict(pods(objects, tmp_path))
    (tmp_path / "pods.json").write_text(json.dumps(list(found.values())))
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost {' '.join(found)}\n")
    script = 'ip link set lo up && mount --bind "$1" /etc/hosts && exec "$2" "$3" "$4"'
    ended = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", script, "sh",
         tmp_path / "hosts", sys.executable, _DRIVER, tmp_path / "pods.json"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    logs = "\n".join(f"--- {file.name}\n{file.read_text()[-4000:]}" for file in sorted(tmp_path.glob("*.log")))
    assert ended.returncode == 0, ended.stderr + logs
    assert set(json.loads(ended.stdout).values()) == {0}, ended.stdout + logs
    for number in range(2):
        assert "trained 0.75 [3. 3. 3.]" in (tmp_path / f"psdist-workers-{number}.psdist-workers.log").read_text(), logs
