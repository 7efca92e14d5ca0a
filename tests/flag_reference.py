"""The reference of all flags, ``docs/flags.md``, from their declarations.

    python -m tests.flag_reference > docs/flags.md

``tests/unit/settings/test_flag_reference.py`` compares the page with what this prints, and each program's ``--help``
with the same declarations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from psdist.cli import worker
from psdist.cli.commands import Group
from psdist.cli.main import PSDIST
from psdist.settings.flags import CommandLine, Flag
from psdist.settings.programs import scheduler_line, server_line

_PAGE: Final = """# Flags

Every flag of every program. `python -m tests.flag_reference > docs/flags.md` writes this page. A value is the first
that is set of the command line, the flag's variables in the order given here, a [configuration
file](operate.md#configuration-files), and the default. Each flag may be written with underscores, too
(`--min_workers`). A flag that means the same in several programs is described once: below `psdist run`, or [at the
end](#flags-of-several-programs).
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
    """The text of the page: ``psdist run`` first, which has most of the flags that others share."""
    first, *others = sorted(command_lines(), key=lambda line: line.program != "psdist run")
    shared = _shared_rows(first, others)
    sections = [_section(line, _rows(first) if line is not first else {}, shared) for line in (first, *others)]
    return "\n".join([_PAGE, *sections, "## Flags of several programs\n", *shared.values(), ""])


def _shared_rows(first: CommandLine, others: list[CommandLine]) -> dict[str, str]:
    """By flag the row that most of ``others`` have, if several do and ``first`` does not."""
    counts = Counter(pair for line in others for pair in _rows(line).items() if pair not in _rows(first).items())
    most: dict[str, str] = {}
    for (name, row), count in counts.most_common():
        if count > 1:
            most.setdefault(name, row)
    return most


def _rows(line: CommandLine) -> dict[str, str]:
    return {flag.name: _row(flag) for flag in line.flags}


def time_limits() -> dict[tuple[str, str], set[str]]:
    """Return the programs that have each time limit, by flag and default. ``psdist config show`` is left out: it
    shows those of a run."""
    found: dict[tuple[str, str], set[str]] = {}
    for line in command_lines():
        for flag in line.flags:
            if flag.metavar == "SECONDS" and line.program != "psdist config show":
                found.setdefault((flag.name, flag.default_text), set()).add(line.program)
    return found


def _section(line: CommandLine, of_run: Mapping[str, str], shared: Mapping[str, str]) -> str:
    usage = " ".join(filter(None, (line.program, "[flags]", *line.words, line.script)))
    rows = _rows(line)
    as_run = [f"`{name}`" for name, row in rows.items() if of_run.get(name) == row]
    as_others = [f"`{name}`" for name, row in rows.items() if shared.get(name) == row]
    own = [row for name, row in rows.items() if row not in (of_run.get(name), shared.get(name))]
    parts = ["\n".join(own)] if own else []
    if as_run:
        named = "all its flags" if rows == of_run else ", ".join(as_run)
        parts.append(f"As in [psdist run](#psdist-run): {named}.")
    if as_others:
        parts.append(f"As [below](#flags-of-several-programs): {', '.join(as_others)}.")
    text = "\n\n".join(parts or ["It has no flags."])
    return f"## {line.program}\n\n{line.description}\n\n`{usage}`\n\n{text}\n"


def _row(flag: Flag) -> str:
    value = f" {flag.metavar}" if flag.convert is not None else ""
    names = ", ".join(f"`{name}{value}`" for name in flag.spellings if name in (flag.name, flag.short))
    default = [f"default `{flag.default_text}`"] if flag.default_text else []
    facts = ", ".join([*(f"`{name}`" for name in flag.environment), *default])
    return f"- {names}{f' ({facts})' if facts else ''}: {flag.help}"


if __name__ == "__main__":
    print(page(), end="")
