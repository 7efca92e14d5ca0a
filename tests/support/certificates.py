"""Certificates for tests: a CA, and files that it issued."""

from __future__ import annotations

import datetime
from pathlib import Path

from psdist.security.certificates import KeyPair, issue, make_authority
from psdist.security.roles import Role
from psdist.security.tls import TlsFiles

NOW = datetime.datetime.now(datetime.UTC)


def make_ca(name: str = "test CA") -> KeyPair:
    """Return a CA that is valid for a year."""
    return make_authority(name, 365, NOW)


def write_tls(
    directory: Path,
    ca: KeyPair,
    role: Role = Role.WORKER,
    *,
    run_id: str = "",
    hosts: tuple[str, ...] = (),
    days: int = 90,
    now: datetime.datetime = NOW,
    trusted: bytes = b"",
) -> TlsFiles:
    """Issue a certificate and write the three files into ``directory``, over older ones.

    trusted: PEM of the CAs to trust; empty for ``ca`` alone.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = TlsFiles(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")
    pair = issue(ca, role, run_id, hosts, days, now)
    for path, content in zip((files.ca, files.cert, files.key), (trusted or ca.cert, pair.cert, pair.key), strict=True):
        Path(path).write_bytes(content)
    return files
