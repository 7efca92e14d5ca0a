"""The supervisor's decisions: restarts, causes, the order of stopping. No process is started."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st

from psdist.launch.supervisor import (
    Connected,
    Event,
    Exited,
    Failed,
    Finish,
    Interrupted,
    Kill,
    ProcessKey,
    Say,
    Start,
    Supervisor,
    Tick,
    describe,
    status_of,
)

W0, W1 = ProcessKey("worker", 0), ProcessKey("worker", 1)
S0, S1 = ProcessKey("server", 0), ProcessKey("server", 1)
SCHEDULER = ProcessKey("scheduler", 0)


def supervisor(restarts: int = 0) -> Supervisor:
    return Supervisor(range(2), servers=2, schedulers=1, restarts_max=restarts, grace_seconds=5.0)


def test_all_workers_end_well() -> None:
    machine = supervisor()
    assert machine.on(Exited(W0, 0, True), 1.0) == []
    assert machine.on(Exited(W1, 0, True), 2.0) == [Kill(S0, signal.SIGTERM), Kill(S1, signal.SIGTERM)]
    assert machine.on(Exited(S0, 0), 2.1) == []
    assert machine.on(Exited(S1, -15), 2.2) == [Kill(SCHEDULER, signal.SIGTERM)]
    assert machine.on(Exited(SCHEDULER, 0), 2.3) == [Finish(0)]


def test_a_failed_worker_is_started_again_with_its_rank() -> None:
    machine = supervisor(restarts=2)
    said, start = machine.on(Exited(W1, 3), 1.0)
    assert isinstance(said, Say) and "worker 1" in said.message and "exit code 3" in said.message
    assert start == Start(W1, 1)
    assert machine.attempt(W1) == 1
    assert machine.on(Exited(W1, -9), 2.0)[1] == Start(W1, 2)
    assert not machine.stopping


def test_the_first_worker_without_restarts_is_the_cause() -> None:
    machine = supervisor()
    assert machine.on(Exited(W1, -11), 1.0) == [Kill(W0, signal.SIGTERM)]
    assert machine.on(Exited(W0, 1), 1.1) == [Kill(S0, signal.SIGTERM), Kill(S1, signal.SIGTERM)]
    for key in (S0, S1):
        machine.on(Exited(key, 1), 1.2)
    (end,) = machine.on(Exited(SCHEDULER, 1), 1.3)
    assert isinstance(end, Finish)
    assert (end.status, end.culprit) == (139, W1)
    assert "SIGSEGV" in end.message


def test_a_dead_server_ends_the_run_whatever_its_status() -> None:
    for key, returncode in ((S1, 0), (SCHEDULER, 0), (S0, -9)):
        machine = supervisor(restarts=3)
        kills = machine.on(Exited(key, returncode), 1.0)
        assert kills == [Kill(W0, signal.SIGTERM), Kill(W1, signal.SIGTERM)]
        end = finish(machine, {W0, W1, S0, S1, SCHEDULER} - {key})
        assert (end.status, end.culprit) == (70, key)
        assert str(key) in end.message


def finish(machine: Supervisor, alive: set[ProcessKey]) -> Finish:
    """Ends all that is left, in the order in which it is stopped."""
    order = ("worker", "server", "scheduler")
    effects = [
        effect for key in sorted(alive, key=lambda k: order.index(k.role)) for effect in machine.on(Exited(key, -15), 2)
    ]
    (end,) = [effect for effect in effects if isinstance(effect, Finish)]
    return end


def test_who_ignores_sigterm_is_killed_after_the_grace() -> None:
    machine = supervisor()
    machine.on(Interrupted(signal.SIGTERM), 10.0)
    machine.on(Exited(W0, 0), 10.1)
    assert machine.on(Tick(), 14.9) == []
    said, kill = machine.on(Tick(), 15.0)
    assert kill == Kill(W1, signal.SIGKILL)
    assert isinstance(said, Say) and "worker 1" in said.message
    assert machine.on(Tick(), 30.0) == []
    machine.on(Exited(W1, -9), 30.0)
    # The next group has its own grace.
    assert machine.on(Tick(), 34.9) == []
    assert machine.on(Tick(), 35.0)[1:] == [Kill(S0, signal.SIGKILL), Kill(S1, signal.SIGKILL)]


def test_a_second_signal_kills_at_once() -> None:
    machine = supervisor()
    machine.on(Interrupted(signal.SIGINT), 1.0)
    kills = machine.on(Interrupted(signal.SIGINT), 1.1)
    assert kills == [Kill(key, signal.SIGKILL) for key in (W0, W1, S0, S1, SCHEDULER)]
    assert finish(machine, {W0, W1, S0, S1, SCHEDULER}).status == 130


def test_a_worker_that_never_connects_while_another_waits() -> None:
    machine = supervisor()
    machine.on(Connected(W0), 1.0)
    assert machine.on(Exited(W1, 0, False), 2.0) == [Kill(W0, signal.SIGTERM)]
    end = finish(machine, {W0, S0, S1, SCHEDULER})
    assert (end.status, end.culprit) == (65, W1)
    assert "worker 1" in end.message


def test_a_worker_that_connects_after_another_left_without() -> None:
    machine = supervisor()
    assert machine.on(Exited(W1, 0, False), 1.0) == []
    assert machine.on(Connected(W0), 2.0) == [Kill(W0, signal.SIGTERM)]


def test_a_script_that_never_used_psdist_is_a_warning() -> None:
    machine = supervisor()
    machine.on(Exited(W1, 0, False), 1.0)
    said = machine.on(Exited(W0, 0, False), 2.0)[0]
    assert isinstance(said, Say) and "never used psdist" in said.message
    assert finish(machine, {S0, S1, SCHEDULER}).status == 0


def test_an_attempt_that_never_connects_is_told_from_one_that_did() -> None:
    machine = supervisor(restarts=1)
    machine.on(Connected(W0), 1.0)
    machine.on(Connected(W1), 1.0)
    machine.on(Exited(W1, 1, True), 2.0)
    assert machine.waiting_to_connect() == [(W1, 1)]
    assert machine.on(Exited(W1, 0, False), 3.0) == [Kill(W0, signal.SIGTERM)]


def test_a_failure_that_is_no_exit() -> None:
    machine = supervisor()
    assert machine.on(Failed("no scheduler", 70, SCHEDULER), 1.0)[0] == Kill(W0, signal.SIGTERM)
    assert finish(machine, {W0, W1, S0, S1, SCHEDULER}) == Finish(70, "no scheduler", SCHEDULER)


def test_the_agent_has_workers_only() -> None:
    machine = Supervisor(range(4, 6), restarts_max=0)
    machine.on(Exited(ProcessKey("worker", 4), 0, True), 1.0)
    assert machine.on(Exited(ProcessKey("worker", 5), 0, True), 2.0) == [Finish(0)]


def test_words_and_numbers_of_an_exit() -> None:
    assert (describe(7), status_of(7)) == ("exit code 7", 7)
    assert (describe(-9), status_of(-9)) == ("killed by SIGKILL", 137)
    assert describe(-63) == "killed by signal 63"


ALL = (W0, W1, S0, S1, SCHEDULER)


@given(
    st.lists(
        st.one_of(
            st.builds(Exited, st.sampled_from(ALL), st.sampled_from([0, 1, -9]), st.booleans()),
            st.builds(Connected, st.sampled_from(ALL[:2])),
            st.just(Interrupted(signal.SIGTERM)),
            st.just(Tick()),
        ),
        max_size=30,
    ),
    st.integers(0, 2),
)
def test_every_history_ends_once_and_leaves_nobody(history: list[Event], restarts: int) -> None:
    """Invariants: one Finish, when nobody is alive; only the living are signalled; restarts stay within the limit."""
    machine = Supervisor(range(2), servers=2, schedulers=1, restarts_max=restarts)
    alive = dict.fromkeys(ALL, 0)
    ends: list[Finish] = []
    tail: list[Event] = [Interrupted(signal.SIGTERM), *(Exited(key, -15) for key in ALL)]
    for now, event in enumerate([*history, *tail]):
        if isinstance(event, Exited | Connected):
            if event.key not in alive:
                continue
            if isinstance(event, Exited):
                attempt = alive.pop(event.key)
        if ends:
            continue
        for effect in machine.on(event, float(now)):
            if isinstance(effect, Start):
                assert effect.attempt == attempt + 1 <= restarts
                alive[effect.key] = effect.attempt
            elif isinstance(effect, Kill):
                assert effect.key in alive
            elif isinstance(effect, Finish):
                assert not alive
                ends.append(effect)
    assert len(ends) == 1
