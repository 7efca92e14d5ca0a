"""Ranges of protocol versions against a real scheduler: a common version joins, and without one nothing changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import grpc
import pytest

from psdist.launcher.embedded import EmbeddedCluster
from psdist.v1 import scheduler_pb2 as pb
from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import auth, limits


class Caller:
    """Stub of a scheduler, and the metadata of its calls."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self.stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self.metadata = auth.metadata(token)

    def register(self, oldest: int, newest: int) -> pb.RegisterResponse:
        request = pb.RegisterRequest(protocol_version=newest, oldest_protocol=oldest, role=pb.ROLE_WORKER)
        response: pb.RegisterResponse = self.stub.Register(request, metadata=self.metadata, timeout=60)
        return response

    def workers(self) -> set[str]:
        answer = self.stub.GetClusterMap(pb.GetClusterMapRequest(), metadata=self.metadata, timeout=60)
        return {worker.worker_id for worker in answer.map.workers}


@pytest.fixture(scope="module")
def caller() -> Iterator[Caller]:
    with closing(EmbeddedCluster(servers=1)) as cluster, grpc.insecure_channel(cluster.address) as channel:
        yield Caller(channel, cluster.token)


@pytest.mark.parametrize(("oldest", "newest"), [(6, 7), (5, 6)])
def test_a_member_with_a_common_version_joins(caller: Caller, oldest: int, newest: int) -> None:
    assert caller.register(oldest, newest).protocol_version == limits.PROTOCOL_VERSION


@pytest.mark.parametrize(("oldest", "newest", "side"), [(7, 8, "the scheduler"), (4, 5, "this member")])
def test_a_member_without_one_changes_nothing(caller: Caller, oldest: int, newest: int, side: str) -> None:
    before = caller.workers()
    with pytest.raises(grpc.RpcError) as failure:
        caller.register(oldest, newest)
    assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    versions = f"version {oldest} to {newest}, this scheduler speaks {limits.PROTOCOL_VERSION}"
    assert f"{versions}: upgrade psdist of {side}" in failure.value.details()
    # The leases of those that joined may end meanwhile.
    assert caller.workers() <= before
