"""The shape of the product code: which modules and folders import which, and whether the architecture page names them.

Only the syntax is read. ``test_tidy`` has the function that parses modules.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.support.tree import MODULES, ROOT, imports, module_name, nodes, parsed

#: Constants named like a limit outside ``psdist.wire.limits``, by module. This list may only shrink.
LIMITS_ELSEWHERE = {
    # Ranges of single values, checked by their types; limits of the wire may not be lower.
    "psdist.types": {"SLICE_ELEMENTS_MAX", "SAMPLES_MAX", "RANGES_MAX", "DATA_EPOCHS_MAX"},
    "psdist.consistency": {"_COUNT_MAX"},
    "psdist.data.samples": {"_SEED_MAX"},
    "psdist.hyperparameters": {"_OVERRIDES_MAX"},
    "psdist.snapshots.records": {"_NUMBER_MAX"},
    "psdist.snapshots.policy": {"STEPS_MAX", "SECONDS_MAX", "KEEP_MAX"},
    # Bounds on a process's own output, such as the text that it shows.
    "psdist.changes": {"_VALUE_CHARACTERS_MAX"},
    "psdist.client.datasets": {"_SHUFFLE_HERE_MAX"},
    "psdist.client.session.membership": {"IN_A_ROW_MAX"},
    "psdist.client.session.waits": {"_SENTENCES_MAX"},
    "psdist.client.transport.buffers": {"_LENT_MAX"},
    "psdist.snapshots.export": {"FILE_BYTES_MAX"},
    "psdist.machine": {"_M_ARENA_MAX"},
    "psdist.link.arenas": {"_STITCHES_MAX"},
    "psdist_server.core.shard": {"_NAMED_MAX"},
    "psdist_scheduler.decide.joins": {"DISTANCE_MAX"},
    "psdist_scheduler.decide.snapshot_schedule": {"REFUSALS_MAX", "RETRIES_MAX", "HELD_MAX", "_DISTANCE_MAX"},
    "psdist_server.kernels.pool": {"BATCH_MAX"},
    "psdist_server.snapshots": {"COPY_BYTES_MAX"},
    "psdist.client.transport.shm": {"_WAITS_MAX"},
    "psdist.wire.frames": {"_VARINT_BYTES_MAX"},
    "psdist_server.store.shard_router": {"ENCODED_MAX"},
}

PRODUCT = {module_name(path): path for path in MODULES if path.relative_to(ROOT).parts[0] in ("psdist", "servers")}
PAGE = ROOT / "ARCHITECTURE.md"
#: Offers the public names of all layers and imports them when they are used, so it stands above the modules beside it.
FACADE = "psdist"
#: Modules beside the facade that only name what the folders define.
ALIASES = {f"{FACADE}.__main__", f"{FACADE}.trackers"}


def imported(module: str, path: Path, *, with_typing: bool = False) -> set[str]:
    """Return the modules of the product that a module imports. with_typing: include imports under ``TYPE_CHECKING``."""
    names = imports(module, parsed(path), package=path.name == "__init__.py", with_typing=with_typing)
    found = {name if name in PRODUCT else name.rpartition(".")[0] for name in names}
    return {name for name in found if name in PRODUCT and not name.startswith("psdist.v1")} - {module}


def folder(module: str) -> str:
    """Return the package that contains a module; a package contains itself."""
    return module if PRODUCT[module].name == "__init__.py" else module.rpartition(".")[0]


def circles(arrows: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Return the strongly connected components of two or more nodes (Tarjan, 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in arrows.get(node, ()):
            if other not in index:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(set(stack[at:]))
            del stack[at:]

    for node in arrows:
        if node not in index:
            visit(node)
    return found


_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (module, node)
        for module, path in PRODUCT.items()
        for node in nodes(parsed(path))
        if isinstance(node, ast.ClassDef)
    ]


@pytest.mark.parametrize(
    ("arrows", "found"),
    [
        ({"a": "b", "b": "c", "c": ""}, []),
        ({"a": "b", "b": "ca", "c": ""}, [{"a", "b"}]),
        ({"a": "b", "b": "c", "c": "a", "d": "a"}, [{"a", "b", "c"}]),
    ],
)
def test_circles_are_seen(arrows: dict[str, str], found: list[set[str]]) -> None:
    assert circles(arrows) == found


def test_imports_for_type_checkers_are_seen() -> None:
    tree = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import psdist.types")
    assert "psdist.types" in imports("a", tree, with_typing=True) - imports("a", tree)


def test_modules_import_in_no_circle() -> None:
    assert not circles({module: imported(module, path) for module, path in PRODUCT.items() if module != FACADE})
    assert not circles({module: imported(module, path, with_typing=True) for module, path in PRODUCT.items()})


def test_folders_import_one_way() -> None:
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, path in PRODUCT.items():
        if module != FACADE and module not in ALIASES:
            arrows[folder(module)] |= {folder(other) for other in imported(module, path) - {FACADE}} - {folder(module)}
    assert not circles(arrows)


def limits(tree: ast.Module) -> set[str]:
    """Return the names of module-level constants that end like a limit's."""
    targets = [
        target
        for node in tree.body
        for target in ([node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", []))
    ]
    return {name.id for name in targets if isinstance(name, ast.Name) and re.search(r"_(MAX|LIMIT)$", name.id)}


def test_limits_are_seen() -> None:
    assert limits(ast.parse("A_MAX: Final = 1\nB_LIMIT = 2\nC = 3\ndef f(): D_MAX = 4")) == {"A_MAX", "B_LIMIT"}


def test_limits_are_in_one_file() -> None:
    found = {module: limits(parsed(path)) for module, path in PRODUCT.items() if module != "psdist.wire.limits"}
    assert {module: names for module, names in found.items() if names} == LIMITS_ELSEWHERE


#: The end of a docstring's first paragraph.
_FULL_STOP = re.compile(r"[.?:]$|https?://\S+$")
#: Beginnings that continue a sentence of another text.
_CONTINUES = re.compile(r"(It|They|None|Of|All who|Whoever|Neither|Nor|And|But|So|Likewise)\b|[.,;:]")


def fragments(tree: ast.Module) -> list[str]:
    """Return first paragraphs of docstrings that have no full stop, or cannot be understood alone."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in nodes(tree) if isinstance(node, documented)]
    firsts = [text.split("\n\n")[0] for text in texts if text]
    return [first for first in firsts if not _FULL_STOP.search(first) or _CONTINUES.match(first)]


@pytest.mark.parametrize("text", ["No full stop\n\nMore.", "Is it? Yes", "It does not.", "None will.", "Of the cut."])
def test_fragments_are_seen(text: str) -> None:
    assert fragments(ast.parse(f'def f():\n    """{text}"""')) == [text.split("\n\n")[0]]


@pytest.mark.parametrize("text", ["What it is.", "Two: these.", "See https://example.org/x", "May it be read?"])
def test_sentences_are_no_fragments(text: str) -> None:
    assert fragments(ast.parse(f'"""{text}"""')) == []


def test_docstrings_begin_with_a_sentence() -> None:
    found = {module: fragments(parsed(path)) for module, path in PRODUCT.items()}
    assert {module: lines for module, lines in found.items() if lines} == {}


#: Table of the classes in the main loops, by folder and file.
_CLASSES = "### The classes of these loops\n"


def test_the_classes_of_the_main_loops_are_where_the_page_says() -> None:
    loops, _, rest = PAGE.read_text(encoding="utf-8").partition(_CLASSES)
    table = {}
    for folder, files in re.findall(r"^\| `([\w/]+)` \| (.*) \|$", rest.split("\n## ")[0], re.MULTILINE):
        for names, file in re.findall(r"((?:`\w+`(?: and )?)+) in `([\w/]+\.py)`", files):
            source = (ROOT / folder / file).read_text(encoding="utf-8")
            table |= dict.fromkeys(re.findall(r"\w+", names.replace(" and ", " ")), source)
    assert table and all(re.search(rf"^class {name}\b", source, re.MULTILINE) for name, source in table.items())
    assert set(re.findall(r"`([A-Z]\w+)\.\w+", loops.split("## The main loops\n")[1])) <= table.keys()


def test_the_main_loops_name_what_exists() -> None:
    """Check that each ``Class.method`` or ``module.function`` of that section exists."""
    text = PAGE.read_text(encoding="utf-8").split("## The main loops\n")[1].split(_CLASSES)[0]
    named = set(re.findall(r"`(\w+)\.(\w+)(?:\([^`]*\))?`", text))
    known = {(module.rpartition(".")[2], name) for module in PRODUCT for name in defined(module)}
    for _, node in classes():
        known |= {(node.name, inner.name) for inner in node.body if isinstance(inner, _FUNCTION)}
    assert named and named <= known, sorted(named - known)


@pytest.mark.parametrize("page", [PAGE, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_the_pages_for_developers_name_files_that_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8")))
    paths = [path.relative_to(ROOT).as_posix() for path in MODULES]
    assert named and {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in paths)} == set()


def defined(module: str) -> set[str]:
    """Return the names that a module defines, by its syntax."""
    names = {name.rpartition(".")[2] for name in PRODUCT if name.rpartition(".")[0] == module}
    for node in nodes(parsed(PRODUCT[module])):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def test_scripts_within_tests_use_what_there_is() -> None:
    """Check imports in scripts within tests, and their uses of an imported module. They are text, which no other check
    reads."""
    pattern = re.compile(r"^\s*from (psdist[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    product_names = {name.rpartition(".")[2] for name in PRODUCT}
    complaints = []
    for path in MODULES:
        for node in nodes(parsed(path)):
            if path.name.startswith("test_tidy") or not (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            ):
                continue
            for module, names in pattern.findall(node.value):
                wanted = {module: {name.split(" as ")[0].strip() for name in names.split(",")}}
                for name in wanted[module] & product_names:
                    wanted[f"{module}.{name}"] = set(re.findall(rf"(?<![\w.]){name}\.(\w+)", node.value))
                for source, uses in wanted.items():
                    if source in PRODUCT and (missing := uses - defined(source)):
                        complaints.append(f"{path.relative_to(ROOT)}: {source} has no {', '.join(sorted(missing))}")
    assert not complaints, "\n" + "\n".join(complaints)
