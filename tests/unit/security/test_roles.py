"""The table of rights: every call of every service has an entry, and nothing else does."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from psdist.errors import PermissionDeniedError
from psdist.security import roles
from psdist.security.roles import RIGHTS, TOKEN_ROLES, Role
from psdist.v1 import scheduler_pb2, server_pb2

#: Every service of the ports of schedulers and servers.
SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    service
    for module in (scheduler_pb2, server_pb2, health_pb2, reflection_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
)
CALLS = {f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods}
#: What is checked like a call, and is none.
OTHERS = {roles.PEER_LINK, roles.METRICS_PAGES, roles.DASHBOARD_PAGES}


def test_every_call_has_an_entry() -> None:
    assert RIGHTS.keys() == CALLS | OTHERS, "decide who may make a new call, in psdist/security/roles.py"


def test_every_entry_allows_somebody_and_no_scheduler() -> None:
    for call, allowed in RIGHTS.items():
        assert allowed and allowed <= set(TOKEN_ROLES), call


@pytest.mark.parametrize("call", ["", "/", "/psdist.v1.SchedulerService/New", "/psdist.v1.Other/Scale", "Scale"])
def test_a_call_without_an_entry_is_denied(call: str) -> None:
    for role in Role:
        if role is Role.ALL:
            roles.check(role, call)  # The call itself does not exist, then.
        else:
            with pytest.raises(PermissionDeniedError, match="own token"):
                roles.check(role, call)


@pytest.mark.parametrize("role", [Role.WORKER, Role.SERVER, Role.READER])
@pytest.mark.parametrize("call", ["Scale", "WatchScale"])
def test_only_admins_change_the_size_of_a_run(role: Role, call: str) -> None:
    with pytest.raises(PermissionDeniedError) as denied:
        roles.check(role, f"/{roles.SCHEDULER_SERVICE}/{call}")
    error = denied.value
    assert error.message == (
        f"{call} needs the role admin, and this caller is {role}: use a token (psdist token create --role admin) "
        "or certificate (psdist certs issue --role admin) of that role"
    )
    assert error.details == {"role": role.value, "needs": "admin"} and isinstance(error, PermissionError)


def test_remedy_names_no_role_where_several_may_call() -> None:
    """A script with a reader's token must not be told to become a server."""
    message = roles.denial(Role.READER, "Register", RIGHTS[f"/{roles.SCHEDULER_SERVICE}/Register"]).message
    assert "needs the role worker or server" in message and "--role ROLE" in message and "--role server" not in message


def test_readers_change_nothing() -> None:
    reads = {call.rpartition("/")[2] for call, allowed in RIGHTS.items() if Role.READER in allowed}
    assert reads == {
        *("GetClusterMap", "GetDataPosition", "GetStatus", "WatchEvents", "GetSamples", "Trace", "GetSummary"),
        *("GetStatistics", "Check", "Watch", "List", "ServerReflectionInfo", "metrics", "dashboard"),
    }


def test_a_claim_is_the_caller_s_own_role() -> None:
    roles.claim(Role.WORKER, Role.WORKER, "this")
    roles.claim(Role.ALL, Role.SERVER, "this")
    with pytest.raises(PermissionDeniedError, match="Register as a server needs the role server"):
        roles.claim(Role.WORKER, Role.SERVER, "Register as a server")
