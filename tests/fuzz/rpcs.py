"""Calls of every RPC on live processes, with a valid token: ``python -m tests.fuzz.rpcs``.

A call's messages are random, or changed copies of recorded ones. Each must end with an answer or a typed error, within
its time; no process may end, log a traceback or grow; and a training run beside it must stay exact to the byte. Calls
that may legally change that run go to another one (``--wild``), without a check of its weights. It is started again
when a call has ended it properly.

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

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from psdist import errors
from psdist.v1 import common_pb2
from psdist.wire import status
from tests.fuzz.guard import ALWAYS, why_harmful
from tests.fuzz.messages import MessageGenerator, mutate_bytes, mutate_message
from tests.fuzz.run import SERVICES, FuzzedRun

#: Calls that may wait for others: they are cancelled after a moment. All others must end within their limit.
_WAITING: Final = frozenset({
    "Session", "CreateParameters", "DescribeParameters", "Barrier", "Rendezvous", "Drain", "WatchScale", "LeaseRange",
    "SaveSnapshot", "WatchEvents", "Trace", "PushPull", "Push", "Pull", "Share", "Connect", "FetchNorms", "Replicate",
})  # fmt: skip
_MOMENT_SECONDS: Final = 0.15
_LIMIT_SECONDS: Final = 120.0
_ANSWERS_MAX: Final = 20
_AT_ONCE: Final = 16
#: Calls between two looks at the processes.
_BATCH: Final = 400
#: Growth of a process over all calls after the first batches that passes as noise of the allocator.
_GROWTH_MIB: Final = 96
#: gRPC's own refusals carry no detail; a cancelled call may end in either of the last two.
_OWN_STATUS: Final = {
    grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED,
}  # fmt: skip
#: grpc.aio replaces the status of a call that ends while its client writes.
_CUT_SHORT: Final = "Internal error from Core"


class FuzzFailure(Exception):
    """A call, or the state of the processes after some calls, is not as it should be."""


@dataclass
class Case:
    """One call."""

    method: MethodDescriptor
    role: str
    messages: list[bytes]


@dataclass
class Report:
    """Outcomes of the calls of one method. skipped: those that would harm the training."""

    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> int:
        return sum(self.outcomes.values())


def methods(only: Sequence[str] = ()) -> list[tuple[str, MethodDescriptor]]:
    """Return role and descriptor of every RPC, or of those named."""
    found = [(role, one) for role, service in SERVICES.items() for one in service.methods]
    if unknown := set(only) - {one.name for _, one in found}:
        raise SystemExit(f"no RPC is called {', '.join(sorted(unknown))}")
    return [(role, one) for role, one in found if not only or one.name in only]


def make_case(run: FuzzedRun, role: str, method: MethodDescriptor, seed: str, wild: bool, report: Report) -> Case:
    """Return the call that follows from a seed; harmless unless ``wild``."""
    rng = random.Random(seed)
    generator = MessageGenerator(rng, run.known)
    while True:
        messages = _recorded(run, method, rng, generator) if rng.random() < 0.4 else []
        messages = messages or _random(method, rng, generator)
        why = "" if wild else why_harmful(method.name, messages, run.known)
        if not why:
            break
        report.skipped[why] += 1
    sent = [one.SerializeToString() for one in messages]
    if rng.random() < 0.03:
        at = rng.randrange(len(sent))
        changed = mutate_bytes(rng, sent[at])
        if wild or not _harms(method, [*sent[:at], changed, *sent[at + 1 :]], run):
            sent[at] = changed
    return Case(method, role, sent)


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
    requests = run.requests.get(f"/{method.containing_service.full_name}/{method.name}", [])
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


async def call(run: FuzzedRun, case: Case) -> str:
    """Make one call. Return its outcome. Raises FuzzFailure."""
    address = run.address if case.role == "scheduler" else random.Random(len(case.messages[0])).choice(
        sorted(run.servers.values())
    )  # fmt: skip
    waits = case.method.name in _WAITING
    path = f"/{case.method.containing_service.full_name}/{case.method.name}"
    answers = run.channel(address).stream_stream(path)(
        iter(case.messages), metadata=run.metadata, timeout=_MOMENT_SECONDS if waits else _LIMIT_SECONDS
    )
    count = 0
    try:
        async for _ in answers:
            count += 1
            if count == _ANSWERS_MAX:
                answers.cancel()
                break
    except grpc.aio.AioRpcError as error:
        return verdict(error, waits, count)
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # in a task
            raise
        return "ended by gRPC"
    return "answered" if count else "ended"


def verdict(error: grpc.aio.AioRpcError, waits: bool = False, count: int = 0) -> str:
    """Return the outcome of a call that ended with an error: the error's code. Raises FuzzFailure.

    waits: True if the call may have ended because its time was over.
    count: answers before the error.
    """
    details = dict(error.trailing_metadata() or ())
    if status.DETAIL_KEY in details:
        code = common_pb2.ErrorDetail.FromString(details[status.DETAIL_KEY]).code
        if code not in errors.BY_CODE or code == "internal":
            raise FuzzFailure(f"the error {code!r}: {error.details()}")
        return code
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not waits:
        raise FuzzFailure(f"no answer within {_LIMIT_SECONDS:g} s")
    if error.details() == _CUT_SHORT:
        return "ended while it was written"
    if error.code() not in _OWN_STATUS:
        raise FuzzFailure(f"a status without a detail: {error.code().name}: {error.details()}")
    return "waits" if count == 0 else "answered"


async def fuzz_method(
    run: FuzzedRun, role: str, method: MethodDescriptor, numbers: range, seed: int, wild: bool = False
) -> Report:
    """Make calls of one method, several at a time. Raises FuzzFailure with the number of the call."""
    report = Report()
    if not wild and method.name in ALWAYS:
        report.skipped[ALWAYS[method.name]] = len(numbers)
        return report
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            case = make_case(run, role, method, f"{seed}/{method.name}/{number}", wild, report)
            try:
                report.outcomes[await call(run, case)] += 1
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

    def __init__(self, seed: int, wild: bool) -> None:
        self.seed, self.wild = seed, wild
        self.restarts = 0
        self._run: FuzzedRun | None = None

    async def batch(self, role: str, method: MethodDescriptor, first: int, calls: int) -> Report:
        """Make these calls of one method. Raises FuzzFailure with the command that repeats them."""
        run = await self.run()
        try:
            try:
                report = await fuzz_method(run, role, method, range(first, first + calls), self.seed, self.wild)
                await run.refresh()
            except BaseExceptionGroup as group:  # The first failure is the cause of the others.
                raise group.exceptions[0] from None
        except (FuzzFailure, grpc.aio.AioRpcError, errors.PsdistError) as error:
            await self._look(method, first, calls, error)
            return Report(Counter({"ended the run": 1}))
        await self._look(method, first, calls, None)
        return report

    async def _look(self, method: MethodDescriptor, first: int, calls: int, error: Exception | None) -> None:
        assert self._run is not None
        trouble = self._run.trouble()
        if self.wild and _is_legal_end(trouble, error):
            await self.close()
            self.restarts += 1
        elif trouble or error is not None:
            again = f"python -m tests.fuzz.rpcs --seed {self.seed} --only {method.name} --first {first} --calls {calls}"
            text = "\n".join([str(error or ""), *trouble])
            raise FuzzFailure(f"{text}\nagain: {again}{' --wild' if self.wild else ''}")

    async def run(self) -> FuzzedRun:
        """Return the run, which is started if there is none."""
        if self._run is None:
            self._run = FuzzedRun()
            await self._run.open()
        return self._run

    async def close(self) -> None:
        """End the run."""
        if self._run is not None:
            await self._run.close()
            self._run = None


def _is_legal_end(trouble: Sequence[str], error: Exception | None) -> bool:
    """True if processes have ended as they should after such calls, or refuse all others, without a traceback."""
    if any("logged" in one for one in trouble if not one.startswith("trainer")):
        return False
    ends = [one.rsplit(" ", 1)[1] for one in trouble if "ended with status" in one and not one.startswith("trainer")]
    is_refusal = not isinstance(error, FuzzFailure)
    return all(end in ("0", "69", "70", "78") for end in ends) and is_refusal and bool(trouble or error)


async def fuzz(arguments: argparse.Namespace) -> None:
    """Fuzz all methods in turns of one batch each, so that each meets the state that the others have left."""
    fuzzer = Fuzzer(arguments.seed, arguments.wild)
    chosen = methods(arguments.only)
    totals = {method.name: Report() for _, method in chosen}
    began, base, base_files = time.monotonic(), dict[str, int](), dict[str, int]()
    try:
        for first in range(arguments.first, arguments.first + arguments.calls, _BATCH):
            for role, method in chosen:
                count = min(_BATCH, arguments.first + arguments.calls - first)
                report = await fuzzer.batch(role, method, first, count)
                totals[method.name].outcomes += report.outcomes
                totals[method.name].skipped += report.skipped
                if time.monotonic() - began > arguments.seconds:
                    break
            run = await fuzzer.run()
            base = base or run.resident_mib()
            base_files = base_files or run.files()
            print(f"{first + count} calls each, {time.monotonic() - began:.0f} s, {run.resident_mib()} MiB", flush=True)
            if time.monotonic() - began > arguments.seconds:
                break
        if not arguments.wild:
            run = await fuzzer.run()
            check_growth(base, run.resident_mib())
            print(f"open files: {base_files}, then {run.files()}")
            print(f"the training beside it: {await run.end_training()} steps, all exact")
    finally:
        await fuzzer.close()
        for name, report in totals.items():
            print(f"{name:20} {report.calls:7} calls: {dict(report.outcomes.most_common())}", flush=True)
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
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="RPCs, separated by commas")
    parser.add_argument("--wild", action="store_true", help="all calls, beside a training that they may change")
    arguments = parser.parse_args()
    try:
        asyncio.run(fuzz(arguments))
    except FuzzFailure as failure:
        print(failure, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
