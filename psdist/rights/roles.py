"""Roles, and the one table of the calls that each role may make.

A call that the table lacks is denied to every role. The run's own token is above the roles: its holder may make all
calls. ``psdist.wire.auth`` finds the caller's role and applies the table before the body of a request is read.

Some calls mean different things for different senders. Where a field decides, ``claim`` compares it with the caller's
role: a worker cannot register as a server, or end the membership of one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

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
