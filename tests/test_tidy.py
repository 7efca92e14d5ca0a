"""The rules of CONTRIBUTING.md that a machine can check: import directions, pure modules, sizes, and words.

A rule is a function from a module's name and source to complaints. Each rule is first shown a snippet that breaks it
(``BAD``), so a rule that no longer sees anything fails here. Only the syntax is read; no module is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.tree import FILES, MODULES, ROOT, imports, is_generated, module_name, nodes, parsed, text_of

FUNCTION_LINES_MAX = 70

#: Folders of modules that may use no loop, wire, file, clock or chance. ``now`` and ``rng`` are their arguments.
PURE_FOLDERS = (*("psdist.client.core", "psdist_server.core", "psdist_scheduler.decide", "psdist.collectives.core"),)
#: Pure modules elsewhere.
PURE_MODULES = (
    *("psdist.errors", "psdist.types", "psdist.optim", "psdist.consistency", "psdist.changes"),
    *("psdist.hyperparameters", "psdist.hyperparameters"),
    *("psdist.compression", "psdist.compression.dtypes", "psdist.compression.specifications"),
    "psdist.compression.segments.format",
    *("psdist.wire.limits", "psdist.launcher.supervisor"),
    *("psdist.launcher.events", "psdist.launcher.shutdown", "psdist.settings", "psdist.settings.exit_codes"),
    *("psdist.snapshots.format", "psdist.snapshots.policy", "psdist.snapshots.records"),
    *("psdist.monitoring.metrics", "psdist.monitoring.spans"),
    "psdist.data.batches",
)
IMPURE_IMPORTS = frozenset(
    {
        *("asyncio", "concurrent", "multiprocessing", "queue", "select", "selectors", "subprocess"),
        *("threading", "uvloop", "google", "grpc", "http", "socket", "urllib", "io", "os", "pathlib", "shutil"),
        *(
            "sqlite3",
            "sys",
            "tempfile",
            "psutil",
            "logging",
            "structlog",
            "datetime",
            "time",
            "random",
            "secrets",
            "uuid",
        ),
    }
)
IMPURE_CALLS = frozenset({"open", "print", "input", "signal.signal"})

#: Import root -> import roots of this project that it must not name.
FORBIDDEN = {
    "psdist": ("psdist_server", "psdist_scheduler"),
    "psdist_server": ("psdist_scheduler",),
    "psdist_scheduler": ("psdist_server",),
}
#: Modules and calls that turn bytes into code or objects.
UNSAFE_MODULES = frozenset({"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})
UNSAFE_CALLS = frozenset({"eval", "exec", "__import__", "compile"})

#: Words that have a better one in this project (DESIGN's "one word for one thing"), in names of the code.
WORDS = {"coordinator": "scheduler", "slave": "worker", "trainer": "worker", "checkpoint": "snapshot"}
#: Modules whose names are those of the frameworks that they serve.
FRAMEWORKS = (
    *("psdist.hf.", "psdist.lightning.", "tests.support.hf_", "tests.support.lightning_"),
    *("examples.hf_", "examples.lightning_"),
)
#: Text that no committed file may hold, except this one, which has examples of it.
TEXTS = {
    "an absolute path of one machine": re.compile(r"(?<![\w.~$}/-])/(?:home|root|Users|work|tmp|farm)/\w"),
    "a mark of unfinished work": re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"),
    # No release is on PyPI, under either name.
    "an installation of another project named psdist": re.compile(
        r"\bpip3? install\b[^\n&;|]*[ '\"]psdist(?:-train)?(?![\w/-])|['\"]psdist(?:-train)?\[[a-z]"
    ),
    "a word on who made it": re.compile(
        r"(?i)\bco-authored-by\b|\bas an ai\b|\b(?:written|generated) by an? (?:ai|llm)\b"
    ),
}

Rule = Callable[[str, ast.Module], Iterator[str]]


# --- reading ----------------------------------------------------------------------------------------------------------


def calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Return all calls, with the text of the called expression."""
    for node in nodes(tree):
        if isinstance(node, ast.Call):
            yield node, text_of(node.func)


def is_pure(module: str) -> bool:
    """True if a module must be pure."""
    return module in PURE_MODULES or any(f"{module}.".startswith(f"{folder}.") for folder in PURE_FOLDERS)


# --- rules ------------------------------------------------------------------------------------------------------------


def arrows(module: str, tree: ast.Module) -> Iterator[str]:
    """Check that ``psdist`` imports no server, and that servers and scheduler do not import each other."""
    root = module.split(".")[0]
    for name in sorted(imports(module, tree)):
        if name.split(".")[0] in FORBIDDEN.get(root, ()):
            yield f"{root} must not import {name.split('.')[0]}"


def purity(module: str, tree: ast.Module) -> Iterator[str]:
    """Check that a pure module imports nothing that waits, reads, writes or uses chance, and no module that is not
    pure."""
    if not is_pure(module):
        return
    for name in sorted(imports(module, tree)):
        root = name.split(".")[0]
        if root in IMPURE_IMPORTS or name.startswith("numpy.random"):
            yield f"a pure module must not import {name}"
        elif root in FORBIDDEN and not (is_pure(name) or is_pure(name.rpartition(".")[0])):
            yield f"a pure module must not import {name}, which is not pure"
    for node, called in calls(tree):
        if called in IMPURE_CALLS or called.startswith(("np.random.", "numpy.random.")):
            yield f"line {node.lineno}: a pure module must not call {called}"


def no_waiting(module: str, tree: ast.Module) -> Iterator[str]:
    """Check that a pure module has no coroutines."""
    if is_pure(module):
        for node in nodes(tree):
            if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
                yield f"line {node.lineno}: a pure module must not wait"


#: Modules that import by a name, with the source of the name.
IMPORTERS = {
    # The program that called ``psdist.launch``, by a file in a directory of this user alone.
    "psdist.launcher.function_calls",
}


def safety(module: str, tree: ast.Module) -> Iterator[str]:
    """Check that nothing turns bytes into code or objects."""
    for name in sorted(imports(module, tree)):
        if name.split(".")[0] in UNSAFE_MODULES:
            yield f"must not import {name}: bytes from a peer or a file could become code"
    for node, called in calls(tree):
        if called in UNSAFE_CALLS:
            yield f"line {node.lineno}: must not call {called}"
        if called.endswith("import_module") and not (node.args and _is_written_here(node.args[0])):
            if module in IMPORTERS:
                continue
            yield f"line {node.lineno}: must not import a module by a name that is not written here"
        if any(keyword.arg == "allow_pickle" for keyword in node.keywords):
            yield f"line {node.lineno}: must not mention allow_pickle"


def _is_written_here(name: ast.expr) -> bool:
    """True if a module's name is a constant, or one of a table of constants: ``_MODULES[...]``."""
    table = isinstance(name, ast.Subscript) and isinstance(name.value, ast.Name) and name.value.id.isupper()
    return isinstance(name, ast.Constant) or table


def sizes(module: str, tree: ast.Module) -> Iterator[str]:
    """Check that functions stay small enough to be read."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"line {node.lineno}: {node.name} has {lines} lines, over {FUNCTION_LINES_MAX}"


def docstrings(module: str, tree: ast.Module) -> Iterator[str]:
    """Check that a module that is not empty starts with a description."""
    if tree.body and not ast.get_docstring(tree):
        yield "the module has no docstring"


def words(module: str, tree: ast.Module) -> Iterator[str]:
    """Check that names in the code use the project's words."""
    if module.startswith(FRAMEWORKS):
        return
    for node in nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        else:
            continue
        parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
        for part in sorted(WORDS.keys() & set(parts)):
            yield f"line {node.lineno}: {name}: say {WORDS[part]} instead of {part}"


def no_sleep(module: str, tree: ast.Module) -> Iterator[str]:
    """Check that tests wait for events, never for time to pass; ``sleep(0)`` only lets others run. Chaos runs measure
    in real time, at random moments."""
    if module.split(".")[0] != "tests" or module.startswith("tests.support.chaos."):
        return
    slept = {name for name in imports(module, tree) if name in ("time.sleep", "asyncio.sleep")}
    for node, called in calls(tree):
        if called in ("time.sleep", "asyncio.sleep") or (called == "sleep" and slept):
            nothing = node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
            if not nothing or "time" in called:
                yield f"line {node.lineno}: a test must not call {called}: wait for the event itself"


RULES: tuple[Rule, ...] = (arrows, purity, no_waiting, safety, sizes, docstrings, words, no_sleep)

#: Snippets that break each rule: (module, source).
BAD: dict[Rule, tuple[tuple[str, str], ...]] = {
    arrows: (
        ("psdist.client.core", "import psdist_server.core.shard"),
        ("psdist.launcher.local", "def f():\n    from psdist_scheduler import app"),
        ("psdist_server.app", "from psdist_scheduler.run_store import Store"),
        ("psdist_scheduler.app", "import psdist_server"),
    ),
    purity: (
        ("psdist_server.core.shard", "import time"),
        ("psdist_server.core.lags", "from grpc import aio"),
        ("psdist_scheduler.decide.members", "import random"),
        ("psdist_scheduler.decide.shard_placement", "from psdist.v1 import common_pb2"),
        ("psdist_scheduler.decide.shard_placement", "from psdist_scheduler.run_store import Store"),
        ("psdist.client.core.flat_vector", "import numpy as np\nx = np.random.default_rng()"),
        ("psdist.client.core.push_sequence", "def f():\n    return open('x')"),
    ),
    no_waiting: (("psdist.wire.limits", "async def f(): ..."),),
    safety: (
        ("psdist.wire.frames", "import pickle"),
        ("psdist.wire.frames", "from cloudpickle import loads"),
        ("psdist_server.app", "eval('1')"),
        ("psdist_server.app", "import importlib\ndef f(n): importlib.import_module(n)"),
        ("psdist_server.app", "import importlib\ndef f(n, t): importlib.import_module(t[n])"),
        ("psdist_server.files", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    ),
    sizes: (("psdist.x", "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX),),
    docstrings: (("psdist.x", "import math"),),
    words: (
        ("psdist.x", "class Coordinator: ..."),
        ("psdist.x", "def save_checkpoint(): ..."),
        ("psdist.x", "def f(slave_id): ..."),
    ),
    no_sleep: (
        ("tests.unit.test_x", "import time\ntime.sleep(0.1)"),
        ("tests.unit.test_x", "import time\ntime.sleep(0)"),
        ("tests.unit.test_x", "from asyncio import sleep\nasync def f(): await sleep(1)"),
        ("tests.unit.test_x", "import asyncio\nasync def f(): await asyncio.sleep(0.01)"),
    ),
}

#: Snippets that every rule must accept.
GOOD: tuple[tuple[str, str], ...] = (
    ("psdist.launcher.local", '"""Doc."""\nimport sys\ncommand = [sys.executable, "-m", "psdist_server"]'),
    ("psdist_server.core.shard", '"""Doc."""\nimport numpy as np\nfrom psdist.types import Slicing\nx = np.zeros(3)'),
    ("psdist_server.core.lags", '"""Doc."""\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio'),
    ("tests.unit.test_x", '"""Doc."""\nimport asyncio\nasync def f(): await asyncio.sleep(0)'),
    ("psdist.wire", ""),
)


# --- the rules see violations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [(rule, *bad) for rule, snippets in BAD.items() for bad in snippets],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_rule_sees_what_breaks_it(rule: Rule, module: str, source: str) -> None:
    assert list(rule(module, ast.parse(source)))


def test_every_rule_has_a_snippet_that_breaks_it() -> None:
    assert set(BAD) == set(RULES)


@pytest.mark.parametrize(("module", "source"), GOOD)
def test_rules_let_good_code_through(module: str, source: str) -> None:
    assert [complaint for rule in RULES for complaint in rule(module, ast.parse(source))] == []


@pytest.mark.parametrize(
    "text",
    [
        "see /home/ann/x",
        "in '/tmp/run'",
        "# TODO later",
        "Co-Authored-by: x",
        "# FIXME",
        "run pip install psdist",
        "pip install -U 'psdist[tls]'",
        '"psdist[otel]"',
    ],
)
def test_texts_see_what_breaks_them(text: str) -> None:
    assert any(pattern.search(text) for pattern in TEXTS.values())


@pytest.mark.parametrize("text", ["https://example.org/tmp/x", "a/work/b", "$HOME/x", "~/work/x", "/var/lib/psdist"])
def test_texts_let_good_text_through(text: str) -> None:
    assert not any(pattern.search(text) for pattern in TEXTS.values())


# --- the project keeps them -------------------------------------------------------------------------------------------

#: Written by ``tests.sync_client``; its length is that of the asyncio API and its docstrings.
SYNC_CLIENT = ROOT / "psdist/client/sync_client.py"


def test_there_is_something_to_check() -> None:
    names = {module_name(path) for path in MODULES}
    assert len(names) > 20
    assert set(PURE_MODULES) <= names and set(PURE_FOLDERS) <= names, "name what was renamed"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_modules_keep(rule: Rule) -> None:
    complaints = [
        f"{path.relative_to(ROOT)}: {complaint}"
        for path in MODULES
        if not (rule is sizes and path == SYNC_CLIENT)
        for complaint in rule(module_name(path), parsed(path))
    ]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("what", TEXTS)
def test_texts_are_free_of(what: str) -> None:
    complaints = []
    for path in FILES:
        if path.suffix in (".png", ".gz", ".npz") or is_generated(path) or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if TEXTS[what].search(line):
                complaints.append(f"{path.relative_to(ROOT)}:{number}: {what}: {line.strip()[:100]}")
    assert not complaints, "\n" + "\n".join(complaints)
