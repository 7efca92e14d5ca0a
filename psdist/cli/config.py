"""``psdist config``: prints a configuration file for ``--config``, and where each setting comes from."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from psdist.cli import run as run_command
from psdist.cli import worker as worker_command
from psdist.cli.commands import Command, Group, Leaf
from psdist.settings.config_template import default_value, key, template
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, Flag, one_of
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


def _show_line() -> CommandLine:
    return replace(
        run_command.command_line(),
        program="psdist config show",
        description="Prints the settings that psdist run would have with these flags, and where each comes from: the "
        "command line, a variable, a key of the file, or the default.",
        script="",
        epilog=" ",
    )


def _show(given: Namespace, environ: Mapping[str, str]) -> int:
    for flag in _show_line().flags:
        if flag.is_in_file:
            origin = given.origins.get(flag.dest)
            value = default_value(flag) if origin is None else json.dumps(origin.text)
            print(f"{key(flag)} = {value}  # {'default' if origin is None else origin.source}")
    return OK


CONFIG: Final = Group(
    "psdist config",
    "Configuration files for psdist run, psdist-scheduler, psdist-server and psdist-worker.",
    (
        Command("template", "print a commented file with all settings", lambda: Leaf(_template_line, _template)),
        Command("show", "print the settings with their origins: --config run.toml", lambda: Leaf(_show_line, _show)),
    ),
    "Each command has --help.",
)
