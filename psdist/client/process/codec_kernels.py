"""Kernels that compress gradients, prepared once per process.

A client must not miss heartbeats while a compiler runs. numpy therefore does the kernels' work, with the same bytes,
until another process has compiled them and a thread has loaded them. Neither the first push nor the end of a script
waits for the compiler (``background_compiler``). A client without compression imports none of this.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psdist.compression.background_compiler import BackgroundCompiler


def prepare(elements: int) -> BackgroundCompiler:
    """Return the kernels' compiler. The kernels are interpreted until compiling them is worthwhile.

    elements: size of the vectors; large ones start the compiler immediately.
    """
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
