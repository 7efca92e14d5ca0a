"""Calls of every RPC on live processes, with a valid token: ``python -m tests.fuzz.rpcs``.

A call's messages are random, or changed copies of recorded ones. Each must end with an answer or a typed error, within
its time; no process may end, log a traceback or grow; and a training run beside it must stay exact to the byte. Calls
that may legally change that run go to another one (``--wild``), without a check of its weights. It is started again
when a call has ended it properly.

With ``--tls`` the calls are made by every pair of a certificate's role and a token's role, and each call that the table
of ``docs/roles.md`` denies must be denied.

A failure prints the command that repeats it. The state of the processes also depends on the calls before it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from psdist import errors
from psdist.security.roles import HEALTH_CHECK
from psdist.v1 import common_pb2
from tests.fuzz.callers import Caller, choose
from tests.fuzz.guard import ALWAYS, why_harmful
from tests.fuzz.http2 import Ended, body
from tests.fuzz.messages import MessageGenerator, mutate_bytes, mutate_message
from tests.fuzz.run import SERVICES, FuzzedRun

#: Calls that may wait for others: they are cancelled after a moment. All others must end within their limit.
#: A busy process has read a call after a fifth of a second; the shortest moment cancels some before.
_WAITING: Final = frozenset({
    "Session", "CreateParameters", "DescribeParameters", "Barrier", "Rendezvous", "Drain", "WatchScale", "LeaseRange",
    "SaveSnapshot", "WatchEvents", "Trace", "PushPull", "Push", "Pull", "Share", "Connect", "FetchNorms", "Replicate",
    "Install", "Watch",
})  # fmt: skip
_MOMENTS: Final = (0.01, 0.2, 0.4)
_LIMIT_SECONDS: Final = 120.0
_ANSWERS_MAX: Final = 20
_AT_ONCE: Final = 128
#: Growth of a process over all calls after the first batches that passes as noise of the allocator.
_GROWTH_MIB: Final = 96
#: Cancelled, deadline exceeded and resource exhausted: gRPC's own refusals carry no detail.
_OWN_STATUS: Final = (1, 4, 8)
_NOT_FOUND: Final = 5
_UNAVAILABLE: Final = 14
_LOST: Final = "the connection was lost"
_DENIED: Final = "permission_denied"
#: Calls whose requests may claim a role that the caller does not have.
_BY_REQUEST: Final = ("Register", "Session", "Leave", "SaveSnapshot")


class FuzzFailure(Exception):
    """A call, or the state of the processes after some calls, is not as it should be."""


@dataclass
class Case:
    """One call."""

    method: MethodDescriptor
    role: str
    messages: list[bytes]
    caller: Caller


@dataclass
class Report:
    """Outcomes of the calls of one method. skipped: those that would harm the training. sent: requests to change."""

    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    sent: list[list[bytes]] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return sum(self.outcomes.values())


def methods(only: Sequence[str] = ()) -> list[tuple[str, MethodDescriptor]]:
    """Return role and descriptor of every RPC, or of those named."""
    found = [(role, one) for role, services in SERVICES.items() for service in services for one in service.methods]
    if unknown := set(only) - {one.name for _, one in found}:
        raise SystemExit(f"no RPC is called {', '.join(sorted(unknown))}")
    return [(role, one) for role, one in found if not only or one.name in only]


def make_case(
    run: FuzzedRun, role: str, method: MethodDescriptor, rng: random.Random, wild: bool, report: Report
) -> Case | None:
    """Return the next call; harmless unless ``wild``. A quarter of them are earlier ones with changed bytes.

    None if all calls of this method by its caller are harmful.
    """
    caller = choose(rng, run.callers, path_of(method))
    wild = wild or not caller.may(path_of(method))
    if not wild and method.name in ALWAYS:
        report.skipped[ALWAYS[method.name]] += 1
        return None
    if report.sent and rng.random() < 0.25:
        sent = list(rng.choice(report.sent))
        at = rng.randrange(len(sent))
        sent[at] = mutate_bytes(rng, sent[at])
        if wild or not _harms(method, sent, run):
            return Case(method, role, sent, caller)
    generator = MessageGenerator(rng, run.known)
    while True:
        messages = _recorded(run, method, rng, generator) if rng.random() < 0.4 else []
        messages = messages or _random(method, rng, generator)
        if wild or not (why := why_harmful(method.name, messages, run.known)):
            break
        report.skipped[why] += 1
    sent = [one.SerializeToString() for one in messages]
    report.sent.append(sent)
    return Case(method, role, sent, caller)


def _harms(method: MethodDescriptor, sent: Sequence[bytes], run: FuzzedRun) -> bool:
    kind = message_factory.GetMessageClass(method.input_type)
    try:
        return bool(why_harmful(method.name, [kind.FromString(one) for one in sent], run.known))
    except Exception:  # It is no message, and is refused.
        return False


def _random(method: MethodDescriptor, rng: random.Random, generator: MessageGenerator) -> list[Any]:
    if method.client_streaming:
        return generator.stream(method.input_type)
    return [generator.message(method.input_type)]


def _recorded(run: FuzzedRun, method: MethodDescriptor, rng: random.Random, generator: MessageGenerator) -> list[Any]:
    """Return changed copies of consecutive recorded messages; none if there is no recording."""
    requests = run.requests.get(path_of(method), [])
    if not requests:
        return []
    start = rng.randrange(len(requests))
    kind = message_factory.GetMessageClass(method.input_type)
    count = rng.choice((1, 2, 4)) if method.client_streaming else 1
    messages = [kind.FromString(one) for one in requests[start : start + count]]
    for message in messages:
        for _ in range(rng.choice((0, 1, 1, 2))):
            mutate_message(rng, generator, message)
    return messages


async def call(run: FuzzedRun, case: Case, rng: random.Random) -> str:
    """Make one call. Return its outcome. Raises FuzzFailure, and ConnectionError if the process cannot be reached."""
    address = run.address if case.role == "scheduler" else rng.choice(sorted(run.servers.values()))
    path = path_of(case.method)
    waits = case.method.name in _WAITING and case.caller.may(path)
    connection = await run.connection(address, case.caller)
    stream, ended = connection.start(
        run.request_block(address, path, case.caller), body(case.messages), answers_max=_ANSWERS_MAX
    )
    limit = rng.choice(_MOMENTS) if waits else _LIMIT_SECONDS
    timer = asyncio.get_running_loop().call_later(limit, connection.cancel, stream)
    began = time.monotonic()
    try:
        end = await ended
    except ConnectionError:  # A starved machine answers pings too late. The end of a process is seen after the batch.
        return _LOST
    finally:
        timer.cancel()
    if not waits and time.monotonic() - began >= _LIMIT_SECONDS:
        raise FuzzFailure(f"no answer within {_LIMIT_SECONDS:g} s")
    outcome = "unknown service" if (path, end.status) == (HEALTH_CHECK, _NOT_FOUND) else verdict(end)
    check_rights(case.caller, path, outcome)
    return outcome


def check_rights(caller: Caller, path: str, outcome: str) -> None:
    """Raise FuzzFailure if a caller was denied its right, or was not denied a call that it may not make."""
    if caller.may(path):
        is_wrong = outcome == "unauthenticated" or (outcome == _DENIED and path.rpartition("/")[2] not in _BY_REQUEST)
    else:
        is_wrong = outcome not in (_DENIED, _LOST)
    if is_wrong:
        raise FuzzFailure(f"{caller}: {path} ended with {outcome!r}")


def path_of(method: MethodDescriptor) -> str:
    """Return the path of a method's calls."""
    return f"/{method.containing_service.full_name}/{method.name}"


def verdict(end: Ended) -> str:
    """Return the outcome of a call: the error's code, if there is one. Raises FuzzFailure."""
    if end.detail:
        code = common_pb2.ErrorDetail.FromString(end.detail).code
        if code not in errors.BY_CODE or code == "internal":
            raise FuzzFailure(f"the error {code!r}: {end.message}")
        return code
    if end.status == 0:
        return "answered" if end.answers else "ended"
    if end.status == _UNAVAILABLE:
        return _LOST
    if end.status not in _OWN_STATUS:
        raise FuzzFailure(f"a status without a detail: {end.status}: {end.message}")
    return "answered" if end.answers else "waits"


async def fuzz_method(
    run: FuzzedRun, role: str, method: MethodDescriptor, numbers: range, seed: int, wild: bool = False
) -> Report:
    """Make calls of one method, several at a time. Raises FuzzFailure with the number of the call."""
    report = Report()
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            rng = random.Random(f"{seed}/{method.name}/{number}")
            if (case := make_case(run, role, method, rng, wild, report)) is None:
                continue
            try:
                report.outcomes[await call(run, case, rng)] += 1
            except FuzzFailure as failure:
                raise FuzzFailure(f"call {number}: {failure}\n{_shown(case)}") from None

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_AT_ONCE):
            tasks.create_task(work())
    return report


def _shown(case: Case) -> str:
    kind = message_factory.GetMessageClass(case.method.input_type)
    try:
        return "\n---\n".join(str(kind.FromString(one))[:2000] for one in case.messages)
    except Exception:  # Mutated bytes may be no message: shown as they are.
        return "\n---\n".join(one.hex()[:2000] for one in case.messages)


class Fuzzer:
    """Runs batches of calls, and looks at the processes after each."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.seed, self.wild, self._batch = arguments.seed, arguments.wild, arguments.batch
        self._has_tls = arguments.tls
        self._until = time.monotonic() + arguments.seconds
        self.restarts = 0
        self.totals: dict[str, Report] = {}
        #: Seconds that the calls of each method took.
        self.seconds: dict[str, float] = {}
        #: MiB of each process after the first turn.
        self.base: dict[str, int] = {}
        self._run: FuzzedRun | None = None

    @property
    def _flags(self) -> str:
        return (" --wild" if self.wild else "") + (" --tls" if self._has_tls else "")

    @property
    def is_over(self) -> bool:
        """True if the time is."""
        return time.monotonic() > self._until

    async def lane(self, chosen: Sequence[tuple[str, MethodDescriptor]], numbers: range) -> None:
        """Make these calls of each method, in turns of one batch: each meets the state that others have left."""
        for start in range(numbers.start, numbers.stop, self._batch):
            for role, method in chosen:
                if self.is_over:
                    return
                began = time.monotonic()
                batch = range(start, min(start + self._batch, numbers.stop))
                report = await self.batch(role, method, batch)
                total = self.totals.setdefault(method.name, Report())
                total.outcomes += report.outcomes
                total.skipped += report.skipped
                self.seconds[method.name] = self.seconds.get(method.name, 0.0) + time.monotonic() - began
            await self._note_memory(batch.stop, {role for role, _ in chosen})

    async def _note_memory(self, calls: int, roles: set[str]) -> None:
        """Show the memory, and keep that after the first turn."""
        memory = (await self.run()).resident_mib()
        self.base |= {name: size for name, size in memory.items() if name not in self.base and _role(name) in roles}
        print(f"{calls} calls of each {' and '.join(sorted(roles))} RPC, {memory} MiB", flush=True)

    async def batch(self, role: str, method: MethodDescriptor, numbers: range) -> Report:
        """Make these calls of one method. Raises FuzzFailure with the command that repeats them."""
        run = await self.run()
        try:
            try:
                report = await fuzz_method(run, role, method, numbers, self.seed, self.wild)
                await run.refresh()
            except BaseExceptionGroup as group:  # The first failure is the cause of the others.
                raise group.exceptions[0] from None
        except (FuzzFailure, ConnectionError, grpc.aio.AioRpcError, errors.PsdistError) as error:
            await self._look(method, numbers, error)
            return Report(Counter({"ended the run": 1}))
        await self._look(method, numbers, None)
        return report

    async def _look(self, method: MethodDescriptor, numbers: range, error: Exception | None) -> None:
        assert self._run is not None
        trouble = self._run.trouble()
        if self.wild and _is_legal_end(trouble, error):
            await self.close()
            self.restarts += 1
        elif trouble or error is not None:
            again = f"python -m tests.fuzz.rpcs --seed {self.seed} --only {method.name} --first {numbers.start}"
            text = "\n".join([str(error or ""), *trouble])
            raise FuzzFailure(f"{text}\nagain: {again} --calls {len(numbers)}{self._flags}")

    async def run(self) -> FuzzedRun:
        """Return the run, which is started if there is none."""
        if self._run is None:
            self._run = FuzzedRun(has_tls=self._has_tls)
            await self._run.open()
        return self._run

    async def close(self) -> None:
        """End the run."""
        if self._run is not None:
            await self._run.close()
            self._run = None


def _role(process: str) -> str:
    return process.partition("-")[0]


def _is_legal_end(trouble: Sequence[str], error: Exception | None) -> bool:
    """True if processes have ended as they should after such calls, or refuse all others, without a traceback."""
    if any("logged" in one for one in trouble if not one.startswith("trainer")):
        return False
    ends = [one.rsplit(" ", 1)[1] for one in trouble if "ended with status" in one and not one.startswith("trainer")]
    is_refusal = not isinstance(error, FuzzFailure)
    return all(end in ("0", "69", "70", "78") for end in ends) and is_refusal and bool(trouble or error)


async def fuzz(arguments: argparse.Namespace) -> None:
    """Fuzz all methods. Those of the scheduler and of the servers run side by side, unless they may end the run."""
    fuzzer = Fuzzer(arguments)
    chosen = methods(arguments.only)
    lanes = [chosen] if arguments.wild else [[one for one in chosen if one[0] == role] for role in SERVICES]
    numbers = range(arguments.first, arguments.first + arguments.calls)
    began = time.monotonic()
    try:
        run = await fuzzer.run()
        try:
            async with asyncio.TaskGroup() as tasks:
                for lane in filter(None, lanes):
                    tasks.create_task(fuzzer.lane(lane, numbers))
        except* FuzzFailure as group:
            raise group.exceptions[0] from None
        if not arguments.wild:
            print(f"memory {run.resident_mib()} MiB, open files {run.files()}")
            check_growth(fuzzer.base, run.resident_mib())
            print(f"the training beside it: {await run.end_training()} steps, all exact")
    finally:
        await fuzzer.close()
        for name, report in fuzzer.totals.items():
            rate = report.calls / (fuzzer.seconds[name] or 1)
            print(f"{name:20} {report.calls:7} calls, {rate:5.0f}/s: {dict(report.outcomes.most_common())}")
            for why, count in report.skipped.items():
                print(f"{'':20} {count:7} left out: {why}")
        print(f"seed {arguments.seed}; {fuzzer.restarts} restarts of the run; {time.monotonic() - began:.0f} s")


def check_growth(before: dict[str, int], after: dict[str, int]) -> None:
    grown = {name: after[name] - before[name] for name in before if after[name] - before[name] > _GROWTH_MIB}
    if grown:
        raise FuzzFailure(f"memory has grown by {grown} MiB")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.rpcs", description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000, help="of each RPC")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier, after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--batch", type=int, default=400, help="calls between two looks at the processes")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="RPCs, separated by commas")
    parser.add_argument("--wild", action="store_true", help="all calls, beside a training that they may change")
    parser.add_argument("--tls", action="store_true", help="over TLS, by callers of every role")
    arguments = parser.parse_args()
    try:
        asyncio.run(fuzz(arguments))
    except FuzzFailure as failure:
        print(failure, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
