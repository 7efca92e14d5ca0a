"""Tells sending from waiting within a push over gRPC.

A server reads no further slices of a worker until earlier ones are updated, for which it needs the other workers'
gradients. If this counted as sending, all workers of a run with one slow link would seem to send slowly. The worker
cannot see it: a full stream looks like a slow link, and the last bytes of a push are in buffers once it is written. So
the server reports its reading (``Reading`` of server.proto). A push is *held up* while the server does not read, and
*sent* once the server has read all of it. A push of a few bytes is sent as soon as it is written.
"""

from __future__ import annotations

from psdist.client.session.wait_tracker import Wait
from psdist.v1 import server_pb2 as pb
from psdist.wire.limits import DELIVERED_BYTES


class SendProgress:
    """Reports the progress of one push to its wait, from the writes and the server's messages."""

    def __init__(self, wait: Wait) -> None:
        self._wait = wait
        self._bytes = 0

    def wrote(self, size: int) -> None:
        """Record a written message."""
        self._bytes += size

    def finish(self) -> None:
        """Record that all messages are written."""
        if self._bytes <= DELIVERED_BYTES:
            self._wait.sent()

    def on_reading(self, reading: int) -> None:
        """Process a report of the server; unknown ones say nothing."""
        match reading:
            case pb.READING_HELD:
                self._wait.held_up()
            case pb.READING_RESUMED:
                self._wait.resumed()
            case pb.READING_COMPLETE:
                self._wait.sent()
