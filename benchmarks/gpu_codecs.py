"""What encoding on a CUDA device takes: ``python -m benchmarks.gpu_codecs --out FILE``, on a machine that has one.

One tensor of normal values in slices of 4 MiB, as a push of it: bytes of float32 that are encoded each second, with and
without error feedback, medians of some rounds. *kernels* is all that runs on the device, from the gradient to the
payloads; *whole* is with their copy to the host, and what the host does. The targets are those of kernels without
error feedback. What it is not: a test of bytes, which the tests marked ``gpu`` are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_updates import median_seconds
from psdist.compression import ChunkedTopK, Codec, Compressor, Int2, Int4, Int8, OneBit, TopK
from psdist.compression.gpu.coders import PushNumbers
from psdist.compression.gpu.encoder import DeviceEncoder, DevicePush
from psdist.compression.gpu.memory import DeviceVector
from psdist.compression.gpu.tables import SegmentRange
from psdist.compression.regions import Region
from psdist.errors import PsdistError
from psdist.gpu.device import Device, open_device

#: Codecs, and the bytes of float32 each second that their kernels are to encode.
TARGETS: dict[type[Compressor], tuple[dict[str, Any], float | None]] = {
    Int8: ({}, 1000e9),
    ChunkedTopK: ({}, 400e9),
    TopK: ({}, 200e9),
    Int4: ({}, None),
    Int2: ({}, None),
    OneBit: ({}, None),
}
_SLICE = 1 << 20


class Encoding:
    """Encodes one tensor again and again. values: float32[n] on the device."""

    def __init__(self, device: Device, codec: Codec, values: DeviceVector) -> None:
        self._region = Region(0, values.size, codec, (values.size,))
        self._encoder = DeviceEncoder(device, [self._region])
        stream = self._encoder.launcher.stream
        before, after = (DeviceVector.allocate(device, values.size, stream) for _ in "ab")
        self._push = DevicePush(values, before, after, PushNumbers(0, 0), np.zeros(1, np.uint32))
        starts = range(0, values.size, _SLICE)
        stops = [min(start + _SLICE, values.size) for start in starts]
        self._slices = [[SegmentRange(0, self._region, *bounds)] for bounds in zip(starts, stops, strict=True)]

    def whole(self) -> int:
        """Encodes, and returns the bytes of the payloads."""
        return sum(map(len, self._encoder.encode(self._push, self._slices, [0]).payloads))

    def kernels(self) -> None:
        """Encodes on the device alone."""
        self._encoder.encode_there(self._push, self._slices)


def measure(device: Device, elements: int, rounds: int, times: int) -> list[dict[str, Any]]:
    """A row for each codec, with and without error feedback; prints each when it is there."""
    stream, rows = device.stream(), []
    values = DeviceVector.allocate(device, elements, stream)
    values.write(np.random.default_rng(0).standard_normal(elements, np.float32), stream)
    wait = partial(device.wait, stream)
    for kind, (arguments, target) in TARGETS.items():
        for feedback in (False, True):
            encoding = Encoding(device, kind(error_feedback=feedback, **arguments), values)
            size = encoding.whole()
            kernels = 4 * elements / median_seconds(encoding.kernels, wait, rounds, times)
            whole = 4 * elements / median_seconds(encoding.whole, wait, rounds, times)
            row = {"codec": kind.__name__, "feedback": feedback, "payload": size, "kernels": kernels, "whole": whole}
            rows.append(row | {"target": None if feedback else target})
            shown = "" if rows[-1]["target"] is None else f", target {target / 1e9:,.0f}: {_verdict(rows[-1])}"
            name = f"{kind.__name__}{' with feedback' if feedback else ''}"
            print(f"{name:28} kernels {kernels / 1e9:8,.1f} GB/s{shown}; whole {whole / 1e9:,.1f} GB/s", flush=True)
    return rows


def _verdict(row: dict[str, Any]) -> str:
    return "yes" if row["kernels"] >= row["target"] else "NO"


def main(arguments: Sequence[str] | None = None, opened: Callable[[str], Device] = open_device) -> int:
    """Measures and prints; the exit status: 1 where a target is missed, 2 without a device. opened: opens it."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu_codecs", description="Encoding on a CUDA device.")
    made.add_argument("--device", default="cuda", help="cuda or cuda:N (default: %(default)s)")
    made.add_argument("--elements", type=int, default=100_000_000, help="values (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=7, help="rounds of each measurement (default: %(default)s)")
    made.add_argument("--times", type=int, default=10, help="pushes in a round (default: %(default)s)")
    made.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON there")
    options = made.parse_args(arguments)
    try:
        device = opened(options.device)
    except PsdistError as error:
        print(f"python -m benchmarks.gpu_codecs: {error}", file=sys.stderr)
        return 2
    rows = measure(device, options.elements, options.rounds, options.times)
    if options.out:
        results = {"device": device.name, "elements": options.elements, "rows": rows}
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(row["target"] is not None and _verdict(row) == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
