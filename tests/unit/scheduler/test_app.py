"""The scheduler's process: its address, its claim on the storage, and its end when its run is over."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from psdist import addresses
from psdist.errors import ConfigurationError, SnapshotFailedError
from psdist.snapshots.opening import DirectoryClaim, open_storage
from psdist_scheduler import app
from psdist_scheduler.app import _claim
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.scheduler import OpenCalls


async def test_the_end_of_a_run_is_tried_again_where_it_was_refused() -> None:
    """The run then continues until it is over once more."""
    asked: list[ev.Stop] = []
    refused = asyncio.Event()

    def post(event: Any) -> None:
        if isinstance(event, ev.Stop):
            asked.append(event)
            refusal = ef.Refuse(event.call, SnapshotFailedError("no space"))
            calls.carry_out(refusal if len(asked) == 1 else ef.Answer(event.call, ef.Done()))
        elif isinstance(event, ev.CallEnded):
            refused.set()

    calls = OpenCalls(post)
    scheduler: Any = SimpleNamespace(calls=calls, post=post, is_over=asyncio.Event())
    scheduler.is_over.set()
    ending = asyncio.create_task(app._end_when_idle(scheduler))
    await refused.wait()
    await asyncio.sleep(0)
    assert not ending.done() and not scheduler.is_over.is_set() and len(asked) == 1
    scheduler.is_over.set()
    await asyncio.wait_for(ending, 30)
    assert [event.servers for event in asked] == [True, True]


async def test_only_the_end_of_a_call_that_was_not_refused_lets_others_proceed() -> None:
    ends: list[Any] = []
    calls = OpenCalls(ends.append)
    with calls.call() as (answered, outbox):
        calls.carry_out(ef.Answer(answered, ef.Done()))
        await outbox.take()
    with suppress(SnapshotFailedError), calls.call() as (refused, outbox):
        calls.carry_out(ef.Refuse(refused, SnapshotFailedError("no space")))
        await outbox.take()
    with suppress(SnapshotFailedError), calls.call() as (unread, outbox):
        raise SnapshotFailedError("its request is wrong")
    assert ends == [ev.CallEnded(answered), ev.CallEnded(refused, True), ev.CallEnded(unread, True)]


@pytest.mark.parametrize(
    ("host", "own", "told"),
    [
        ("127.0.0.1", "10.0.0.3", "127.0.0.1:7000"),
        ("0.0.0.0", "10.0.0.3", "10.0.0.3:7000"),
        ("[::]", "2001:db8::7", "[2001:db8::7]:7000"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1:7000"),
    ],
)
def test_the_address_file_holds_an_address_that_others_can_use(
    host: str, own: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "own_address", lambda: own)
    assert app._own_address(host, 7000) == told


def test_an_address_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The scheduler ends with one line and status 69, which its launcher does not try again."""
    path = tmp_path / "absent" / "address"
    with pytest.raises(ConfigurationError, match=rf"{path} cannot be written: No such file .*TMPDIR"):
        app._write_address(path, "127.0.0.1:7000")


# --- the claim on a directory of snapshots ----------------------------------------------------------------------------


def test_another_run_is_refused_and_the_same_run_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = DirectoryClaim(str(tmp_path), "first")
    assert other.take() is None
    storage = open_storage(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"in use by the run 'first' \(process .*--storage-path"):
        _claim(storage, "second")
    with caplog.at_level(logging.WARNING, "psdist.scheduler"):
        _claim(storage, "first").release()
    assert "another scheduler of this run" in caplog.text
    other.release()
    _claim(storage, "second").release()


def test_only_directories_are_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for storage in (None, open_storage("memory://claims")):
        held = [_claim(storage, run) for run in ("first", "second")]  # A directory would be refused to the second.
        assert not list(tmp_path.iterdir())
        for claim in held:
            claim.release()
