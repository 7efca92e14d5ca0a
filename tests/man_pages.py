"""Manual pages of all programs and commands, from the declarations of their flags.

    python -m tests.man_pages build/man      # psdist.1, psdist-run.1, ...: man -l build/man/psdist-run.1

``make man`` does the same.
"""

from __future__ import annotations

import os
import sys
import textwrap
import time
from datetime import UTC, datetime
from pathlib import Path

from psdist.cli.completion import Node, nodes
from psdist.cli.main import PSDIST
from psdist.settings.flags import Flag
from psdist.version import __version__

_WIDTH = 78  # mandoc warns of longer lines.


def pages() -> dict[str, str]:
    """Return the pages by the names of their files."""
    tree = nodes()
    return {f"{_title(node)}.1": _page(node, tree) for node in tree}


def _title(node: Node) -> str:
    return node.path.replace(" ", "-")


def _page(node: Node, tree: list[Node]) -> str:
    line, name = node.line, node.path
    description = PSDIST.description if line is None and name == "psdist" else f"Commands of {name}."
    if line is not None:
        description = line.description
    first = description.split(": ")[0].split(". ")[0].rstrip(".")
    usage = ["COMMAND", "[flags]"] if line is None else ["[flags]", *line.words, line.script]
    rows = [
        f'.TH "{_title(node).upper()}" 1 "{_date()}" "psdist {__version__}"',
        ".SH NAME",
        f"{_escaped(_title(node))} \\- {_escaped(first[0].lower() + first[1:])}",
        ".SH SYNOPSIS",
        f".B {_escaped(name)}",
        *_text(" ".join(filter(None, usage))),
        ".SH DESCRIPTION",
        *_text(description),
    ]
    if node.commands:
        rows.append(".SH COMMANDS")
        for word, text in node.commands:
            rows += [".TP", f"\\fB{_escaped(word)}\\fR", *_text(f"{text[0].upper()}{text[1:]}. See {name}-{word}(1).")]
    if line is not None:
        rows.append(".SH OPTIONS")
        for title, flags in line.groups().items():
            if flags:
                rows.append(f".SS {_escaped(title[0].upper() + title[1:])}")
            for flag in flags:
                rows += _option(flag)
        rows += [".TP", "\\fB\\-h\\fR, \\fB\\-\\-help\\fR", "Show the help and exit."]
        if line.epilog.strip():
            rows += [".SH NOTES", *_text(line.epilog)]
    others = [
        one for one in tree if one is not node and (one.path.startswith(f"{name} ") or name.startswith(f"{one.path} "))
    ]
    if others:
        rows += [".SH SEE ALSO", *_text(", ".join(f"{_title(one)}(1)" for one in others))]
    return "\n".join(rows) + "\n"


def _date() -> str:
    """Return the date of the pages, which a distribution sets for builds that can be repeated."""
    return datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time()), UTC).strftime("%Y-%m-%d")


def _option(flag: Flag) -> list[str]:
    value = f" \\fI{_escaped(flag.metavar)}\\fR" if flag.convert is not None else ""
    names = ", ".join(f"\\fB{_escaped(one)}\\fR{value}" for one in filter(None, (flag.short, flag.name)))
    defaults = [f"default {flag.default_text}"] if flag.default_text else []
    facts = "; ".join([*defaults, *([f"variables {', '.join(flag.environment)}"] if flag.environment else [])])
    return [
        ".TP",
        names,
        *_text(f"{flag.help[0].upper()}{flag.help[1:]}{f' ({facts})' if facts else ''}."),
    ]


def _text(text: str) -> list[str]:
    lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return [("\\&" if line[0] in ".'" else "") + _escaped(line) for line in lines]


def _escaped(text: str) -> str:
    return (
        text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("^", "\\(ha").replace("~", "\\(ti")
    )


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in pages().items():
        (folder / name).write_text(page)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
