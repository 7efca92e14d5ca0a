"""The library's warnings in a script that configures no logging, and in one that does."""

from __future__ import annotations

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
