"""Commands that pages, errors and help name: each exists, and has the flags that it is named with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from psdist.cli.commands import Group
from psdist.cli.main import PSDIST
from psdist.settings.flags import CommandLine
from tests.support.generated import LINES
from tests.support.tree import FILES, MODULES, ROOT, nodes, parsed

#: The changelog also names commands that went.
PAGES = [path for path in FILES if path.suffix == ".md" and path.name != "CHANGELOG.md"]
#: Files with commands in their first lines.
HEADS = [ROOT / "docker-compose.yml", *sorted((ROOT / "examples").glob("*.py"))]
#: A command in a text: up to a backtick, the end of the sentence or a bracket.
_MENTION = re.compile(r"(?<![\w./:@<=-])psdist(?:-scheduler|-server|-worker)?(?: [^\s`()|;>#,&]+(?<![.:]))*")
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
_SHELLS = ("", "sh", "bash", "console")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def complaint(command: str) -> str:
    """Return an error for a command that does not exist, or a flag that it lacks; empty for a right one.

    The end of a mention that is no command, such as the text after it, is not judged, except flags.
    """
    words = command.split()
    if words[0] in LINES:
        line, rest = LINES[words[0]](), words[1:]
    else:
        chosen: object = PSDIST
        rest = words[1:]
        while isinstance(chosen, Group):
            names = {each.usage.split()[0]: each for each in chosen.commands}
            word = chosen.aliases.get(rest[0], rest[0]) if rest else "--help"
            if word in ("--help", "-h"):
                return ""
            if word not in names:
                return f"{command}: {chosen.program} has no command {word}"
            chosen, rest = names[word].load(), rest[1:]
        line = chosen.command_line()  # type: ignore[attr-defined]
    assert isinstance(line, CommandLine)
    own = line.split(rest)[0] if line.script else rest
    found = line.unknown(own)
    return f"{command}: {found}" if found else ""


def typed(text: str) -> Iterator[str]:
    """Return the commands in the blocks and spans of a page."""
    for language, block in _BLOCK.findall(text):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines() if language in _SHELLS else ():
            if match := re.match(
                r"\s*(?:[\w.@-]*[$#] )?(?:\w+=\S+ )*(?:[\w./-]*bin/)?(psdist(?:-\w+)? [^#|;&>]*)", line
            ):
                yield match[1].strip()
    for span in _SPAN.findall(_BLOCK.sub("", text)):
        if match := re.match(r"(?:\w+=\S+ )*(psdist(?:-\w+)? [^#|;&>]*)", " ".join(span.split())):
            yield match[1].strip()


def named(text: str) -> Iterator[str]:
    """Return the commands in a literal or a comment. A word of prose after ``psdist`` makes no command."""
    words = {each.usage.split()[0] for each in PSDIST.commands}
    for match in _MENTION.findall(" ".join(text.split())):
        parts = match.split(" ")
        if parts[0] in LINES or (len(parts) > 1 and parts[1] in words):
            yield match


@pytest.mark.parametrize(
    "command",
    ["psdist top", "psdist run --workers 3 train.py", "psdist snapshot restore", "psdist-worker --nservers 2 x.py"],
)
def test_wrong_commands_are_seen(command: str) -> None:
    assert complaint(command)
    assert [complaint(one) for one in typed(f"Run\n```\n$ {command}\n```\n")] == [complaint(command)]
    assert [complaint(one) for one in typed(f"`{command}`")] == [complaint(command)]


def test_the_remedy_of_an_error_is_seen() -> None:
    assert list(named("there is none: psdist run --nope 3 train.py, or another")) == ["psdist run --nope 3 train.py"]
    assert list(named("psdist needs another program")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [found for command in typed(text) if (found := complaint(command))] == []


def test_the_commands_that_errors_help_and_comments_name_exist() -> None:
    literals = {
        (path, node.value)
        for path in MODULES
        if path.relative_to(ROOT).parts[0] in ("psdist", "servers")
        for node in nodes(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "psdist" in node.value
    }
    texts = [text for _, text in literals] + [path.read_text(encoding="utf-8") for path in HEADS]
    commands = [command for text in texts for command in named(text)]
    assert len(commands) > 100
    # A sentence may continue after the name of a group.
    assert [found for command in commands if "no flag" in (found := complaint(command))] == []
