"""Roles, the one table of the calls that each role may make, and the names that state a role in a certificate.

A call that the table lacks is denied to every role. The run's own token is above the roles: its holder may make all
calls. ``psdist.wire.auth`` finds the caller's role and applies the table before the body of a request is read.

Some calls mean different things for different senders. Where a field decides, ``claim`` compares it with the caller's
role: a worker cannot register as a server, or end the membership of one.

In a certificate two names state a role: a URI, by which the accepting side knows the caller, and service names, by
which the dialing side knows that a scheduler or server answers. A service name is a DNS name made from a host, so that
whatever compares the name of a peer, gRPC included, compares host and role together.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from psdist import addresses
from psdist.errors import PermissionDeniedError


class Role(StrEnum):
    """Part that a caller plays in a run."""

    #: Holder of the run's own token, or any caller of a run without one.
    ALL = "all"
    WORKER = "worker"
    SERVER = "server"
    #: Part of certificates alone: a scheduler calls nobody, and needs the run's own token to check those of others.
    SCHEDULER = "scheduler"
    #: Changes the run from outside: scales it, drains servers, saves snapshots.
    ADMIN = "admin"
    #: Looks at the run, and changes nothing.
    READER = "reader"


#: Roles that a token can be made for, in the order of the documents.
TOKEN_ROLES: Final = (Role.WORKER, Role.SERVER, Role.ADMIN, Role.READER)

_WORKER: Final = frozenset({Role.WORKER})
_SERVER: Final = frozenset({Role.SERVER})
_ADMIN: Final = frozenset({Role.ADMIN})
_MEMBERS: Final = _WORKER | _SERVER
_READERS: Final = _ADMIN | {Role.READER}
_ANY: Final = frozenset(TOKEN_ROLES)

SCHEDULER_SERVICE: Final = "psdist.v1.SchedulerService"
SERVER_SERVICE: Final = "psdist.v1.ServerService"
#: Check needs no token at all.
HEALTH_CHECK: Final = "/grpc.health.v1.Health/Check"
#: The first frame of a link between workers, and the pages of a process: as if they were calls.
PEER_LINK: Final = "/psdist.v1.PeerFrame/hello"
METRICS_PAGES: Final = "/http/metrics"
DASHBOARD_PAGES: Final = "/http/dashboard"


def _calls(service: str, **roles: frozenset[Role]) -> dict[str, frozenset[Role]]:
    return {f"/{service}/{method}": allowed for method, allowed in roles.items()}


#: Roles that may make a call, by the call's full name.
RIGHTS: Final[dict[str, frozenset[Role]]] = {
    **_calls(
        SCHEDULER_SERVICE,
        Register=_MEMBERS,
        Session=_MEMBERS,
        Leave=_MEMBERS,
        CreateParameters=_WORKER,
        CommitParameters=_WORKER,
        DescribeParameters=_WORKER,
        GetClusterMap=_ANY,
        Barrier=_WORKER,
        FormGroup=_WORKER,
        # psdist-worker calls it for the worker that it starts.
        Rendezvous=_WORKER | _ADMIN,
        # A server that ends moves its shards away first.
        Drain=_SERVER | _ADMIN,
        Scale=_ADMIN,
        # Its request can set the number of workers, after the scheduler lost it.
        WatchScale=_ADMIN,
        OpenDataset=_WORKER,
        LeaseRange=_WORKER,
        EndRanges=_WORKER,
        SaveSnapshot=_WORKER | _ADMIN,
        HandInState=_WORKER,
        GetState=_WORKER,
        GetDataPosition=_WORKER | _READERS,
        SetDataPosition=_WORKER,
        # The client library shows the status to its script.
        GetStatus=_WORKER | _READERS,
        WatchEvents=_READERS,
        GetSamples=_READERS,
        # It slows the members down a little while it records, and changes nothing.
        Trace=_READERS,
        # It shows names and lines of the user's code.
        GetStacks=_ADMIN,
        GetSummary=_READERS,
    ),
    **_calls(
        SERVER_SERVICE,
        Install=_WORKER,
        PushPull=_WORKER,
        Push=_WORKER,
        Pull=_WORKER,
        # The socket and the TCP port take only connections that such a call has announced.
        Share=_WORKER,
        Connect=_WORKER,
        FetchNorms=_SERVER,
        Replicate=_SERVER,
        GetStatistics=_READERS,
    ),
    **_calls("grpc.health.v1.Health", Check=_ANY, Watch=_ANY, List=_ANY),
    **_calls("grpc.reflection.v1alpha.ServerReflection", ServerReflectionInfo=_ANY),
    PEER_LINK: _WORKER,
    METRICS_PAGES: _READERS,
    DASHBOARD_PAGES: _READERS,
}


def check(role: Role, call: str) -> None:
    """Raise PermissionDeniedError unless ``role`` may make ``call`` (a full name, such as
    ``/psdist.v1.SchedulerService/Scale``)."""
    if role is not Role.ALL and role not in RIGHTS.get(call, frozenset()):
        raise denial(role, call.rpartition("/")[2], RIGHTS.get(call, frozenset()))


def claim(role: Role, claimed: Role, what: str) -> None:
    """Raise PermissionDeniedError if a caller of ``role`` claims to be of another one. what: the claim, for the
    message: "Register as a server"."""
    if role not in (Role.ALL, claimed):
        raise denial(role, what, frozenset({claimed}))


def denial(role: Role, what: str, allowed: frozenset[Role]) -> PermissionDeniedError:
    """Return the error for a caller of ``role``. allowed: roles that may do ``what``."""
    names = [one.value for one in TOKEN_ROLES if one in allowed]
    # Of several roles, the caller knows which it plays.
    wanted = names[0] if len(names) == 1 else "ROLE"
    remedy = "use the run's own token"
    if names:
        ways = f"a token (psdist token create --role {wanted}) or certificate (psdist certs issue --role {wanted})"
        remedy = f"use {ways} of that role"
    return PermissionDeniedError(
        f"{what[:100]} needs the role {' or '.join(names) or 'of nobody'}, and this caller is {role.value}: {remedy}",
        role=role.value,
        needs=",".join(names),
    )


# --- names in certificates --------------------------------------------------------------------------------------------

#: Roles that a certificate can state.
CERTIFICATE_ROLES: Final = (Role.SCHEDULER, Role.SERVER, Role.WORKER, Role.ADMIN, Role.READER)
#: Roles of people and programs that dial others alone. Their certificates name no host, so that nobody who dials a
#: scheduler, server or worker can take the holder of one for it.
CLIENT_ROLES: Final = frozenset({Role.ADMIN, Role.READER})
#: Roles of those that accept gRPC and TCP calls. They trust each other.
SERVICE_ROLES: Final = frozenset({Role.SCHEDULER, Role.SERVER})
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
    role = next((role for role in CERTIFICATE_ROLES if role == name), None)
    if not uri.startswith(_SCHEME) or not run_id or role is None:
        return None
    return "" if run_id == ANY_RUN else run_id, role
