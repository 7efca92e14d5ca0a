"""The kernels that compress gradients, prepared once for a process.

A client must not miss heartbeats, which a compiler keeps it from. So numpy does the work of these kernels until they
are compiled by another process, and loaded by a thread, with the same bytes: neither the first push nor the end of a
script waits for the compiler (``background_compiler``). A client that compresses nothing imports none of it.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psdist.compression.background_compiler import BackgroundCompiler


def prepare(elements: int) -> BackgroundCompiler:
    """Has the kernels interpreted, and compiled once that is worth it: at once if vectors have many ``elements``.
    Returns what compiles them."""
    from psdist.compression.background_compiler import LARGE_ELEMENTS

    compiler = _prepared()
    if elements >= LARGE_ELEMENTS:
        compiler.start_compiling()
    return compiler


@cache
def _prepared() -> BackgroundCompiler:
    from psdist.compression.background_compiler import shared_compiler
    from psdist.compression.segments import KERNELS

    shared_compiler().add(KERNELS, "compressed gradients")
    return shared_compiler()
