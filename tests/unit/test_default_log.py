"""The library's warnings in a script that configures no logging, and in one that does."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
import psdist
log = logging.getLogger("psdist")
psdist.Client.__init__  # imports the client, which configures nothing
{before}
client = psdist.AsyncClient(scheduler="127.0.0.1:1")
psdist.AsyncClient(scheduler="127.0.0.1:1")
{after}
log.info("quiet")
log.warning("step %d was dropped", 7)
"""


def stderr(before: str = "", after: str = "") -> str:
    program = PROGRAM.format(before=before, after=after)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr


def test_a_warning_has_the_time() -> None:
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING psdist: step 7 was dropped\n", stderr())


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(
    "configuration",
    [
        "logging.basicConfig(format='own %(message)s')",
        "h = logging.StreamHandler(); h.setFormatter(logging.Formatter('own %(message)s')); log.addHandler(h)",
    ],
)
def test_the_scripts_own_logging_counts_alone(configuration: str, place: str) -> None:
    assert stderr(**{place: configuration}) == "own step 7 was dropped\n"


AFTER = """
from psdist.client.session import script
script.identify_log(lambda: {'run': 'r', 'id': 'worker-3', 'incarnation': 2, 'step': 0, 'empty': ''})
log.warning('server-1 is lost', extra={'peer': 'server-1'})
try:
    1 / 0
except ZeroDivisionError:
    log.warning('failed', exc_info=True)
"""


def test_json_lines_have_the_fields_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSDIST_LOG_FORMAT", "json")
    of_peer, failed, found = map(json.loads, stderr(after=AFTER).splitlines())
    assert of_peer["peer"] == "server-1" and "ZeroDivisionError" in failed["exception"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", found.pop("timestamp"))
    assert found == {
        "event": "step 7 was dropped", "level": "warning", "logger": "psdist", "role": "worker", "run": "r",
        "id": "worker-3", "incarnation": 2, "step": 0,
    }  # fmt: skip
