"""Client made of the generated stubs and nothing else of psdist: docs/internals/wire.md as a program.

Arguments: scheduler address, token. Creates parameters "plain" with SGD, makes two steps, pulls, prints the weights.
"""

import queue
import struct
import sys

import grpc

from psdist.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc, server_pb2, server_pb2_grpc

ADDRESS, TOKEN = sys.argv[1:3]
METADATA = (("authorization", f"Bearer {TOKEN}"),)
INITIAL = [0.5, -1.0, 2.0, 3.5, 4.0]


def register(scheduler):
    request = scheduler_pb2.RegisterRequest(protocol_version=6, role=scheduler_pb2.ROLE_WORKER)
    return scheduler.Register(request, metadata=METADATA)


def open_session(scheduler, me):
    """Send Hello, then heartbeats. The answers are cluster maps."""
    outgoing = queue.Queue()
    hello = scheduler_pb2.SessionRequest.Hello(member_id=me.member_id, incarnation=me.incarnation)
    outgoing.put(scheduler_pb2.SessionRequest(hello=hello))

    def requests():
        while True:
            try:
                request = outgoing.get(timeout=me.heartbeat_seconds)
            except queue.Empty:
                request = scheduler_pb2.SessionRequest(heartbeat=scheduler_pb2.SessionRequest.Heartbeat())
            if request is None:
                return
            yield request

    call = scheduler.Session(requests(), metadata=METADATA)
    next(call)  # The first map: the session is established.
    return outgoing, call  # grpc cancels a call that nothing refers to any more.


def create(scheduler, me):
    """Create the parameters, upload the initial values, and return the map in which they are ready."""
    optimizer = common_pb2.Optimizer(
        kind="sgd",
        values={"lr": 0.5, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0},
    )
    spec = common_pb2.ParametersSpec(
        name="plain", optimizer=optimizer, consistency=common_pb2.Consistency(kind="bsp"), slice_elements=2
    )
    tensors = [
        common_pb2.Tensor(name="w", shape=[2, 2], dtype=common_pb2.DTYPE_FLOAT32),
        common_pb2.Tensor(name="b", dtype=common_pb2.DTYPE_FLOAT32),
    ]
    request = scheduler_pb2.CreateParametersRequest(
        run_id=me.run_id,
        worker_id=me.member_id,
        incarnation=me.incarnation,
        spec=spec,
        layout=common_pb2.Layout(tensors=tensors),
    )
    for answer in scheduler.CreateParameters(request, metadata=METADATA):
        if answer.state == scheduler_pb2.CreateParametersResponse.STATE_UPLOAD:
            install(me, answer.map)
            commit = scheduler_pb2.CommitParametersRequest(
                run_id=me.run_id, worker_id=me.member_id, incarnation=me.incarnation, parameters="plain"
            )
            scheduler.CommitParameters(commit, metadata=METADATA)
        if answer.state == scheduler_pb2.CreateParametersResponse.STATE_READY:
            return answer.map
    raise SystemExit("never ready")


def routes(cluster):
    """Return address and ascending slices of every server: slice i is in shard i % len(shards)."""
    entry = cluster.parameters[0]
    size = entry.spec.slice_elements
    count = -(-entry.total // size)
    addresses = {server.server_id: server.address for server in cluster.servers}
    found = {}
    for index in range(count):
        address = addresses[entry.shards[index % len(entry.shards)].primary.server_id]
        found.setdefault(address, []).append((index, slice(index * size, min((index + 1) * size, entry.total))))
    return found


def identity(me, cluster):
    return server_pb2.Identity(
        run_id=me.run_id,
        worker_id=me.member_id,
        incarnation=me.incarnation,
        epoch=cluster.epoch,
        parameters="plain",
    )


def floats(values):
    return struct.pack(f"<{len(values)}f", *values)


def install(me, cluster):
    for address, slices in routes(cluster).items():
        requests = [server_pb2.InstallRequest(slice=i, payload=floats(INITIAL[part])) for i, part in slices]
        requests[0].identity.CopyFrom(identity(me, cluster))
        with grpc.insecure_channel(address) as channel:
            server_pb2_grpc.ServerServiceStub(channel).Install(iter(requests), metadata=METADATA)


def push_pull(me, cluster, step, gradient):
    weights = [0.0] * len(gradient)
    for address, slices in routes(cluster).items():
        requests = [server_pb2.PushPullRequest(slice=i, payload=floats(gradient[part])) for i, part in slices]
        header = requests[0].header
        header.identity.CopyFrom(identity(me, cluster))
        header.step, header.codec = step, common_pb2.CODEC_RAW
        header.dtype = header.pull_dtype = common_pb2.DTYPE_FLOAT32
        ranges = dict(slices)
        with grpc.insecure_channel(address) as channel:
            for answer in server_pb2_grpc.ServerServiceStub(channel).PushPull(iter(requests), metadata=METADATA):
                weights[ranges[answer.slice]] = struct.unpack(f"<{len(answer.payload) // 4}f", answer.payload)
    return weights


def pull(me, cluster):
    weights = [0.0] * len(INITIAL)
    for address, slices in routes(cluster).items():
        request = server_pb2.PullRequest(identity=identity(me, cluster), dtype=common_pb2.DTYPE_FLOAT32)
        ranges = dict(slices)
        with grpc.insecure_channel(address) as channel:
            for answer in server_pb2_grpc.ServerServiceStub(channel).Pull(request, metadata=METADATA):
                weights[ranges[answer.slice]] = struct.unpack(f"<{len(answer.payload) // 4}f", answer.payload)
    return weights


def main():
    with grpc.insecure_channel(ADDRESS) as channel:
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        me = register(scheduler)
        session, call = open_session(scheduler, me)
        cluster = create(scheduler, me)
        push_pull(me, cluster, 0, [1.0, 2.0, 3.0, 4.0, 5.0])
        push_pull(me, cluster, 1, [1.0, 1.0, 1.0, 1.0, 1.0])
        print(pull(me, cluster))
        leave = scheduler_pb2.LeaveRequest(member_id=me.member_id, incarnation=me.incarnation)
        scheduler.Leave(leave, metadata=METADATA)
        session.put(None)
        call.cancel()


if __name__ == "__main__":
    main()
