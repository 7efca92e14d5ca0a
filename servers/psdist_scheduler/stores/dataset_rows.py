"""Rows of data sets, as stores keep them."""

from __future__ import annotations

import json
from dataclasses import astuple, fields

from psdist.v1 import scheduler_pb2
from psdist.wire import convert
from psdist_scheduler.events.cluster_state import DataLease, DatasetRecord


def dataset_row(record: DatasetRecord) -> tuple[str, bytes, str]:
    """Return a data set's name, its settings as a protobuf message, and its state as JSON."""
    spec = convert.dataset_to_proto(record.spec).SerializeToString()
    names = [field.name for field in fields(record)]
    state = dict(zip(names, astuple(record), strict=True))
    del state["spec"]
    return record.spec.name, spec, json.dumps(state, separators=(",", ":"))


def dataset_of(spec: bytes, text: str) -> DatasetRecord:
    """Return the data set of a row. Raises DecodeError, ValueError, LookupError or TypeError if it is none."""
    state = json.loads(text)
    stretches = {name: tuple((first, second) for first, second in state[name]) for name in ("free", "attempts")}
    leases = tuple(DataLease(*lease) for lease in state["leases"])
    settings = convert.dataset_from_proto(scheduler_pb2.DatasetSpec.FromString(spec))
    return DatasetRecord(settings, **state | stretches | {"leases": leases})
