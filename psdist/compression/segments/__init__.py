"""Compressed payloads (CODEC_SEGMENTS): encoding in the client, validation and accumulation in the server.

Every kernel also works without being compiled (``Kernel.interpret``), and without numba.

A server::

    check(payload, elements)      # raises MalformedPayloadError, NonFiniteGradientError; changes nothing
    accumulate(payload, out)      # out += decoded; out is float32[elements]

A decoded gradient is *defined* as zeros followed by ``accumulate``. It contains no negative zero unless ``out`` did.
So decoding each contribution and adding them up gives the same bytes as accumulating one after another into zeros.
``payload_limit(elements)`` is the largest valid payload in bytes.

A client::

    cut = regions(layout.tensors, codec)                       # psdist.compression.specifications, once
    # each push; acc is the flat vector, float32, with the last residual added:
    prepared = [prepare(r, acc[r.start : r.stop], PushNumber(rank, ordinal), states.get(r.start)) for r in cut]
    size = encode(prepared, start, stop, out, residual)        # each slice, in any order, in any thread
    states = {p.region.start: p.next_state for p in prepared if p.next_state is not None}

- ``out`` has at least ``payload_limit(stop - start)`` bytes.
- ``residual`` is a separate vector, since a slice may need values of its neighbours. Its elements [start, stop) are
  overwritten with acc - decoded. None skips that. For codecs accepted by ``selects_places`` it may be ``acc`` itself;
  then only sent elements change.
- ``acc`` must not change until all slices are written.

A region can be prepared as soon as its values exist, and a slice encoded as soon as its regions are prepared. Encoding
a slice again gives the same bytes. ``prepare_sum`` computes ``acc`` from a gradient and a residual, and prepares it.
"""

from typing import Final

from psdist.compression import casts
from psdist.compression.kernel_runtime import LARGE_ELEMENTS, BackgroundCompiler, Kernel, shared_compiler
from psdist.compression.segments import dense, encoding, random_numbers, sparse
from psdist.compression.segments.checking import check
from psdist.compression.segments.decoding import KERNELS as DECODERS
from psdist.compression.segments.decoding import accumulate
from psdist.compression.segments.encoding import (
    PreparedRegion,
    PreparedSparse,
    PushNumber,
    add_decayed,
    encode,
    prepare,
    prepare_sum,
    selects_places,
)
from psdist.compression.segments.format import payload_limit
from psdist.compression.specifications import Region, regions

__all__ = [
    "DECODERS", "KERNELS", "PreparedRegion", "PreparedSparse", "PushNumber", "Region", "accumulate", "add_decayed",
    "check", "encode", "payload_limit", "prepare", "prepare_kernels", "prepare_sum", "regions", "selects_places",
]  # fmt: skip

#: All kernels of segments. A server needs ``DECODERS``; a client that compresses needs all.
KERNELS: Final[tuple[Kernel, ...]] = (
    *(*DECODERS, *dense.KERNELS, *sparse.KERNELS, *random_numbers.KERNELS, *encoding.KERNELS, *casts.KERNELS),
)


def prepare_kernels(elements: int) -> BackgroundCompiler:
    """Return the compiler of the kernels that compress gradients, in a client.

    A client must not miss heartbeats while a compiler runs. numpy therefore does the kernels' work, until compiling
    them is worthwhile and another process has done it. Neither the first push nor the end of a script waits for that.

    elements: size of the vectors; large ones start the compiler immediately.
    """
    shared_compiler().add(KERNELS, "compressed gradients")
    if elements >= LARGE_ELEMENTS:
        shared_compiler().start_compiling()
    return shared_compiler()
