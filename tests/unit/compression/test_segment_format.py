"""Examples of ``docs/internals/payload-format.md``: golden bytes of each kind of segment."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from psdist.compression import (
    BFloat16,
    Chain,
    ChunkedTopK,
    Codec,
    Float16,
    Float32,
    Int2,
    Int4,
    Int8,
    OneBit,
    PerTensor,
    RandomK,
    TopK,
)
from psdist.compression.segments import (
    PushNumber,
    Region,
    accumulate,
    check,
    encode,
    payload_limit,
    prepare,
    regions,
)
from psdist.compression.segments.encoding import PreparedLowRank
from psdist.compression.segments.format import Kind
from psdist.types import TensorSpec
from tests.support import segment_reference as reference

PAGE = Path(__file__).resolve().parents[3] / "docs/internals/payload-format.md"
EXAMPLES = {
    name: (bytes.fromhex(data), np.array(values.split(), np.float32))
    for name, data, values in re.findall(r"```golden\n(.*)\n((?:[0-9a-f ]+\n)+)= (.*)\n```", PAGE.read_text("utf-8"))
}
CODECS: dict[str, Codec] = {
    "RAW32": Float32(),
    "RAW16": Float16(),
    "BRAIN16": BFloat16(),
    "INTEGER 8": Int8(16),
    "INTEGER 4": Int4(16),
    "INTEGER 2": Int2(16),
    "SPARSE 32": TopK(0.25),
    "SPARSE 16": ChunkedTopK(4, 16, bits=16),
    "SPARSE 8": ChunkedTopK(4, 16, bits=8),
    "SPARSE 2": ChunkedTopK(4, 16, bits=2),
    "ONE_BIT": OneBit(16),
    "RANDOM 32": RandomK(0.25, seed=1),
    "RANDOM 16": Chain(RandomK(0.25, seed=1), BFloat16()),
}


def test_each_kind_has_an_example() -> None:
    assert {name.split()[0] for name in EXAMPLES} == {kind.name for kind in Kind}
    assert EXAMPLES.keys() == CODECS.keys() | {"LOW_RANK"}


def test_examples_are_decoded() -> None:
    for name in EXAMPLES:
        payload, values = EXAMPLES[name]
        check(payload, values.size)
        out = np.zeros(values.size, np.float32)
        accumulate(payload, out)
        assert out.tobytes() == values.tobytes() == reference.decode(payload, values.size).tobytes()
        accumulate(payload, out)
        assert out.tobytes() == (2 * values).tobytes()


def test_examples_are_encoded() -> None:
    for name in CODECS:
        values = ((np.arange(64) * 7 % 16 - 8) / 4).astype(np.float32)
        (region,) = regions([TensorSpec("w", (8, 8))], PerTensor({"*": CODECS[name]}, min_elements=64))
        out = np.full(payload_limit(8), 0xFF, np.uint8)
        size = encode([prepare(region, values, PushNumber(1, 2))], 4, 12, out)
        assert out[:size].tobytes() == EXAMPLES[name][0]


def test_low_rank_is_encoded() -> None:
    p, q = np.array([[1, 0], [0, 2]], np.float32), np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    matrix = np.zeros(600, np.float32)
    rows = np.concatenate([p, np.zeros((198, 2), np.float32)])
    prepared = PreparedLowRank(Region(0, 600, Float32(), (200, 3)), matrix, rows, q)
    out = np.zeros(4096, np.uint8)
    prepared.write(1, 31, out, np.empty(0, np.float32))
    payload = EXAMPLES["LOW_RANK"][0]
    assert out[16:36].tobytes() == payload[16:36]  # the first column, and P
    assert prepared.next_state is q
