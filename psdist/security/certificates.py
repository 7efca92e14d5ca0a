"""A CA of its own for one deployment, the certificates that it issues, and the folder of both (``psdist certs``).

A certificate states the role of its holder in a URI among its SANs, ``psdist://RUN/ROLE``; RUN is ``*`` for any run.
Its other SANs are the hosts at which the holder may be dialed: none for an admin or a reader, who dial others alone.
Those of a scheduler or server have a service name for each host, too, without which nobody takes them for one. A
certificate serves both ends of a connection, because servers and workers dial each other.

In the folder ``ca.pem`` and ``ca-key.pem`` are the CA's; ``NAME.pem`` and ``NAME-key.pem`` those of one certificate.
Only their owner can read keys, from the moment they exist. A file is written whole or not at all, and replaces another
only on request. ``ca.pem`` may hold several CAs, while one replaces another.

Needs the package ``cryptography`` (the extra ``tls``), which nothing else in psdist needs.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from psdist import addresses
from psdist.errors import ConfigurationError
from psdist.machine import make_directory
from psdist.security.roles import (
    CLIENT_ROLES,
    DOMAIN,
    SERVICE_ROLES,
    Role,
    is_role_name,
    parse_role_uri,
    role_uri,
    service_name,
)

#: Names and addresses of this machine, which every certificate has.
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
#: Hosts whose clocks are behind accept a new certificate.
_EARLIER: Final = datetime.timedelta(minutes=5)
_DNS_NAME: Final = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
#: A DNS name has at most 253, and the service name is made from it.
_DNS_CHARACTERS: Final = 253 - len(service_name(""))


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, in PEM."""

    cert: bytes
    key: bytes


def make_authority(name: str, days: int, now: datetime.datetime) -> KeyPair:
    """Return a new CA. name: its common name. now: in UTC."""
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(name, name, key.public_key(), days, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _signed(builder, key, key)


def issue(
    authority: KeyPair, role: Role, run_id: str, hosts: Iterable[str], days: int, now: datetime.datetime
) -> KeyPair:
    """Return a new certificate of a role, and its key.

    run_id: the run it is for; empty for any.
    hosts: names and addresses at which the holder is dialed, besides this machine's own; none for ``CLIENT_ROLES``.
    now: in UTC.

    Raises ConfigurationError for a host that cannot be in a certificate, or a CA that expires before.
    """
    dialed = _dialed_hosts(role, hosts)
    issuer = x509.load_pem_x509_certificate(authority.cert)
    if now + datetime.timedelta(days=days) > issuer.not_valid_after_utc:
        raise ConfigurationError(
            f"the CA expires on {issuer.not_valid_after_utc:%Y-%m-%d}, before a certificate of {days} days: issue one "
            'of fewer days, or make a new CA (docs/secure.md, "Replace the CA")'
        )
    issuer_key = serialization.load_pem_private_key(authority.key, None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [
        x509.UniformResourceIdentifier(role_uri(run_id, role)),
        *map(_general_name, dict.fromkeys(dialed)),
        *_role_names(role, dialed),
    ]
    issuer_name = str(issuer.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
    builder = (
        _builder(f"psdist {role}", issuer_name, key.public_key(), days, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    return _signed(builder, key, issuer_key)


def _dialed_hosts(role: Role, hosts: Iterable[str]) -> tuple[str, ...]:
    """Return all hosts of a certificate. Raises ConfigurationError for hosts of a role that nobody dials."""
    given = tuple(hosts)
    if role not in CLIENT_ROLES:
        return (*LOOPBACK_HOSTS, *given)
    if given:
        raise ConfigurationError(
            f"--host {given[0]:.300}: nobody dials the holder of a certificate of role {role}, so it names no host. "
            "Leave out --host, or choose another --role"
        )
    return ()


def _role_names(role: Role, hosts: Iterable[str]) -> Iterator[x509.DNSName]:
    """Yield the DNS names that state a role."""
    if role in SERVICE_ROLES:
        yield from map(x509.DNSName, dict.fromkeys(map(service_name, hosts)))
    yield x509.DNSName(DOMAIN)


def _builder(
    subject: str, issuer: str, public_key: ec.EllipticCurvePublicKey, days: int, now: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, issuer_key: ec.EllipticCurvePrivateKey
) -> KeyPair:
    cert = builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return KeyPair(cert, private)


def _general_name(host: str) -> x509.GeneralName:
    """Return a host as a SAN. Raises ConfigurationError."""
    if host != "localhost" and (address := addresses.literal(host)) is not None:
        if address.is_unspecified:
            raise ConfigurationError(f"--host {host} is no address that anybody dials: name this host's own address")
        return x509.IPAddress(ipaddress.ip_address(str(address)))
    name = host.lower().removesuffix(".")
    if is_role_name(name):
        raise ConfigurationError(f"--host {host:.300} is a name by which certificates state roles: use another domain")
    if len(name) > _DNS_CHARACTERS or not _DNS_NAME.fullmatch(name):
        raise ConfigurationError(f"--host {host!r:.300} is neither an address nor a DNS name: write one host, no port")
    return x509.DNSName(name)


# --- the folder -------------------------------------------------------------------------------------------------------

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
    existing = [path.name for path in contents if os.path.lexists(path)]
    if existing and not overwrite:
        raise ConfigurationError(
            f"{folder} already holds {', '.join(sorted(existing))}: pass --overwrite to replace them, or name another "
            "folder. Processes with a certificate of a replaced CA are refused from then on"
        )
    try:
        make_directory(folder)
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
