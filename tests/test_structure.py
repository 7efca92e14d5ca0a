"""The shape of the product code: which modules and folders import which, one class per name, and how wide classes are.

Only the syntax is read. What this needs of one module is taken from ``test_tidy``.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.test_tidy import MODULES, ROOT, imports, module_name, parsed

FOLDER_MODULES_MAX = 16
METHODS_MAX = 25
ATTRIBUTES_MAX = 15

#: Classes that are wider, with their methods and attributes, and why that is so. These numbers may only fall.
WIDE = {
    # Settings of a program, one field for each flag.
    "SchedulerSettings": (0, 21),
    # The public API: one method for each thing that a script can ask for.
    "AsyncClient": (31, 18),
    "AsyncParameters": (48, 18),
    # One method for each RPC of the service.
    "Service": (28, 1),
    # To be split: each does more than one thing.
    "Applier": (32, 22),
    "Attempt": (29, 17),
    "BucketStep": (21, 17),
    "Cluster": (31, 20),
    "DenseParameters": (22, 19),
    "Exchange": (25, 20),
    "Membership": (46, 14),
    "ParameterServer": (31, 24),
    "ParameterStore": (55, 31),
    "Registry": (44, 8),
    "Scheduler": (16, 18),
    "ServerSession": (11, 16),
    "SharedMemory": (25, 21),
    "SnapshotSchedule": (48, 18),
    "WorkerSession": (33, 25),
}

PRODUCT = {module_name(path): path for path in MODULES if path.relative_to(ROOT).parts[0] in ("psdist", "servers")}
#: Offers the public names of all layers and imports them when they are used, so it stands above the modules beside it.
FACADE = "psdist"


def imported(module: str, path: Path) -> set[str]:
    """The modules of the product that a module imports when it runs."""
    names = imports(module, parsed(path), package=path.name == "__init__.py")
    found = {name if name in PRODUCT else name.rpartition(".")[0] for name in names}
    return {name for name in found if name in PRODUCT and not name.startswith("psdist.v1")} - {module}


def folder(module: str) -> str:
    """The package that a module lies in; a package lies in itself."""
    return module if PRODUCT[module].name == "__init__.py" else module.rpartition(".")[0]


def circles(arrows: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Sets of nodes each of which can be reached from all others of its set (Tarjan, 1972)."""
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


def widths(node: ast.ClassDef) -> tuple[int, int]:
    """Methods, and attributes: fields, and what methods set on self."""
    methods = sum(isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) for inner in node.body)
    fields = {inner.target.id for inner in node.body if isinstance(inner, ast.AnnAssign) and _is_name(inner.target)}
    stored = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and ast.unparse(inner.value) == "self"
    }
    return methods, len(fields | stored)


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def classes() -> list[tuple[str, ast.ClassDef]]:
    return [
        (module, node)
        for module, path in PRODUCT.items()
        for node in ast.walk(parsed(path))
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


def test_width_is_seen() -> None:
    (node,) = ast.parse("class A:\n    x: int\n    def f(self): self.y, self.x = 1, 2\n    async def g(self): ...").body
    assert isinstance(node, ast.ClassDef) and widths(node) == (2, 2)


def test_modules_import_in_no_circle() -> None:
    assert not circles({module: imported(module, path) for module, path in PRODUCT.items() if module != FACADE})


def test_folders_import_one_way() -> None:
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, path in PRODUCT.items():
        if module != FACADE:
            arrows[folder(module)] |= {folder(other) for other in imported(module, path) - {FACADE}} - {folder(module)}
    assert not circles(arrows)


def test_folders_are_small() -> None:
    sizes = Counter(folder(module) for module, path in PRODUCT.items() if path.name != "__init__.py")
    assert {name: size for name, size in sizes.items() if size > FOLDER_MODULES_MAX} == {}


def test_a_class_name_is_one_class() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for module, node in classes():
        where[node.name].append(module)
    assert {name: modules for name, modules in where.items() if len(modules) > 1} == {}


def test_classes_are_narrow() -> None:
    complaints = []
    for module, node in classes():
        allowed = WIDE.get(node.name, (METHODS_MAX, ATTRIBUTES_MAX))
        if any(has > most for has, most in zip(widths(node), allowed, strict=True)):
            complaints.append(
                f"{module}.{node.name} has {widths(node)} methods and attributes, over {allowed}: split it"
            )
    assert not complaints, "\n" + "\n".join(complaints)


def test_the_list_of_wide_classes_is_true() -> None:
    seen = {node.name: widths(node) for _, node in classes() if node.name in WIDE}
    assert {name: seen.get(name) for name in WIDE} == WIDE, "a class is narrower now: lower its numbers"
    assert all(methods > METHODS_MAX or attributes > ATTRIBUTES_MAX for methods, attributes in seen.values())


def test_the_architecture_names_every_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`[a-z_/]*?([a-z_0-9]+)\.py`", text))
    missing = [
        module
        for module, path in PRODUCT.items()
        if not path.stem.startswith("__") and path.stem not in named and folder(module) != "psdist.cli"
    ]
    assert not missing


def defined(module: str) -> set[str]:
    """The names that a module has, by its syntax."""
    names = {name.rpartition(".")[2] for name in PRODUCT if name.rpartition(".")[0] == module}
    for node in ast.walk(parsed(PRODUCT[module])):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def test_scripts_within_tests_import_what_there_is() -> None:
    """Their imports are text, which no other check reads."""
    pattern = re.compile(r"^\s*from (psdist[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    complaints = []
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if path.name.startswith("test_tidy") or not (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            ):
                continue
            for module, names in pattern.findall(node.value):
                wanted = {name.split(" as ")[0].strip() for name in names.split(",")}
                if not module.startswith("psdist.v1") and (missing := wanted - defined(module)):
                    complaints.append(f"{path.relative_to(ROOT)}: {module} has no {', '.join(sorted(missing))}")
    assert not complaints, "\n" + "\n".join(complaints)
