"""Measurements of psdist and of its alternatives. Each module is run as ``python -m benchmarks.NAME``."""

import ast
import sys
from pathlib import Path


def _help() -> str:
    """Return the docstring of a module that is run with --help, before its imports; empty if argparse helps there."""
    words = sys.orig_argv[1:]
    name = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if not name.startswith("benchmarks.") or not {"-h", "--help"}.intersection(words):
        return ""
    file = Path(__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    return "" if "argparse" in source else ast.get_docstring(ast.parse(source)) or ""


if _text := _help():
    print(_text)
    raise SystemExit(0)
