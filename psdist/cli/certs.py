"""``psdist certs``: makes a CA and certificates for mutual TLS, issues further ones, and shows them.

``psdist.security`` does the work. Its modules need the package ``cryptography`` and are imported by the commands alone.
"""

from __future__ import annotations

import datetime
import ipaddress
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from psdist.cli.commands import Command, Group, Leaf, show
from psdist.errors import ConfigurationError
from psdist.security.roles import CERTIFICATE_ROLES, CLIENT_ROLES, Role
from psdist.security.tls import WARN_SECONDS
from psdist.settings.config import check_run_id
from psdist.settings.exit_codes import FAILURE, OK, UNAVAILABLE
from psdist.settings.flags import CommandLine, Flag, integer, one_of, text
from psdist.settings.programs import FORMAT_FLAG

if TYPE_CHECKING:
    from psdist.security.certificates import CertificateInfo

_FOLDER: Final = "certs"
_ROLES: Final = ", ".join(CERTIFICATE_ROLES)
_CENTURY_DAYS: Final = 36_500
_RANGE_ADDRESSES: Final = 256
#: No variable sets these flags: PSDIST_HOST, for one, is the address that a program listens on.
_HOST: Final = Flag(
    "--host", "name, address, or range of addresses (10.0.0.0/28) at which others dial the holder; repeat it, or "
    "separate several by commas", text, "",
    "HOST", twin=False, repeats=True,
)  # fmt: skip
_DAYS: Final = Flag("--days", "validity of the certificates", integer(1, _CENTURY_DAYS), 90, "DAYS", twin=False)
_RUN_ID: Final = Flag(
    "--run-id", "run that the certificates are for (default: any)", check_run_id, "", "NAME", twin=False
)
_OVERWRITE: Final = Flag("--overwrite", "replace files that exist", twin=False)


# --- init -------------------------------------------------------------------------------------------------------------


def _init_line() -> CommandLine:
    return CommandLine(
        "psdist certs init",
        "Makes a CA and one certificate for each role: scheduler, server, worker, admin and reader.",
        (
            _HOST,
            _DAYS,
            Flag("--ca-days", "validity of the CA", integer(1, _CENTURY_DAYS), 3650, "DAYS", twin=False),
            _RUN_ID,
            _OVERWRITE,
        ),
        words=("[DIR]",),
        epilog=f"DIR is {_FOLDER} by default. Keep ca-key.pem where nobody else can read it, and copy to each machine "
        "ca.pem and the two files of its role. See docs/secure.md.",
    )


def _init(given: Namespace, environ: Mapping[str, str]) -> int:
    _require_cryptography()
    from psdist.security import certificates

    now = datetime.datetime.now(datetime.UTC)
    ca = certificates.make_authority(f"psdist CA {now:%Y-%m-%d}", given.ca_days, now)
    hosts = _hosts(given.host)
    pairs: dict[str, certificates.KeyPair] = {certificates.CA_NAME: ca}
    for role in CERTIFICATE_ROLES:
        dialed = () if role in CLIENT_ROLES else hosts
        pairs[role] = certificates.issue(ca, role, given.run_id, dialed, given.days, now)
    place = _place(given)
    certificates.write(place, pairs, overwrite=given.overwrite)
    print(f"wrote a CA and certificates of {_ROLES} to {place}, valid for {given.days} days")
    if not hosts:
        print("They are for this machine alone: name the machines of the run by --host for others to reach them")
    return OK


# --- issue ------------------------------------------------------------------------------------------------------------


def _issue_line() -> CommandLine:
    return CommandLine(
        "psdist certs issue",
        "Issues one more certificate of the CA in DIR, or renews one (--overwrite).",
        (
            Flag("--role", f"role of the holder: {_ROLES}", one_of(*CERTIFICATE_ROLES), "", "ROLE", twin=False),
            Flag("--name", "name of the files, without .pem (default: the role)", _file_name, "", "NAME", twin=False),
            _HOST,
            _DAYS,
            _RUN_ID,
            _OVERWRITE,
        ),
        words=("[DIR]",),
        epilog=f"DIR is {_FOLDER} by default. Running processes read replaced files again: nothing is restarted.",
    )


def _issue(given: Namespace, environ: Mapping[str, str]) -> int:
    _require_cryptography()
    from psdist.security import certificates

    if not given.role:
        raise ConfigurationError(f"--role is missing: name one of {_ROLES}")
    role = Role(given.role)
    place, name = _place(given), given.name or role
    now, ca = datetime.datetime.now(datetime.UTC), certificates.read_authority(place)
    pair = certificates.issue(ca, role, given.run_id, _hosts(given.host), given.days, now)
    certificates.write(place, {name: pair}, overwrite=given.overwrite)
    print(f"wrote {certificates.certificate_file(place, name)} and its key, valid for {given.days} days")
    return OK


def _file_name(value: str) -> str:
    if check_run_id(value) == "ca" or value.endswith("-key"):
        raise ValueError(f"{value!r} is the name of another file here")
    return value


# --- show -------------------------------------------------------------------------------------------------------------


def _show_line() -> CommandLine:
    return CommandLine(
        "psdist certs show",
        "Shows the certificates in a file or folder: role, run, hosts, and when they expire.",
        (replace(FORMAT_FLAG, twin=False),),
        words=("[PATH]",),
        epilog=f"PATH is {_FOLDER} by default. Exit status: 0 all are valid; 1 one expires within a week; 69 one has "
        "expired, or is not valid yet; 2 wrong use.",
    )


def _show(given: Namespace, environ: Mapping[str, str]) -> int:
    _require_cryptography()
    from psdist.security import certificates

    now, found = datetime.datetime.now(datetime.UTC), list(certificates.describe(_place(given)))
    show(given.format, [_as_json(one, now) for one in found], _print)
    if not all(one.not_before <= now < one.not_after for one in found):
        return UNAVAILABLE
    return FAILURE if any((one.not_after - now).total_seconds() < WARN_SECONDS for one in found) else OK


def _as_json(one: CertificateInfo, now: datetime.datetime) -> dict[str, Any]:
    return {
        "file": one.file,
        "role": "ca" if one.is_ca else one.role,
        "run_id": one.run_id,
        "hosts": list(one.hosts),
        "subject": one.subject,
        "issuer": one.issuer,
        "not_before": one.not_before.isoformat(),
        "not_after": one.not_after.isoformat(),
        "days_left": round((one.not_after - now).total_seconds() / 86400, 1),
        "state": _state(one, now),
    }


def _state(one: CertificateInfo, now: datetime.datetime) -> str:
    if now >= one.not_after:
        return "expired"
    if now < one.not_before:
        return "not valid yet"
    return "expires soon" if (one.not_after - now).total_seconds() < WARN_SECONDS else "valid"


def _print(found: Sequence[dict[str, Any]]) -> None:
    from psdist.cli.tables import print_lines, table

    def row(one: dict[str, Any]) -> list[str]:
        expires = f"{one['not_after'][:10]} ({one['days_left']:g} days)"
        run = "" if one["role"] == "ca" else one["run_id"] or "any"
        return [one["file"], one["role"] or "none", run, ", ".join(one["hosts"]), expires, one["state"], one["issuer"]]

    print_lines(table(("file", "role", "run", "hosts", "expires", "state", "issuer"), map(row, found)))


# --- all --------------------------------------------------------------------------------------------------------------


def _hosts(value: str) -> list[str]:
    """Return the hosts in a list, in which a range such as 10.0.0.0/28 stands for its addresses."""
    parts = [part for part in (part.strip() for part in value.split(",")) if part]
    return [host for part in parts for host in (_addresses(part) if "/" in part else [part])]


def _addresses(value: str) -> list[str]:
    try:
        network = ipaddress.ip_network(value)
    except ValueError as error:
        raise ConfigurationError(f"--host {value} is no range of addresses: {error}") from None
    if network.num_addresses > _RANGE_ADDRESSES:
        raise ConfigurationError(
            f"--host {value} has {network.num_addresses} addresses: name at most {_RANGE_ADDRESSES}, as in "
            "10.0.0.0/24, because all of them are in the certificate"
        )
    return list(map(str, network.hosts()))


def _place(given: Namespace) -> Path:
    return Path(given.words[0] or _FOLDER)


def _require_cryptography() -> None:
    if find_spec("cryptography") is None:
        raise ConfigurationError("psdist certs needs the package cryptography: pip install cryptography")


CERTS: Final = Group(
    "psdist certs",
    "Certificates for mutual TLS between scheduler, servers and workers.",
    (
        Command("init", "make a CA and one certificate per role: psdist certs init DIR --host node-1",
                lambda: Leaf(_init_line, _init)),
        Command("issue", "issue or renew one certificate: psdist certs issue DIR --role worker",
                lambda: Leaf(_issue_line, _issue)),
        Command("show", "show roles, hosts and expiry: psdist certs show DIR", lambda: Leaf(_show_line, _show)),
    ),
    "Each command has --help. docs/secure.md has an example with three machines.",
)  # fmt: skip
