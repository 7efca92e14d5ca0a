"""Short run of ``python -m tests.fuzz.rpcs --tls`` and ``python -m tests.fuzz.ports --tls``: a few calls of every RPC,
by callers of all roles, and bytes at every port, beside a training run that must stay exact."""

from __future__ import annotations

import asyncio
import random
import time

from psdist.v1 import scheduler_pb2
from tests.fuzz.guard import why_harmful
from tests.fuzz.messages import Known, MessageGenerator, mutate_bytes
from tests.fuzz.pages import require_pages
from tests.fuzz.ports import PLACES, fuzz_place
from tests.fuzz.rpcs import fuzz_method, methods
from tests.fuzz.run import MEMBER, FuzzedRun

_CALLS = 3
_INPUTS = dict.fromkeys(PLACES, 2) | {"metrics": 30, "dashboard": 30}  # They cost little.
#: Other inputs each day. A failure names its seed.
_SEED = int(time.time() // 86400)


async def test_no_call_and_no_bytes_disturb_a_run() -> None:
    print(f"seed {_SEED}")
    run = FuzzedRun(has_tls=True, servers=1)
    try:
        await run.open()
        calls = [fuzz_method(run, role, method, range(_CALLS), _SEED) for role, method in methods()]
        inputs = [fuzz_place(run, name, range(count), _SEED) for name, count in _INPUTS.items()]
        async with asyncio.TaskGroup() as tasks:
            called = [tasks.create_task(one) for one in calls]
            sent = [tasks.create_task(one) for one in inputs]
        reports = [one.result() for one in called]
        assert all(report.calls + report.skipped.total() >= _CALLS for report in reports)
        assert [one.result().total() for one in sent] == list(_INPUTS.values())
        await require_pages(run)
        await run.end_training()
        assert [one for one in run.trouble() if one != "trainer ended with status 0"] == []
    finally:
        await run.close()


def test_messages_of_every_request_are_valid_and_follow_from_the_seed() -> None:
    for _, method in methods():
        made = [
            [one.SerializeToString(deterministic=True) for one in _generator(seed).stream(method.input_type)]
            for seed in range(30)
            for _ in range(2)
        ]
        assert made[::2] == made[1::2]


def _generator(seed: int) -> MessageGenerator:
    return MessageGenerator(random.Random(seed), Known([("a", 1)], {"run_id": ("r",)}))


def test_changed_bytes_follow_from_the_seed() -> None:
    data = bytes(range(100))
    made = [[mutate_bytes(random.Random(seed), data) for seed in range(50)] for _ in range(2)]
    assert made[0] == made[1] and len(set(made[0])) > 40


def test_calls_that_may_change_the_training_are_left_out() -> None:
    for method, message, is_harmful in [
        ("Leave", scheduler_pb2.LeaveRequest(member_id="trainer-0", incarnation=2), True),
        ("Leave", scheduler_pb2.LeaveRequest(member_id="trainer-0", incarnation=1), False),
        ("Leave", scheduler_pb2.LeaveRequest(member_id=MEMBER, incarnation=3), False),
        ("Scale", scheduler_pb2.ScaleRequest(), True),
        ("Register", scheduler_pb2.RegisterRequest(role=scheduler_pb2.ROLE_SERVER), True),
        ("Register", scheduler_pb2.RegisterRequest(role=scheduler_pb2.ROLE_WORKER), False),
    ]:
        known = Known([("trainer-0", 2), (MEMBER, 3)])
        assert bool(why_harmful(method, [message], known)) is is_harmful
