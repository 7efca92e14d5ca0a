"""``psdist config``: prints a commented configuration file for ``--config``, and where each setting comes from."""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from psdist.cli import run as run_command
from psdist.cli import worker as worker_command
from psdist.cli.commands import Command, Group, Leaf
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CONFIG_NAME, CommandLine, Flag, one_of
from psdist.settings.programs import scheduler_line, server_line

#: Command lines of the programs that take a file, by the words of ``--program``.
PROGRAMS: Final[Mapping[str, Callable[[], CommandLine]]] = {
    "run": run_command.command_line,
    "scheduler": scheduler_line,
    "server": server_line,
    "worker": worker_command.command_line,
}


def _template_line() -> CommandLine:
    return CommandLine(
        "psdist config template",
        "Prints a configuration file with all settings of a program, their defaults and variables, as comments.",
        (Flag("--program", f"program that reads the file: {', '.join(PROGRAMS)}", one_of(*PROGRAMS), "run", "NAME"),),
        epilog="Example: psdist config template > run.toml; psdist run --config run.toml train.py",
    )


def _template(given: Namespace, environ: Mapping[str, str]) -> int:
    print(template(PROGRAMS[given.program]()), end="")
    return OK


_ALL: Final = Flag("--all", "print the settings that have their defaults, too", twin=False)


def _show_line() -> CommandLine:
    line = run_command.command_line()
    return replace(
        line,
        program="psdist config show",
        description="Prints the settings that psdist run would have with these flags, and where each comes from: the "
        "command line, a variable, or a key of the file.",
        flags=(*line.flags, _ALL),
        script="",
        epilog=" ",
    )


def _show(given: Namespace, environ: Mapping[str, str]) -> int:
    hidden = 0
    for flag in _show_line().flags:
        if flag.is_in_file and flag is not _ALL:
            origin = given.origins.get(flag.dest)
            if origin is not None:
                print(f"{key(flag)} = {json.dumps(origin.text)}  # {origin.source}")
            elif given.all:
                print(f"{key(flag)} = {default_value(flag)}  # default")
            else:
                hidden += 1
    if hidden:
        print(f"# {hidden} settings have their defaults: --all prints them, too")
    return OK


CONFIG: Final = Group(
    "psdist config",
    "Configuration files for psdist run, psdist-scheduler, psdist-server and psdist-worker.",
    (
        Command("template", "print a commented file with all settings", lambda: Leaf(_template_line, _template)),
        Command(
            "show",
            "print the settings that are set, with their origins: --config run.toml",
            lambda: Leaf(_show_line, _show),
        ),
    ),
    "Each command has --help.",
)


_WIDTH: Final = 100


def template(line: CommandLine) -> str:
    """Return a TOML file with every setting of ``line`` as a comment that shows its default."""
    parts = [_head(line.program)]
    for title, flags in line.groups().items():
        shown = [flag for flag in flags if flag.is_in_file]
        if shown:
            parts += ["", f"# --- {title} {'-' * (_WIDTH - 7 - len(title))}"]
            parts += ["\n".join(("", *_lines(flag))) for flag in shown]
    return "\n".join(parts) + "\n"


def _head(program: str) -> str:
    text = (
        f"Settings of {program}, which reads them with {CONFIG_NAME} FILE. Each line below shows a default: remove its "
        "# and change it. The command line takes precedence over this file, and so do variables of the environment, "
        'whose names are in brackets. Paths are relative to the working directory. "" means that there is no value.'
    )
    return "\n".join(_comment(text))


def _lines(flag: Flag) -> Iterator[str]:
    variables = f" [{', '.join(flag.environment)}]" if flag.environment else ""
    yield from _comment(f"{flag.help}{variables}")
    yield f"#{key(flag)} = {default_value(flag)}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False, break_long_words=False
    )


def key(flag: Flag) -> str:
    """Return the flag's key in a file."""
    return flag.name.lstrip("-")


def default_value(flag: Flag) -> str:
    """Return the flag's default as TOML."""
    if flag.convert is None:
        return "true" if flag.default else "false"
    if isinstance(flag.default, int | float):
        return flag.default_text
    return json.dumps(flag.default_text)  # A text in JSON is one in TOML.
