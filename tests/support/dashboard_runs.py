"""Made-up runs for tests of the dashboard: a status and samples as the scheduler keeps them, of any size."""

from __future__ import annotations

import random

import psdist
from psdist.v1 import common_pb2, scheduler_pb2
from psdist.wire import convert


def status(workers: int = 3, servers: int = 2, shards: int = 8, slices: int = 16) -> scheduler_pb2.GetStatusResponse:
    """Return the status of a run with one parameter set, two copies of each shard, and a hundred events."""
    answer = scheduler_pb2.GetStatusResponse(
        run_id="made-up", phase="training", workers_min=workers, servers_min=servers, replicas=2, time=1000.0
    )
    ids = [f"server-{number}" for number in range(servers)]
    for rank in range(workers):
        member = answer.members.add(
            member_id=f"worker-{rank}",
            role="ROLE_WORKER",
            rank=rank,
            state="live",
            host="host",
            incarnation=1,
            pid=rank,
        )
        for server_id in ids:
            member.connections.add(
                server_id=server_id, parameters="model", transport="tcp", reason="the server is on another host"
            )
    entry = common_pb2.ParametersEntry(total=slices * 4096)
    entry.spec.name, entry.spec.slice_elements = "model", 4096
    entry.spec.consistency.CopyFrom(convert.consistency_to_proto(psdist.BSP()))
    entry.spec.optimizer.CopyFrom(convert.optimizer_to_proto(psdist.optim.SGD(0.1)))
    for number in range(shards):
        shard = entry.shards.add(term=1)
        shard.primary.server_id = ids[number % servers]
        shard.backups.add(server_id=ids[(number + 1) % servers])
    answer.parameters.add(entry=entry, state="ready", tensors=100)
    for number, server_id in enumerate(ids):
        member = answer.members.add(member_id=server_id, role="ROLE_SERVER", state="live", host="host", incarnation=1)
        one = member.statistics.parameters.add(parameters="model")
        for shard_number in range(number, shards, servers):
            one.replicas.add(
                shard=shard_number, server_id=ids[(shard_number + 1) % servers], state="in sync", carrier="tcp",
                slices=slices // shards, slices_filled=slices // shards,
            )  # fmt: skip
    for number in range(100):
        answer.events.add(
            number=number + 1, time=900.0 + number, kind="join", text=f"worker-{number} has joined the run"
        )
    return answer


def advance(answer: scheduler_pb2.GetStatusResponse, rng: random.Random) -> None:
    """Let half a second pass: versions, lags and ages of heartbeats change."""
    answer.time += 0.5
    answer.uptime_seconds += 0.5
    for member in answer.members:
        member.heartbeat_age_seconds = rng.random() / 2
        for one in member.statistics.parameters:
            one.version_min += 5
            one.version_max = one.version_min + 1
            for copy in one.replicas:
                copy.lag_updates = rng.randrange(4)


def sample(number: int, workers: int, servers: int, rng: random.Random) -> scheduler_pb2.RunSample:
    """Return the activity of a second, different in every number."""
    made = scheduler_pb2.RunSample(number=number, time=1000.0 + number)
    for rank in range(workers):
        compute = 0.4 + rng.random() / 5
        one = made.workers.add(
            worker_id=f"worker-{rank}", seconds=1.0, compute_seconds=compute, push_seconds=0.1, pull_seconds=0.1,
            wait_seconds=0.8 - compute, pushes={"model": rng.randrange(8, 12)}, reported={"loss": 1 / number},
            reported_step=number, samples_per_second=320,
        )  # fmt: skip
        one.traffic.add(
            transport="tcp", push_codec="int8", pull_codec="bfloat16",
            push_bytes=rng.randrange(10**7), pull_bytes=rng.randrange(10**7),
        )  # fmt: skip
    for at in range(servers):
        made.servers.add(
            server_id=f"server-{at}", seconds=1.0, slices_applied=rng.randrange(2000), apply_seconds=rng.random(),
            waiting_bytes=rng.randrange(10**8), resident_bytes=rng.randrange(10**9), lag_updates=rng.randrange(9),
        )  # fmt: skip
    return made
