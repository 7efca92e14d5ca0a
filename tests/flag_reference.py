"""The reference of all flags, ``docs/flags.md``, from their declarations.

    python -m tests.flag_reference > docs/flags.md

``tests/unit/settings/test_flag_reference.py`` compares the page with what this prints, and each program's ``--help``
with the same declarations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from psdist.cli import worker
from psdist.cli.commands import Group
from psdist.cli.main import PSDIST
from psdist.settings.flags import CommandLine, Flag
from psdist.settings.programs import scheduler_line, server_line

_PAGE: Final = """# Flags

Every flag of every program, from the declarations in the code: `python -m tests.flag_reference > docs/flags.md`
writes this page. A value is the first that is set of the command line, the flag's variables in the order given here,
and the default. Each flag may be written with underscores, too (`--min_workers`).
"""


def command_lines() -> list[CommandLine]:
    """The command lines of all programs, in the order of the page."""
    return [scheduler_line(), server_line(), worker.command_line(), *_lines_of(PSDIST)]


def _lines_of(group: Group) -> Iterator[CommandLine]:
    for command in group.commands:
        chosen = command.load()
        if isinstance(chosen, Group):
            yield from _lines_of(chosen)
        else:
            yield chosen.command_line()


def page() -> str:
    """The text of the page."""
    return "\n".join([_PAGE, *map(_section, command_lines())])


def time_limits() -> dict[tuple[str, str], set[str]]:
    """Return the programs that have each time limit, by flag and default. ``psdist config show`` is left out: it
    shows those of a run."""
    found: dict[tuple[str, str], set[str]] = {}
    for line in command_lines():
        for flag in line.flags:
            if flag.metavar == "SECONDS" and line.program != "psdist config show":
                found.setdefault((flag.name, flag.default_text), set()).add(line.program)
    return found


def _section(line: CommandLine) -> str:
    usage = " ".join(filter(None, (line.program, "[flags]", *line.words, line.script)))
    rows = [_row(flag) for flag in line.flags]
    table = ["| flag | variables | default | |", "|---|---|---|---|", *rows] if rows else ["It has no flags."]
    return "\n".join([f"## {line.program}", "", line.description, "", f"`{usage}`", "", *table, ""])


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}`" for name in flag.spellings if name == flag.name or name != "--" + flag.dest)
    value = f" `{flag.metavar}`" if flag.convert is not None else ""
    variables = ", ".join(f"`{name}`" for name in flag.environment)
    default = f"`{flag.default_text}`" if flag.default_text else ""
    return f"| {names}{value} | {variables} | {default} | {flag.help.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    print(page(), end="")
