"""The certificates, settings and probes of the TLS overlay for Kubernetes, with real processes.

A network namespace has the names of the pods, which all mean its loopback; those of headless Services follow readiness
as in Kubernetes. Only paths are of this machine.
"""

from __future__ import annotations

import datetime
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from psdist.cli import k8s

pytest.importorskip("yaml", reason="PyYAML reads the generated files")
pytest.importorskip("cryptography", reason="it issues the certificates")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tests.support.kustomize import Object, render
from tests.support.pods import pods, run_pods

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "mount"))), reason="needs root and namespaces"
    ),
]
_TRAINS = """
import pathlib, numpy as np, psdist
with psdist.init() as context:
    weights = context.client.parameters("m", {"w": np.ones(60_000, np.float32)}, psdist.optim.SGD(lr=0.5))
    steps, over = 0, False
    while not over:
        values = weights.push_pull({"w": np.full(60_000, context.rank, np.float32)})["w"]
        steps += 1
        if steps == 5:
            print("trains", flush=True)
        over = context.collectives.all_reduce(np.full(1, pathlib.Path("led").exists(), np.float32))[0] == 2
    assert (values == np.float32(1 - 0.25 * steps)).all()
    print("exact", flush=True)
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


def test_pods_train_with_names_and_certificates_of_the_manifests(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINS)
    flags = ("--out", str(tmp_path / "run"), "--nodes", "2", "--nservers", "1")
    assert k8s.run(k8s.command_line().parse([*flags, "train.py"], {}), {}) == 0
    objects = render(tmp_path / "run/overlays/tls")
    issuer = CertManager()
    for each in objects:
        if each["kind"] == "Certificate" and not each["spec"].get("isCA"):
            issuer.issue(each["spec"], tmp_path / "tls" / each["metadata"]["name"].removeprefix("psdist-"))
    host, servers, workers = "psdist-scheduler", ("psdist-servers-0",), ("psdist-workers-0", "psdist-workers-1")
    statuses, logs = run_pods(list(pods(objects, (host,), servers, workers, tmp_path)), tmp_path)
    assert statuses.pop("failover")["named"], "the servers keep their names while the scheduler is away"
    assert set(statuses.values()) == {0}, logs
    for number in range(2):
        assert "exact" in (tmp_path / f"psdist-workers-{number}.psdist-workers.log").read_text(), logs
