"""The commented configuration file of a program, generated from its flags."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Final

from psdist.settings.flags import CONFIG_NAME, CommandLine, Flag

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
