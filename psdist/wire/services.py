"""gRPC services of a process: one place for parsing and errors of all handlers, and the standard services.

Requests arrive as bytes. gRPC's own parsing has no typed error for invalid messages and prints a traceback for each.
Single requests are parsed here; handlers parse the messages of a stream, since some carry payloads (``frames``).
Answers are messages, or bytes that are sent unchanged. ``status`` encodes errors for the wire, and ``auth`` decides
which calls are accepted.

The standard services are health and reflection. Reflection lets tools such as grpcurl list and call methods without the
proto files. It requires the token, as every method but the health check does. A process that listens beyond loopback
does not offer it, to avoid one more service to defend; tools can use the proto files.

The health service knows four names: ``""`` and the process's own service (it accepts calls), ``LIVE`` (its event loop
answers) and ``READY`` (it does its work). A scheduler that waits for members is live and not ready: restarting it would
not help.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from psdist.errors import ClosedError, InternalError, PsdistError, SharingUnavailableError, TcpUnavailableError
from psdist.wire import auth, frames, status

#: Log of the standard services. Refused calls are not logged: anybody may check the health.
logger = logging.getLogger("psdist.standard_services")
logger.setLevel(logging.WARNING)

#: Names of the health check for orchestrators: restart the process unless live, send it work if ready.
LIVE: Final = "psdist.live"
READY: Final = "psdist.ready"

#: Handler of one method. It takes a message, or an iterator of bytes if the client streams, and a ServicerContext. It
#: is a coroutine function, or an asynchronous generator function if the server streams.
Handler = Callable[[Any, grpc.aio.ServicerContext], Any]

#: Refusals in every healthy run: workers try the faster transports first, even with servers on other hosts.
_ROUTINE: Final = (SharingUnavailableError, TcpUnavailableError)

#: Keys: the client streams, the server streams.
_KINDS: Final = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def service_handler(
    service: ServiceDescriptor,
    handlers: Mapping[str, Handler],
    log: logging.Logger,
    on_caller: Callable[[str], None] = lambda _: None,
    run_id: str = "",
    *,
    reads_certificates: bool = True,
) -> grpc.GenericRpcHandler:
    """Return a gRPC handler for ``service``.

    handlers: one for each of its methods, by name.
    on_caller: called at the start of each accepted call, with gRPC's name of the caller's end of the connection.
    run_id: the run served here.
    reads_certificates: False if the role in the caller's certificate does not matter.

    A PsdistError raised by a handler ends the call with that error's status. gRPC's own InternalError means that the
    caller was gone before an answer could be written. Any other exception is a defect: it is logged, and the caller
    receives an InternalError without its text.
    """
    methods = {
        method.name: _KINDS[method.client_streaming, method.server_streaming](
            _wrap(method, handlers[method.name], log, on_caller, run_id if reads_certificates else None),
            request_deserializer=None,
            response_serializer=_serialize,
        )
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _wrap(
    method: MethodDescriptor,
    handler: Handler,
    log: logging.Logger,
    on_caller: Callable[[str], None],
    run_id: str | None,
) -> Handler:
    """Return a handler as gRPC calls it. run_id: None to leave the caller's certificate alone."""
    full_name = f"/{method.containing_service.full_name}/{method.name}"
    request_class = None if method.client_streaming else message_factory.GetMessageClass(method.input_type)

    def parse(request: Any) -> Any:
        return request if request_class is None else frames.parse(request_class, request)

    def check_certificate(context: grpc.aio.ServicerContext) -> None:
        if run_id is not None:
            auth.apply_certificate(context, full_name, run_id)

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        on_caller(context.peer())
        async with _errors_as_statuses(method.name, context, log):
            check_certificate(context)
            return await handler(parse(request), context)

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        on_caller(context.peer())
        async with _errors_as_statuses(method.name, context, log):
            check_certificate(context)
            async with aclosing(handler(parse(request), context)) as answers:
                async for answer in answers:
                    yield answer

    return stream if inspect.isasyncgenfunction(handler) else call


@asynccontextmanager
async def _errors_as_statuses(name: str, context: grpc.aio.ServicerContext, log: logging.Logger) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        refusal = as_psdist_error(error, name, log)
        is_routine = isinstance(refusal, _ROUTINE) or isinstance(error, grpc.aio.InternalError)
        level = logging.DEBUG if is_routine else logging.INFO
        log.log(level, "%s refused: %s (a call from %s)", name, refusal, context.peer())
        await status.abort(context, refusal)


def as_psdist_error(error: Exception, name: str, log: logging.Logger) -> PsdistError:
    """Return the error to send to a peer after ``name`` raised ``error``. Defects are logged, and their text is not
    sent. gRPC's InternalError is none: it means that the caller is gone."""
    if isinstance(error, PsdistError):
        return error
    if isinstance(error, grpc.aio.InternalError):
        return ClosedError(f"{name}: the caller has ended the call")
    log.error("%s failed", name, exc_info=error)
    return InternalError(f"{name} failed: see the log of the called process")


def _serialize(answer: Any) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


# --- standard services ------------------------------------------------------------------------------------------------


async def add_standard_services(
    server: grpc.aio.Server, service: ServiceDescriptor, *, reflects: bool
) -> health.aio.HealthServicer:
    """Add health and reflection to a ``server`` of ``service`` before it starts. Return the health service, initially
    live, accepting calls, and not ready.

    reflects: offer reflection.
    """
    probe = _Health()
    _add(server, health_pb2.DESCRIPTOR, {"Check": probe.Check, "Watch": probe.Watch, "List": probe.List})
    for name in ("", service.full_name, LIVE):
        await probe.set(name, health_pb2.HealthCheckResponse.SERVING)
    await set_ready(probe, ready=False)
    if reflects:
        names = (service.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        _add(server, reflection_pb2.DESCRIPTOR, {"ServerReflectionInfo": _Reflection(names).answers})
    return probe


def _add(server: grpc.aio.Server, file: Any, handlers: Mapping[str, Handler]) -> None:
    """Add the service of a proto file to ``server``."""
    (service,) = file.services_by_name.values()
    server.add_generic_rpc_handlers((service_handler(service, handlers, logger, reads_certificates=False),))


class _Reflection(reflection.aio.ReflectionServicer):  # type: ignore[misc]  # grpc has no types
    """Reflection whose requests arrive as bytes."""

    async def answers(self, requests: AsyncIterator[bytes], context: object) -> AsyncIterator[Any]:
        """Yield the answers to a stream of requests."""
        parsed = (frames.parse(reflection_pb2.ServerReflectionRequest, one) async for one in requests)
        async for answer in self.ServerReflectionInfo(parsed, context):
            yield answer


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # grpc has no types
    """Health service with all of its methods. grpcio's raises NotImplementedError in ``List``, and logs a traceback."""

    async def List(self, request: health_pb2.HealthListRequest, _: object) -> health_pb2.HealthListResponse:
        """Return the status of every name."""
        statuses = {name: health_pb2.HealthCheckResponse(status=one) for name, one in self._server_status.items()}
        return health_pb2.HealthListResponse(statuses=statuses)


async def set_ready(probe: health.aio.HealthServicer, *, ready: bool) -> None:
    """Publish whether the process is ready."""
    status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
    await probe.set(READY, status)
