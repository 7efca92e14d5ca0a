"""Steps over links that fail at some workers: all that remain use the same result for each step.

The servers and the links are replaced: each exchange ends when all remaining workers take part in it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psdist.errors import SettingsMismatchError, WorkerLostError
from psdist.torch.averaging import link_steps
from psdist.torch.averaging.link_steps import LinkSteps

STEPS = 5


class Died(Exception):
    """A worker ends here."""


class Servers:
    """Rendezvous of the workers that remain. As on a server, all get the same result of a round."""

    def __init__(self, size: int) -> None:
        self._alive = set(range(size))
        self._changed = threading.Condition()
        self._rounds: list[dict[int, Any]] = []
        #: Rounds that have ended.
        self._ended = 0
        self._made = [0] * size

    def meet(self, rank: int, value: Any) -> dict[int, Any]:
        """Return the values of all workers that take part in this round of the rank."""
        with self._changed:
            number = self._made[rank]
            self._made[rank] += 1
            if number == len(self._rounds):
                self._rounds.append({})
            self._rounds[number][rank] = value
            self._end_rounds()
            assert self._changed.wait_for(lambda: number < self._ended, 120), "a round never ends"
            return dict(self._rounds[number])

    def lose(self, rank: int) -> None:
        with self._changed:
            self._alive.discard(rank)
            self._end_rounds()

    def _end_rounds(self) -> None:
        while self._ended < len(self._rounds) and self._alive <= self._rounds[self._ended].keys():
            self._ended += 1
        self._changed.notify_all()


class Group:
    has_ended = False

    def close(self) -> None:
        self.has_ended = True


class Worker:
    """A script of several steps. completes: the step ``fails_at`` has its result here. dies: in ``share``."""

    def __init__(self, servers: Servers, rank: int, fails_at: int, *, completes: bool, dies: bool) -> None:
        self.name, self.rank, self.fails_at, self.completes, self.dies = "model", rank, fails_at, completes, dies
        self.servers = servers
        self.result: Any = None
        self.results: list[Any] = []
        self.steps = LinkSteps(self._context())
        self.steps.vote(self._context(), "auto")

    def _context(self) -> Any:
        return SimpleNamespace(rank=self.rank, client=self, new_group=lambda ranks: Group())

    def share(self, source: int) -> bool:
        if self.dies and self.rank == source:
            raise Died
        found = self.servers.meet(self.rank, self.result)
        self.result = found.get(source, self.result)
        return source in found

    def wait(self, step: int) -> None:
        if step > self.fails_at or (step == self.fails_at and not self.completes):
            raise WorkerLostError("rank 9 is gone")
        self.result = step, "links"

    def run(self) -> list[Any]:
        for step in range(STEPS):
            is_begun = self.steps.begin(self)
            made = self.steps.make(self, partial(self.wait, step))
            assert is_begun or not made
            if not made:
                self.result = step, sorted(self.servers.meet(self.rank, step).items())
            self.results.append(self.result)
        return self.results


def _run(worker: Worker) -> list[Any] | None:
    try:
        return worker.run()
    except Died:
        worker.servers.lose(worker.rank)
        return None


def run(monkeypatch: pytest.MonkeyPatch, fails_at: int, workers: list[tuple[bool, bool]]) -> list[Any]:
    """Return the results of the workers that remain. workers: ``completes`` and ``dies`` of each."""
    servers = Servers(len(workers))

    def numbers(context: Any, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(exchange=lambda number: servers.meet(context.rank, number))

    with monkeypatch.context() as patch, ThreadPoolExecutor(len(workers)) as threads:
        patch.setattr(link_steps, "RankNumbers", numbers)
        made = list(
            threads.map(
                lambda one: Worker(servers, one[0], fails_at, completes=one[1][0], dies=one[1][1]), enumerate(workers)
            )
        )
        return [results for results in threads.map(_run, made) if results is not None]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, STEPS - 2), st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=5))
def test_all_workers_use_the_same_results(fails_at: int, workers: list[tuple[bool, bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        results = run(patch, fails_at, workers)
    for mine in results:
        assert mine == results[0]
        assert [step for step, _ in mine] == list(range(STEPS))


def test_a_result_that_only_one_worker_has_reaches_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for results in run(monkeypatch, 2, [(False, False), (True, False), (False, False)]):
        assert results[2] == (2, "links") and results[3][1] != "links"


def test_a_step_whose_only_result_is_lost_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for results in run(monkeypatch, 2, [(False, False), (True, True), (False, False)]):
        assert results[2] == (2, [(0, 2), (2, 2)])


def test_workers_that_insist_and_others_that_cannot_both_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(2)

    def numbers(context: Any, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(exchange=lambda number: servers.meet(context.rank, number))

    monkeypatch.setattr(link_steps, "RankNumbers", numbers)

    def vote(rank: int) -> None:
        context: Any = SimpleNamespace(rank=rank, client=None)
        with pytest.raises(SettingsMismatchError, match="rank 1 cannot use them"):
            LinkSteps(context).vote(context, ["collectives", "servers"][rank])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(vote, range(2)))
