"""The source tree, for tests of the code itself."""

from __future__ import annotations

import ast
import functools
import gc
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def committed() -> list[Path]:
    """Return the files that are, or are about to be, under version control; without git, all files except caches."""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        return sorted(path for name in names if name and (path := ROOT / name).is_file())
    skipped = {".venv", "__pycache__", "dist", "build", ".git"}
    return sorted(path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.parts))


def is_generated(path: Path) -> bool:
    """True for stubs written by protoc."""
    return path.relative_to(ROOT).parts[:2] == ("psdist", "v1")


def module_name(path: Path) -> str:
    """``servers/psdist_server/core/shard.py`` -> ``psdist_server.core.shard``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "servers" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes of a module. Walking a tree takes longer than most rules."""
    return tuple(ast.walk(tree))


def text_of(node: ast.expr) -> str:
    """Return the source of an expression. Names and attributes, which are the most, are not left to ``ast.unparse``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{text_of(node.value)}.{node.attr}"
    return ast.unparse(node)


def imports(module: str, tree: ast.Module, *, package: bool = False, with_typing: bool = False) -> set[str]:
    """Return the dotted names of all imports in a module. with_typing: include those under ``TYPE_CHECKING``."""
    blocks = [] if with_typing else [node for node in nodes(tree) if _is_typing_block(node)]
    typing_only = {id(inner) for node in blocks for inner in ast.walk(node)}
    found: set[str] = set()
    for node in nodes(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level + (1 if package else 0) or None]
                base = ".".join([*parents, *([base] if base else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def _is_typing_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and text_of(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


FILES = committed()
MODULES = [path for path in FILES if path.suffix == ".py" and not is_generated(path)]


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax of a module, for all rules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    gc.freeze()  # All of it stays. Each garbage collection would traverse a million nodes, now and in later tests.
    return tree
