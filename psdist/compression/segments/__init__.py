"""Compressed payloads (CODEC_SEGMENTS): encoding in the client, validation and accumulation in the server.

Every kernel also works without being compiled (``Kernel.interpret``), and without numba.

A server::

    check(payload, elements)      # raises MalformedPayloadError, NonFiniteGradientError; changes nothing
    accumulate(payload, out)      # out += decoded; out is float32[elements]

A decoded gradient is *defined* as zeros followed by ``accumulate``. It contains no negative zero unless ``out`` did.
So decoding each contribution and adding them up gives the same bytes as accumulating one after another into zeros.
``payload_limit(elements)`` is the largest valid payload in bytes.

A client::

    cut = regions(layout.tensors, codec)                       # psdist.compression.regions, once
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

from psdist.compression.regions import Region, regions
from psdist.compression.segments.encoding import PushNumber, encode, prepare, prepare_sum, selects_places
from psdist.compression.segments.format import payload_limit
from psdist.compression.segments.payload import accumulate, check
from psdist.compression.segments.prepared import PreparedRegion, PreparedSparse
from psdist.compression.segments.residuals import add_decayed
from psdist.compression.segments.warm_up import DECODERS, KERNELS

__all__ = [
    "DECODERS", "KERNELS", "PreparedRegion", "PreparedSparse", "PushNumber", "Region", "accumulate", "add_decayed",
    "check", "encode", "payload_limit", "prepare", "prepare_sum", "regions", "selects_places",
]  # fmt: skip
