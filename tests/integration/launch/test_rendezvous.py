"""An agent that asks for its ranks where no scheduler is: it reports the address that it waits for, and later the
remedy."""

from __future__ import annotations

import asyncio
import json

import pytest

from psdist.addresses import free_port
from psdist.errors import SchedulerUnreachableError
from psdist.launcher import scheduler_calls
from psdist.launcher.events import RankRequest
from psdist.security.tls import Credentials


def test_an_absent_scheduler_is_named_while_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler_calls, "_SILENCE_SECONDS", 0.05)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    request = RankRequest(address, "run", "agent", 1, 1, 1, "host", timeout_seconds=0.5)
    with pytest.raises(SchedulerUnreachableError, match=r"Is it running, .* set PSDIST_SCHEDULER=HOST:PORT"):
        asyncio.run(scheduler_calls._ask(request, Credentials("token")))
    line, *_ = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"waiting_for": f"for a scheduler to answer at {address}; given up after 0.5 s"}
