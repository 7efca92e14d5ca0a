"""Commands in generated files, checked by the programs' own command lines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from psdist.cli import worker
from psdist.settings.flags import CommandLine
from psdist.settings.programs import scheduler_line, server_line

LINES: Final[Mapping[str, Callable[[], CommandLine]]] = {
    "psdist-scheduler": scheduler_line,
    "psdist-server": server_line,
    "psdist-worker": worker.command_line,
}


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Namespace:
    """Return the flags and variables of one of psdist's programs. A wrong one ends the test."""
    return LINES[argv[0]]().parse(argv[1:], environ)
