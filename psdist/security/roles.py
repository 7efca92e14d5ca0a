"""Roles of members and callers of a run, and the names that state them in a certificate.

Two names do: a URI, by which the accepting side knows the caller, and service names, by which the dialing side knows
that a scheduler or server answers. A service name is a DNS name made from a host, so that whatever compares the name of
a peer, gRPC included, compares host and role together.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from psdist import addresses

Role = Literal["scheduler", "server", "worker", "admin", "reader"]

ROLES: Final[tuple[Role, ...]] = get_args(Role)
#: Roles of people and programs that dial others alone. Their certificates name no host, so that nobody who dials a
#: scheduler, server or worker can take the holder of one for it.
CLIENT_ROLES: Final[frozenset[Role]] = frozenset({"admin", "reader"})
#: Roles of those that accept gRPC and TCP calls. They trust each other.
SERVICE_ROLES: Final[frozenset[Role]] = frozenset({"scheduler", "server"})
#: DNS name in every certificate of an issuer that also writes service names. It ends in a domain for private use.
DOMAIN: Final = "psdist.internal"
_SERVICE: Final = f".service.{DOMAIN}"
#: In place of a run's name: any run.
ANY_RUN: Final = "*"
_SCHEME: Final = "psdist://"


def role_uri(run_id: str, role: Role) -> str:
    """Return the URI of a role in a run. run_id: empty for any run."""
    return f"{_SCHEME}{run_id or ANY_RUN}/{role}"


def service_name(host: str) -> str:
    """Return the DNS name of a scheduler or server at a host. An IPv6 address is written in full, with dashes."""
    address = addresses.literal(host) if host != "localhost" else None
    name = host.lower().removesuffix(".") if address is None else address.exploded.partition("%")[0].replace(":", "-")
    return name + _SERVICE


def is_service_name(name: str) -> bool:
    """True if ``service_name`` made this name."""
    return name.endswith(_SERVICE)


def service_host(name: str) -> str:
    """Return the host in a service name."""
    return name.removesuffix(_SERVICE)


def is_role_name(name: str) -> bool:
    """True if a DNS name in a certificate is none of a host, but states a role."""
    return name == DOMAIN or name.endswith(f".{DOMAIN}")


def is_role_uri(name: str) -> bool:
    """True if a name in a certificate is a URI of psdist, whether or not it states a known role."""
    return name.lower().startswith(_SCHEME)


def parse_role_uri(uri: str) -> tuple[str, Role] | None:
    """Return run (empty for any) and role of a URI, or None if it is none of psdist's."""
    run_id, _, name = uri.removeprefix(_SCHEME).partition("/")
    role = next((role for role in ROLES if role == name), None)
    if not uri.startswith(_SCHEME) or not run_id or role is None:
        return None
    return "" if run_id == ANY_RUN else run_id, role
