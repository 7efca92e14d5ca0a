"""Speed of encoding on a CUDA device: the case ``codecs`` of ``gpu``.

One tensor of normal values in slices of 4 MiB, as a push of it: bytes of float32 that are encoded each second, with and
without error feedback, medians of some rounds. *kernels* covers everything that runs on the device, from the gradient
to the payloads; *whole* adds their copy to the host, and the host's work. Both use the host's clock, so time in which
the device waits for a slow launch counts, too. The targets are those of kernels without error feedback.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.gpu_updates import median_seconds
from psdist.client.device_encoder import DeviceEncoder, DevicePush
from psdist.compression import ChunkedTopK, Codec, Compressor, Int2, Int4, Int8, OneBit, TopK
from psdist.compression.segments import PushNumber
from psdist.compression.specifications import Region
from psdist.device.coders import SegmentRange
from psdist.device.device import Device
from psdist.device.memory import DeviceVector, DoubleVector

#: Codecs, and the target of their kernels in bytes of float32 per second.
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
    """Encodes one tensor repeatedly. values: float32[n] on the device."""

    def __init__(self, device: Device, codec: Codec, values: DeviceVector) -> None:
        self._region = Region(0, values.size, codec, (values.size,))
        self._encoder = DeviceEncoder(device, [self._region])
        stream = self._encoder.launcher.stream
        feeds_back = self._encoder.coder(self._region).feeds_back
        rest = DoubleVector(device, values.size, stream) if feeds_back else None  # As in a worker, nothing is cleared.
        self._push = DevicePush(values, rest, None, PushNumber(0, 0), np.zeros(1, np.uint32))
        starts = range(0, values.size, _SLICE)
        stops = [min(start + _SLICE, values.size) for start in starts]
        self._slices = [[SegmentRange(0, self._region, *bounds)] for bounds in zip(starts, stops, strict=True)]

    def whole(self) -> int:
        """Encode, and returns the bytes of the payloads."""
        return sum(map(len, self._encoder.encode(self._push, self._slices, [0]).payloads))

    def kernels(self) -> None:
        """Encode on the device alone."""
        self._encoder.encode_on_device(self._push, self._slices)


def encoding_speed(device: Device, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each codec, with and without error feedback."""
    stream = device.stream()
    values = DeviceVector.allocate(device, options.elements, stream)
    values.write(np.random.default_rng(0).standard_normal(options.elements, np.float32), stream)
    wait = partial(device.wait, stream)
    for kind, (arguments, target) in TARGETS.items():
        for feedback in (False, True):
            encoding = Encoding(device, kind(error_feedback=feedback, **arguments), values)
            size = encoding.whole()
            seconds = [
                median_seconds(work, wait, options.rounds, options.times) for work in (encoding.kernels, encoding.whole)
            ]
            kernels, whole = (4 * options.elements / each for each in seconds)
            row = {"what": kind.__name__, "feedback": feedback, "payload": size, "kernels": kernels, "whole": whole}
            yield row | {"target": None if feedback else target}
