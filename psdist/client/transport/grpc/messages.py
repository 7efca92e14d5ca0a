"""Encoding of requests as messages of ServerService, and decoding of the answers.

``encode`` yields the messages of one route, each with its slice. ``on_answer`` processes one message of the server. On
the wire a stream of one message equals a unary request, so all methods are streams here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from psdist.client.core.push_sequence import PushOptions
from psdist.client.core.routing import Route
from psdist.client.transport.buffer_pool import PullTarget
from psdist.client.transport.requests import InstallRequest, PullRequest, PushRequest, Request, write_weights
from psdist.errors import InternalError
from psdist.v1 import common_pb2
from psdist.v1 import server_pb2 as pb
from psdist.wire import convert, frames


def push_header(push: PushRequest, route: Route) -> pb.PushHeader:
    """Return the header of a push to the server of ``route``."""
    header = pb.PushHeader(
        pull_dtype=convert.dtype_to_proto(push.target.dtype) if push.target is not None else None,
        identity=push.sender.identity(route.epoch),
        codec=common_pb2.CODEC_RAW if push.encoded is None or push.encoded.is_raw else common_pb2.CODEC_SEGMENTS,
        dtype=convert.dtype_to_proto(push.codec.dtype),
    )
    number_push(header, push, push.progress.unanswered(route.slices))
    return header


def name_held(message: pb.HeldWeights, target: PullTarget | None, route: Route, slices: Sequence[int]) -> None:
    """List the weights that this worker holds in a request, if servers may send differences to them."""
    if target is not None and target.held is not None:
        message.CopyFrom(target.held.message(slices, route.generation))


def number_push(header: pb.PushHeader, push: PushRequest, slices: Sequence[int]) -> None:
    """Write the header fields that differ between pushes of ``slices``."""
    header.step, header.abstain, header.grad_norm = push.progress.number, push.abstains, push.grad_norm
    header.mark = push.mark
    if push.weight == 1.0:
        header.ClearField("weight")
    else:
        header.weight = push.weight
    _write_options(header, push.progress.options)
    difference = push.encoded.difference(slices) if push.encoded is not None else None
    if difference is None:
        header.ClearField("difference")
    else:
        header.difference.number, header.difference.from_zeros = difference


def _write_options(header: pb.PushHeader, options: PushOptions) -> None:
    if options.written is None:
        header.ClearField("written")
    else:
        header.written = options.written.digest
    if options.lr_factor is None:
        header.ClearField("lr_factor")
    else:
        header.lr_factor = options.lr_factor
    if options.settings is None:
        header.ClearField("settings")
    else:
        header.settings.CopyFrom(pb.GroupSettings(settings=convert.settings_to_proto(options.settings)))
    if options.absent:
        starts, sizes = zip(*((start, stop - start) for start, stop in options.absent), strict=True)
        header.absent.CopyFrom(pb.ElementRanges(starts=starts, sizes=sizes))
    else:
        header.ClearField("absent")
    header.follows_writes, header.attempt, header.withdraws = options.follows_writes, options.attempt, options.withdraws


def method_of(request: Request) -> str:
    """Return the method of ServerService for ``request``."""
    match request:
        case PushRequest():
            return "Push" if request.target is None else "PushPull"
        case PullRequest():
            return "Pull"
        case InstallRequest():
            return "Install"
    raise InternalError(f"no method carries {type(request).__name__}")


def encode(request: Request, route: Route) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Yield the messages for the unanswered slices of ``route``: each message's slice, and a function that builds the
    message once the slice is ready."""
    match request:
        case PushRequest():
            yield from _encode_push(request, route)
        case PullRequest():
            message = pb.PullRequest(
                identity=request.sender.identity(route.epoch),
                dtype=convert.dtype_to_proto(request.target.dtype),
                min_version=request.progress.number,
                slices=request.progress.unanswered(route.slices),
            )
            name_held(message.held, request.target, route, message.slices)
            yield 0, message.SerializeToString
        case InstallRequest():
            # A server with only some of the slices does not answer, so all of them are resent after a failure.
            identity: pb.Identity | None = request.sender.identity(route.epoch)
            for index in route.slices:
                install = pb.InstallRequest(identity=identity, slice=index)
                yield index, partial(_pack, install, request, index)
                identity = None


def _encode_push(push: PushRequest, route: Route) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Yield one message per slice. The first contains the header."""
    message_type = pb.PushRequest if push.target is None else pb.PushPullRequest
    first = push_header(push, route)
    first.reports_reading = True
    name_held(first.held, push.target, route, push.progress.unanswered(route.slices))
    header: pb.PushHeader | None = first
    written = push.progress.options.written
    for index in push.progress.unanswered(route.slices):
        message = message_type(header=header, slice=index, base_version=push.versions[index])
        if written is not None and (ranges := written.in_slice(push.slicing, index)) is not None:
            message.written.CopyFrom(pb.Written(**ranges._asdict()))
        yield index, partial(_pack, message, push, index)
        header = None


def _pack(message: Any, request: PushRequest | InstallRequest, index: int) -> bytes:
    return frames.pack(message, request.payload(index))


class StreamNews(NamedTuple):
    """News in a message that answers no slice; without any the message is an answer.

    waiting_for: reason of a wait.
    reading: the server's reading of the push, a ``Reading``.
    """

    waiting_for: str = ""
    reading: int = 0


def on_answer(request: Request, route: Route, data: bytes) -> StreamNews:
    """Process one message of the route's server. Return its news if it answers no slice."""
    match request:
        case PushRequest(target=None):
            ack = pb.PushResponse.FromString(data)
            if not (ack.waiting_for or ack.reading):
                request.progress.answer(ack.slice, ack.version, ack.staleness, ack.ignored)
            return StreamNews(ack.waiting_for, ack.reading)
        case PushRequest():
            pushed = frames.unpack(pb.PushPullResponse, data)
            answer = pushed.header
            if not (answer.waiting_for or answer.reading):
                write_weights(request, _result(answer), pushed.payload, route.peer)
                request.progress.answer(answer.slice, answer.version, answer.staleness, answer.ignored)
            return StreamNews(answer.waiting_for, answer.reading)
        case PullRequest():
            pulled = frames.unpack(pb.PullResponse, data)
            if not pulled.header.waiting_for:
                write_weights(request, _result(pulled.header), pulled.payload, route.peer)
                request.progress.answer(pulled.header.slice, pulled.header.version)
            return StreamNews(pulled.header.waiting_for)
        case InstallRequest():
            installed = pb.InstallResponse.FromString(data)
            if installed.slices != len(route.slices):
                raise InternalError(
                    f"{route.peer} installed {installed.slices} of {len(route.slices)} slices of initial values"
                )
            request.on_installed(route.server, route.slices)
    return StreamNews()


def _result(answer: pb.PushPullResponse | pb.PullResponse) -> pb.SliceResult:
    """Return the fields of an answer that describe its weights."""
    differences = answer.differences if answer.HasField("differences") else None
    return pb.SliceResult(slice=answer.slice, version=answer.version, differences=differences)
