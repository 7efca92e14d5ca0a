"""Folder of a CA and its certificates, which ``psdist certs`` writes and shows.

``ca.pem`` and ``ca-key.pem`` are the CA's; ``NAME.pem`` and ``NAME-key.pem`` those of one certificate. Only their owner
can read keys, from the moment they exist. A file is written whole or not at all, and replaces another only on request.
``ca.pem`` may hold several CAs, while one replaces another.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from psdist.errors import ConfigurationError
from psdist.security.authority import KeyPair
from psdist.security.roles import is_role_name, parse_role_uri

CA_NAME: Final = "ca"
_CERTIFICATE_MODE: Final = 0o644


@dataclass(frozen=True, slots=True)
class CertificateInfo:
    """Content of one certificate.

    role, run_id: from its SAN URI; an empty role for a CA or a certificate of another tool, an empty run for any.
    hosts: names and addresses at which its holder may be dialed.
    """

    file: str
    subject: str
    issuer: str
    is_ca: bool
    role: str
    run_id: str
    hosts: tuple[str, ...]
    not_before: datetime.datetime
    not_after: datetime.datetime


def certificate_file(folder: Path, name: str) -> Path:
    """Return the file of a certificate."""
    return folder / f"{name}.pem"


def key_file(folder: Path, name: str) -> Path:
    """Return the file of a certificate's key."""
    return folder / f"{name}-key.pem"


def write(folder: Path, pairs: Mapping[str, KeyPair], *, overwrite: bool) -> None:
    """Write certificates and keys by name. The folder is created if it does not exist.

    Raises ConfigurationError for files that exist, unless ``overwrite``, before anything is written; and for a folder
    that cannot be written.
    """
    contents = {}
    for name, pair in pairs.items():
        contents[key_file(folder, name)], contents[certificate_file(folder, name)] = pair.key, pair.cert
    existing = [path.name for path in contents if path.exists()]
    if existing and not overwrite:
        raise ConfigurationError(
            f"{folder} already holds {', '.join(sorted(existing))}: pass --overwrite to replace them, or name another "
            "folder. Processes with a certificate of a replaced CA are refused from then on"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in contents.items():
            _write_file(path, content, private=path.name.endswith("-key.pem"), overwrite=overwrite)
    except OSError as error:
        raise ConfigurationError(f"{error.filename or folder} cannot be written: {error.strerror}") from None


def _write_file(path: Path, content: bytes, *, private: bool, overwrite: bool) -> None:
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # of mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if not private:
                os.fchmod(file.fileno(), _CERTIFICATE_MODE)
        if overwrite:
            os.replace(unfinished, path)
        else:
            os.link(unfinished, path)  # Fails if another process has made the file meanwhile.
    finally:
        with suppress(FileNotFoundError):
            os.unlink(unfinished)


def read_authority(folder: Path) -> KeyPair:
    """Return the CA of a folder: of several in its file, the one of the key. Raises ConfigurationError."""
    key_path, cert_path = key_file(folder, CA_NAME), certificate_file(folder, CA_NAME)
    key = _read(key_path, "run this where 'psdist certs init' was run, which keeps the CA's key")
    try:
        public = serialization.load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{key_path} is no unencrypted private key in PEM: {error}") from None
    for certificate in _certificates(cert_path):
        if certificate.public_key() == public:
            return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), key)
    raise ConfigurationError(f"{cert_path} holds no certificate of the key {key_path}: use files made together")


def describe(path: Path) -> Iterator[CertificateInfo]:
    """Yield the certificates in a file, or in all files ``*.pem`` of a folder but keys. Raises ConfigurationError."""
    if not path.is_dir():
        yield from _describe_file(path)
        return
    files = sorted(file for file in path.glob("*.pem") if not file.name.endswith("-key.pem"))
    if not files:
        raise ConfigurationError(f"{path} holds no certificates (*.pem): make some with 'psdist certs init {path}'")
    for file in sorted(files, key=lambda file: file.stem != CA_NAME):
        yield from _describe_file(file)


def _describe_file(path: Path) -> Iterator[CertificateInfo]:
    for certificate in _certificates(path):
        names = _names(certificate)
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        run_id, role = next(filter(None, map(parse_role_uri, uris)), ("", ""))
        yield CertificateInfo(
            file=path.name,
            subject=_common_name(certificate.subject),
            issuer=_common_name(certificate.issuer),
            is_ca=_is_ca(certificate),
            role=role,
            run_id=run_id,
            hosts=(
                *(name for name in names.get_values_for_type(x509.DNSName) if not is_role_name(name)),
                *map(str, names.get_values_for_type(x509.IPAddress)),
            ),
            not_before=certificate.not_valid_before_utc,
            not_after=certificate.not_valid_after_utc,
        )


def _certificates(path: Path) -> list[x509.Certificate]:
    content = _read(path, "name a file or folder that 'psdist certs init' has written")
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise ConfigurationError(f"{path} is no certificate in PEM") from None


def _read(path: Path, remedy: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}; {remedy}") from None


def _names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def _is_ca(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else name.rfc4514_string()
