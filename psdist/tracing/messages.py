"""Conversion of spans to the messages of scheduler.proto and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.tracing.spans import Span, SpanKind
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire.limits import TEXT_CHARACTERS_MAX, TRACE_SPANS_PER_MESSAGE

_KINDS = {int(kind): kind for kind in SpanKind}
#: The lists of a message with an entry for each span.
_COLUMNS = ("kinds", "starts", "durations", "steps", "slices", "parameters", "peers")


def spans_to_proto(spans: Sequence[Span]) -> pb.TraceSpans:
    """Return spans as a message, in whole nanoseconds."""
    origin = _nanoseconds(min((span.start for span in spans), default=0.0))
    named = chain.from_iterable((span.parameters, span.peer) for span in spans)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(chain([""], named)))}
    starts = [_nanoseconds(span.start) for span in spans]
    return pb.TraceSpans(
        origin_ns=origin,
        kinds=[int(span.kind) for span in spans],  # type: ignore[misc]  # enums of protobuf are numbers to mypy
        starts=[start - origin for start in starts],
        durations=[max(0, _nanoseconds(span.end) - start) for span, start in zip(spans, starts, strict=True)],
        steps=[span.step for span in spans],
        slices=[span.slice_index + 1 for span in spans],
        parameters=[numbers[span.parameters] for span in spans],
        peers=[numbers[span.peer] for span in spans],
        names=list(numbers),
    )


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def check_spans(message: pb.TraceSpans) -> pb.TraceSpans:
    """Return a peer's message if its spans can be read.

    Raises InvalidArgumentError for lists of different lengths, unknown kinds and unknown names, LimitExceededError for
    too many spans or too long names.
    """
    counts = {len(getattr(message, column)) for column in _COLUMNS}
    if len(counts) > 1:
        raise InvalidArgumentError(f"spans in lists of different lengths, {sorted(counts)}: give one entry a span")
    if (count := max(counts)) > TRACE_SPANS_PER_MESSAGE:
        raise LimitExceededError(f"{count} spans in one message are over the limit of {TRACE_SPANS_PER_MESSAGE}")
    if len(message.names) > 2 * count + 1 or any(len(name) > TEXT_CHARACTERS_MAX for name in message.names):
        raise LimitExceededError(f"{count} spans with {len(message.names)} names, or a name that is too long")
    if unknown := set(message.kinds) - _KINDS.keys():
        raise InvalidArgumentError(f"spans of kind {min(unknown)} are unknown: use those of SpanKind")
    if count and max(max(message.parameters), max(message.peers)) >= len(message.names):
        raise InvalidArgumentError(f"a span refers to a name beyond the {len(message.names)} that the message has")
    return message


def spans_from_proto(message: pb.TraceSpans) -> list[tuple[SpanKind, int, int, str, int, int, str]]:
    """Return the spans of a checked message: kind, start and end in nanoseconds of the member's clock, and the fields
    of ``Span`` that follow them."""
    origin, names = message.origin_ns, message.names
    return [
        (_KINDS[kind], origin + start, origin + start + duration, names[parameters], step, index - 1, names[peer])
        for kind, start, duration, step, index, parameters, peer in zip(
            *(getattr(message, column) for column in _COLUMNS), strict=True
        )
    ]
