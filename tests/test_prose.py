"""The rules on words of CONTRIBUTING.md: how docstrings open, the arguments that they name, weak phrases, loggers.

Text is counted against ceilings that may only fall: lower a ceiling with each commit that removes phrases. Each rule is
first shown text that breaks it; this file, which holds such text, is not counted. Docstring style is ruff's work; here
it is only checked that ruff looks.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.tree import FILES, ROOT, is_generated, nodes, parsed
from tests.test_structure import PRODUCT

THIS = Path(__file__).resolve()

# --- ceilings: these numbers may only fall ----------------------------------------------------------------------------

#: Docstrings of the product that open with a weak word.
OPENERS_MAX = 0
#: Weak phrases in all Python files and pages. Some are right where they stand, so the goal is a handful, not zero.
PHRASES_MAX = 50
#: Modules whose logger is not named ``logger``.
OTHER_LOGGERS = {"psdist.client.session.script": "_logger"}

# --- rules ------------------------------------------------------------------------------------------------------------

#: A docstring opens with a noun phrase or an imperative verb; for a boolean with "True if".
_WEAK_OPENER = re.compile(r"(?:What|Who|Whom|Whose|Has|Have|Where|Whether|How|That|Of|Is|Are)\b")

#: Phrases of a translation. Each alternative is one phrase with its forms; the comment says what to write instead.
_WEAK_PHRASE = re.compile(
    "|".join(
        (
            r"\bgo(?:es)? on\b|\bwent on\b|\bgoing on\b",  # continue, resume
            r"\banew\b",  # again, or a verb with re-
            r"\bat once\b",  # immediately
            r"\bso long\b",  # for this long
            r"\b(?:can|could|to) be had\b",  # is available
            r"\b(?:is|are) told\b",  # is notified, receives
            r"\ball the same\b",  # nevertheless
            r"\bnone of (?:its|their)\b",  # not part of
            r"\b(?:is|are|was|be) there\b(?! (?:is|are|a|an|no))",  # exists
            r"\blikewise\b",  # repeat the verb
            r"\bwhat(?:ever)? (?:it|they|one|this|that|a|an|the)\b",  # a noun
            r"\bwho (?:waits?|asks?)\b",  # the waiting caller
            r"\blies in\b",  # is in
            r"\bstands? still\b",  # is idle, is unchanged
            r"\bof (?:which|whom)\b",  # a second sentence
        )
    ),
    re.IGNORECASE,
)

_LOGGER_CALLS = ("logging.getLogger", "structlog.get_logger", "getLogger", "get_logger")


def weak_openers(tree: ast.Module) -> list[str]:
    """Docstrings that open with a weak word: line and first line of each."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in nodes(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and _WEAK_OPENER.match(text):
            found.append(f"{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    return found


def weak_phrases(text: str) -> list[str]:
    """All weak phrases of a text, in lower case."""
    return [phrase.lower() for phrase in _WEAK_PHRASE.findall(text)]


def unknown_arguments(tree: ast.Module) -> list[str]:
    """Entries ``name: meaning`` of functions' docstrings that name no argument: line and name of each."""
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            names = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
            # A line that continues a sentence may begin with a word and a colon.
            entries = re.findall(r"(?:[.:]|^)\n([a-z_]\w*(?:, [a-z_]\w*)*): ", text, re.MULTILINE)
            found += [f"{node.lineno}: {one}" for entry in entries for one in entry.split(", ") if one not in names]
    return found


def logger_names(tree: ast.Module) -> set[str]:
    """Names of the module's loggers."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    names = set()
    for node in assigned:
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in _LOGGER_CALLS:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(ast.unparse(target) for target in targets)
    return names


# --- the rules see what breaks them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["What it is.", "Whether it ends.", "Has a name.", "Of a slice.", "How many."])
def test_weak_openers_are_seen(text: str) -> None:
    for source in (f'"""{text}"""', f'class A:\n    """{text}"""', f'async def f():\n    """{text}"""'):
        assert len(weak_openers(ast.parse(source))) == 1


@pytest.mark.parametrize("text", ["True if it ends.", "Return the name.", "Whatever.", "Areas of memory.", "Hash."])
def test_other_openers_pass(text: str) -> None:
    assert weak_openers(ast.parse(f'def f():\n    """{text}"""')) == []


def test_weak_phrases_are_seen() -> None:
    text = """It goes on. Written anew, and at once. It waits so long. None of its business. The value can be had.
    Everybody is told. All the same it is there. Likewise what a peer sends. Who asks? It lies in memory, stands still,
    and is the file of which a copy remains."""
    assert len(weak_phrases(text)) == 15, weak_phrases(text)


@pytest.mark.parametrize("text", ["It continues.", "Is there a server?", "what happened", "the host who pays", "renew"])
def test_other_phrases_pass(text: str) -> None:
    assert weak_phrases(text) == []


def test_unknown_arguments_are_seen() -> None:
    text = "Add a and\n    so: on.\n\n    a: first.\n    b, c: others.\n        Longer.\n    d: last."
    assert unknown_arguments(ast.parse(f'def f(a, *, b):\n    """{text}"""')) == ["1: c", "1: d"]


def test_logger_names_are_seen() -> None:
    source = "import logging\nlog = logging.getLogger('x')\nlogger: object = structlog.get_logger()\nother = f()"
    assert logger_names(ast.parse(source)) == {"log", "logger"}


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("D200", 'def f():\n    """\n    Two lines too many.\n    """\n'),
        ("D300", "def f():\n    '''Single quotes.'''\n"),
        ("D402", 'def f(a):\n    """f(a) -> int."""\n'),
        ("D415", 'def f():\n    """No full stop"""\n'),
        ("D417", 'def f(a, b):\n    """Add.\n\n    Args:\n        a: number.\n\n    """\n'),
    ],
)
def test_ruff_sees_docstrings(rule: str, source: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", "psdist/sample.py", "--output-format=concise"]
    done = subprocess.run([*command, "-"], cwd=ROOT, input=source, capture_output=True, text=True, check=False)
    assert f" {rule} " in done.stdout, done.stdout + done.stderr


# --- the project keeps them -------------------------------------------------------------------------------------------


def test_docstrings_open_well() -> None:
    found = [f"{module}:{line}" for module, path in PRODUCT.items() for line in weak_openers(parsed(path))]
    assert len(found) <= OPENERS_MAX, f"{len(found)}, over {OPENERS_MAX}:\n" + "\n".join(found)


def test_docstrings_name_arguments_that_exist() -> None:
    found = [f"{module}:{line}" for module, path in PRODUCT.items() for line in unknown_arguments(parsed(path))]
    assert not found, "\n".join(found)


def test_weak_phrases_become_fewer() -> None:
    texts = [path for path in FILES if path.suffix in (".py", ".md") and not is_generated(path) and path != THIS]
    found = {path: weak_phrases(path.read_text(encoding="utf-8")) for path in texts}
    total = sum(map(len, found.values()))
    most = Counter({path.relative_to(ROOT).as_posix(): len(phrases) for path, phrases in found.items()}).most_common(20)
    assert total <= PHRASES_MAX, f"{total}, over {PHRASES_MAX}, most in {most}"


def test_a_logger_is_named_logger() -> None:
    found = {(module, name) for module, path in PRODUCT.items() for name in logger_names(parsed(path)) - {"logger"}}
    assert found <= set(OTHER_LOGGERS.items())
