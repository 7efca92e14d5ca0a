"""The codemap: one row per file, whose clause is the first sentence of the file's docstring.

    python -m tests.codemap

prints it, and the site of ``make docs`` has it as a page. A section is a folder; its introduction is the first
sentence of the package's docstring.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import Final

from tests.support.tree import MODULES, ROOT, module_name, parsed
from tests.test_tidy import is_pure

_HEAD: Final = """# Codemap

\\* marks a pure module: no event loop, wire, file, clock or randomness; `now` and `rng` are arguments. Each clause is
the first sentence of the file's docstring.

"""
#: Folders in the order in which a step passes them. A folder stands where the first of its parents stands; those that
#: are not named come last.
ORDER: Final = (
    *("psdist/client", "psdist/link", "psdist/wire", "servers/psdist_server", "servers/psdist_scheduler"),
    *(
        "psdist/snapshots",
        "psdist/compression",
        "psdist/device",
        "psdist/torch",
        "psdist/monitoring",
    ),
    *("psdist/launcher", "psdist/settings", "psdist/cli", "psdist", "tests/simulation"),
)
_ROOTS: Final = ("psdist", "servers", "tests/simulation")


def files() -> dict[str, list[Path]]:
    """The files of the codemap by folder, without ``__init__.py``, which describes the folder."""
    found: dict[str, list[Path]] = defaultdict(list)
    for path in MODULES:
        name = path.relative_to(ROOT).as_posix()
        is_test = path.name.startswith("test_")
        if name.startswith(tuple(f"{root}/" for root in _ROOTS)) and path.name != "__init__.py" and not is_test:
            found[path.parent.relative_to(ROOT).as_posix()].append(path)
    return found


def codemap() -> str:
    """The page, as Markdown."""
    return _HEAD + "\n".join(
        _section(folder, paths) for folder, paths in sorted(files().items(), key=lambda item: _key(item[0]))
    )


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, as Markdown; nothing where there is none."""
    text = " ".join((ast.get_docstring(parsed(path)) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.?!])\s+(?=[A-Z`*])", text)[0]
    return sentence.replace("``", "`").replace("|", "\\|").removesuffix(".")


def _section(folder: str, paths: list[Path]) -> str:
    package = ROOT / folder / "__init__.py"
    about = [f"{first_sentence(package)}.", ""] if package.exists() and first_sentence(package) else []
    return "\n".join([f"## {folder}", "", *about, "| file | |", "|---|---|", *map(_row, sorted(paths)), ""])


def _row(path: Path) -> str:
    mark = " \\*" if is_pure(module_name(path)) else ""
    return f"| `{path.name}`{mark} | {first_sentence(path)} |"


def _key(folder: str) -> tuple[int, str]:
    places = [place for place, name in enumerate(ORDER) if f"{folder}/".startswith(f"{name}/")]
    best = max(places, key=lambda place: len(ORDER[place]), default=len(ORDER))
    return best, folder


if __name__ == "__main__":
    print(codemap(), end="")
