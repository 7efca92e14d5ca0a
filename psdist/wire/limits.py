"""Limits on everything that a peer can make a process hold, the version of the protocol, and pauses.

The limits are in one place so that both sides agree and errors can name them. The ranges of single values (names,
slices, hyperparameters) are with their types in ``psdist.types`` and ``psdist.optim``, which this package builds on.

The pauses are those between attempts, and before answers to strangers: callers without the run's token. Randomness and
time are arguments. The callers decide what to retry (``delivery``, ``scheduler_connection``) and which calls to pace
(``auth``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

#: Raise it if an older peer could misread a message.
PROTOCOL_VERSION: Final = 6
#: Oldest version that this release speaks: the one before PROTOCOL_VERSION, except for version 5, whose stores and
#: messages it cannot read. The newest version that both sides speak counts.
OLDEST_PROTOCOL: Final = 6

#: Largest message on the data path: a slice of 4 MiB and its header, with room for float64 slices in the future.
DATA_MESSAGE_BYTES: Final = 12 << 20
#: Largest message to or from the scheduler. Fits a layout of TENSORS_MAX tensors with names of up to 200 characters.
CONTROL_MESSAGE_BYTES: Final = 64 << 20
#: Metadata of a call, which includes the token.
METADATA_BYTES: Final = 16 << 10
#: Largest message on a shared-memory connection. It carries no payloads, only a list of slices.
SHARED_MESSAGE_BYTES: Final = 4 << 20
#: Close a connection whose peer leaves a ping unanswered for this long, if the run's lease is unknown: before a process
#: has registered, and on the data servers' side. Members use ``--failure-timeout``. Closing a connection expels nobody.
KEEPALIVE_SECONDS: Final = 2.0
#: Shortest interval between pings: gRPC closes the connection of a peer that pings more often.
KEEPALIVE_MIN_SECONDS: Final = 1.0
#: Largest HTTP/2 frame size to request. It fits the window.
FRAME_BYTES: Final = 1 << 20

#: Members of a run in the cluster map, which every member stores.
MEMBERS_MAX: Final = 4096
CONCURRENT_CALLS_MAX: Final = 4096
#: gRPC counts broken connections until it notices, for up to twice KEEPALIVE_SECONDS. Members of a large run may all
#: reconnect at the same time, so each may have an old connection beside its new one. As many again may belong to
#: strangers who hold connections open without a token; each costs about 10 KiB. The limit is lower if the process may
#: not open that many files.
CONNECTIONS_MAX: Final = 4 * MEMBERS_MAX
#: Open files reserved for everything but incoming connections: the store, snapshots, outgoing connections.
FILES_RESERVED: Final = 512
#: Time for a new connection to send HTTP/2's greeting.
GREETING_SECONDS: Final = 5.0
#: Close connections without a call after this time. Members keep a stream open, or reconnect for the next call.
IDLE_CONNECTION_SECONDS: Final = 60.0
#: Calls without the token: refusals sent per second, refusals in a burst, and calls waiting for their refusal. Each
#: waiting call may hold a transport window.
REFUSALS_PER_SECOND: Final = 50
REFUSALS_BURST: Final = 20
REFUSALS_HELD_MAX: Final = 256
#: Connections of one address without a call with the token. One more closes the oldest. Idle connections cost little,
#: and opening another one costs more, so the limit is no lower than it must be to leave room for members.
STRANGERS_PER_ADDRESS_MAX: Final = 1024
#: Health checks without the token: answers per second, and waiting checks.
PROBES_PER_SECOND: Final = 100
PROBES_HELD_MAX: Final = 64
#: Shortest interval between log lines about strangers.
STRANGERS_LOG_SECONDS: Final = 60.0
#: Flow-control windows of one stream: how far the transport may read ahead of the program. The server's window costs
#: memory for each worker; a client has few streams. Larger windows make transfers cheaper: with 1 MiB at the server and
#: frames of 1 MiB instead of 16 KiB, a step of 25 M parameters took 9 % less CPU time than with 256 KiB on both sides.
#: The bound on a server's memory has room for 512 KiB.
SERVER_WINDOW_BYTES: Final = 512 << 10
CLIENT_WINDOW_BYTES: Final = 4 << 20
#: Unapplied slices of one stream that a server holds; the rest stays in the network.
HELD_SLICES_MAX: Final = 2
#: A server that holds so many for longer tells a worker over gRPC: less is not worth a message.
HELD_REPORT_SECONDS: Final = 0.001
#: Bytes of a push that count as delivered once they are sent: they take 5 ms at 100 Mbit/s, and small steps need no
#: timer and no message.
DELIVERED_BYTES: Final = 64 << 10
#: Average number of unanswered calls on one connection that may name the same slice.
SHARED_ROUNDS_MAX: Final = 4
#: Unfinished calls of one shared-memory or TCP connection. Each bucket of a step is a call.
STREAM_CALLS_MAX: Final = 4096
#: Payloads of one push that a worker may send over TCP before the server releases the first. It bounds the payloads in
#: flight and at the server.
TCP_WINDOW_SLICES: Final = 3
#: Weight differences (``pull_compression``) in one answer, and kept by servers for each slice.
DIFFERENCES_MAX: Final = 64
#: TCP connections promised by one server and not yet made.
NONCES_MAX: Final = MEMBERS_MAX
#: Time for a promised connection to arrive and show its nonce.
NONCE_SECONDS: Final = 5.0
#: TCP connections to one server that have not shown a nonce yet. One more closes the oldest.
UNIDENTIFIED_MAX: Final = 256
#: TCP connections of one address that end unidentified: per second over a longer time, and in a burst. Further ones are
#: closed before a TLS handshake, until the address has made fewer or identified one. Addresses that are counted.
UNIDENTIFIED_PER_SECOND: Final = 20
UNIDENTIFIED_BURST: Final = 256
UNIDENTIFIED_ADDRESSES_MAX: Final = 1024
#: Time for a peer to read why its TLS handshake was refused. Its connection no longer counts as one of those.
ALERT_SECONDS: Final = 1.0
#: Header of a connection's first frame, sent before any authentication.
OPENING_BYTES: Final = 64
#: Hyperparameters that a push sets for its update: more than the most groups of any optimizer have together.
GROUP_SETTINGS_MAX: Final = 4096
#: Size of the digest of the weights that a script wrote (xxh3).
WRITTEN_DIGEST_BYTES: Final = 16
#: Close a connection if a partial frame stops growing, or the peer stops reading, for this long.
STALL_SECONDS: Final = 60.0

#: Member ids that a scheduler remembers, so that no incarnation is issued twice.
KNOWN_IDS_MAX: Final = 4 * MEMBERS_MAX
#: Concurrent waiting calls of one member at the scheduler.
WAITS_PER_MEMBER_MAX: Final = 64
#: Unread messages of one call. Leaves room for news of every member's loss.
UNREAD_MAX: Final = 8192
#: Unreachable servers that one worker reports at a time, characters of each reason, and longest duration.
UNREACHABLE_REPORTED_MAX: Final = 64
UNREACHABLE_CHARACTERS_MAX: Final = 300
UNREACHABLE_SECONDS_MAX: Final = 1e6
#: Barriers of one worker whose counts are remembered; the oldest are dropped first.
BARRIER_NAMES_MAX: Final = 64
#: Characters of an error's message and of each detail: gRPC limits trailing metadata.
ERROR_CHARACTERS_MAX: Final = 1000
DETAIL_CHARACTERS_MAX: Final = 200
#: Characters of a text reported by a member, such as its host or a reason.
TEXT_CHARACTERS_MAX: Final = 1024
#: Ranks of a run: each contribution to a slice is stored until the step is complete.
WORLD_MAX: Final = 4096
#: Lost workers per parameter set whose pushes servers remember, so that they can resume them.
DEPARTED_MAX: Final = 256
#: Barrier passes that a worker may report: a store holds numbers of up to 64 bits.
BARRIERS_PASSED_MAX: Final = 1 << 62
#: Copies of each shard that a run can request.
REPLICAS_MAX: Final = 2

PARAMETERS_MAX: Final = 1024
#: Pushes that a worker remembers to infer its script's iterations. An inferred iteration has at most half as many.
ORDER_PUSHES_MAX: Final = 4096
#: Pushes of one iteration of a script, over all of its parameter sets.
PERIOD_MAX: Final = 1 << 20
#: Tensors of one layout. The scheduler stores the name of each.
TENSORS_MAX: Final = 1 << 18
DIMENSIONS_MAX: Final = 32
#: Elements of the flat vector of a parameter set (4 TiB of float32).
ELEMENTS_MAX: Final = 1 << 40
#: Slices of a parameter set: the largest vector at the largest slice size.
SLICES_MAX: Final = 1 << 22
#: Parameter sets named in one message.
NAMES_MAX: Final = 4096
#: Gradient bytes of one parameter set that a primary stores until its replicas acknowledge them.
KEPT_BYTES_MAX: Final = 32 << 20
DATASETS_MAX: Final = 64
#: Lease reports that a scheduler remembers. Older reports count as part of every snapshot.
REPORTS_MAX: Final = 1 << 16
#: Ranges of one data set leased to one worker at a time.
LEASES_MAX: Final = 64
#: Samples that a DynamicBatcher holds, and elements of one batch, after padding.
BATCH_SAMPLES_MAX: Final = 1 << 20
BATCH_TOKENS_MAX: Final = 1 << 31
#: Spans in a data set's position, which every snapshot stores.
SPANS_MAX: Final = 1 << 16

#: Bytes of one worker's state in snapshots for one parameter set.
STATE_BYTES_MAX: Final = 1 << 32
#: Bytes of a commit record and of a manifest. Readers must not trust the storage to be small.
COMMIT_BYTES_MAX: Final = 1 << 20
MANIFEST_BYTES_MAX: Final = 1 << 30
#: Characters of a text in a manifest or commit record, such as the reason.
SNAPSHOT_TEXT_MAX: Final = 4096

#: A run's name, also used in file names. It must not start with a dot.
RUN_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: Characters of a token, which is sent in the metadata of each call.
TOKEN_CHARACTERS_MAX: Final = 4096
#: Longest lifetime of a role's token that has an expiry.
TOKEN_LIFETIME_DAYS_MAX: Final = 3650
#: Bytes read from the file with a scheduler's address.
ADDRESS_FILE_BYTES_MAX: Final = 512
#: Largest configuration file that is read: the template has some 10 kB.
CONFIG_FILE_BYTES_MAX: Final = 1 << 20
#: Bytes read from a launcher's record of its run.
RUN_RECORD_BYTES_MAX: Final = 16 << 10
#: Bytes of an unfinished output line of a child process; longer lines are shown in pieces.
OUTPUT_LINE_BYTES_MAX: Final = 64 << 10
#: Bytes read from a launcher's report on the end of its run.
RUN_REPORT_BYTES_MAX: Final = 32 << 20
#: Bytes of one value that passes between ``psdist.launch`` and a function that it runs.
LAUNCH_VALUE_BYTES_MAX: Final = 1 << 32

#: Metric names that one worker may report, and the characters of each.
METRIC_NAMES_MAX: Final = 24
METRIC_NAME_CHARACTERS_MAX: Final = 64
#: Bytes of a line with which a worker reports metrics to its launcher. Linux writes this many bytes to a pipe
#: atomically.
METRIC_LINE_BYTES_MAX: Final = 4096

#: Events of a run's history that the scheduler keeps, and those in one message.
EVENTS_MAX: Final = 10_000

#: Largest value that the scheduler's store writes to one key of etcd, whose requests are limited to 1.5 MiB by default.
ETCD_VALUE_BYTES: Final = 512 << 10
#: Keys that one answer of etcd may have, and the largest answer: 100 such values.
ETCD_PAGE_KEYS: Final = 100
ETCD_ANSWER_BYTES: Final = 56 << 20
#: Operations in one transaction of etcd: fewer than its default limit of 128.
ETCD_OPERATIONS_MAX: Final = 100
EVENTS_PER_MESSAGE: Final = 256
#: Largest stored summary of a run that is read, in bytes.
SUMMARY_BYTES_MAX: Final = 16 << 20

#: Steps of one recording (psdist trace), its longest duration, and the bytes of all its spans, which the scheduler may
#: hold for a command that does not read them.
TRACE_STEPS_MAX: Final = 10_000
TRACE_SECONDS_MAX: Final = 600.0
TRACE_BYTES_MAX: Final = 64 << 20
#: Spans that a member records ahead of sending them, spans in one message, and characters of a clock's name.
TRACE_SPANS_MAX: Final = 1 << 16
TRACE_SPANS_PER_MESSAGE: Final = 4096
CLOCK_CHARACTERS_MAX: Final = 128
#: Stacks of one process (psdist stacks), as text, the innermost frames of one stack, and commands that read them.
STACKS_BYTES_MAX: Final = 64 << 10
STACK_FRAMES_MAX: Final = 60
STACKS_REQUESTS_MAX: Final = 8

#: Connections to a process's metrics port that are open at the same time, and seconds that each may take to read the
#: answer. It may be open for twice as long.
SCRAPES_MAX: Final = 4
SCRAPE_SECONDS: Final = 5.0

#: Connections to the dashboard that are open at the same time, and those that follow the run. A connection may make no
#: progress for so many seconds: neither a request, nor that its browser reads. Bytes of a request's headers.
DASHBOARD_CONNECTIONS_MAX: Final = 64
DASHBOARD_READERS_MAX: Final = 24
DASHBOARD_STALL_SECONDS: Final = 15.0
DASHBOARD_REQUEST_BYTES_MAX: Final = 16 << 10

#: Header of a link's first frame from another worker, which carries the token.
PEER_OPENING_BYTES: Final = 4 * TOKEN_CHARACTERS_MAX + (4 << 10)
#: Bytes that a collective sends to a peer together with the call. They may wait there until the peer makes the call.
EAGER_BYTES: Final = 32 << 10
#: The same for contributions to a reduction. Two ranks send each other whole arrays up to this size.
EAGER_REDUCED_BYTES: Final = 512 << 10
#: Bytes of one part of a larger array.
PART_BYTES: Final = 1 << 20
#: Parts in the memory that a worker shares with another one of its host.
SHARED_PARTS: Final = 4
#: Bytes of one piece of a call through memory that the ranks of a host map: of a group of up to four ranks, and of a
#: larger one. Each rank has four pieces. More bytes would leave the caches, and fewer cost more steps.
PIECE_BYTES: Final = 1 << 20
LARGE_GROUP_PIECE_BYTES: Final = 2 << 20
#: Bytes of one piece of a call that reads a registered buffer in place.
IN_PLACE_PIECE_BYTES: Final = 512 << 10
#: Smallest data of such a call for one rank.
HOST_MEMORY_BYTES_MIN: Final = 4 << 10
#: Smallest array that is reduced along a chain of hosts.
CHAIN_BYTES_MIN: Final = 256 << 10
#: Groups of one worker with such memory, and ranks of one of them.
HOST_GROUPS_MAX: Final = 16
HOST_RANKS_MAX: Final = 64
#: Registered buffers of a group, the smallest one, and the largest one: what a process can address.
BUFFERS_MAX: Final = 64
BUFFER_BYTES_MIN: Final = 64 << 10
BUFFER_BYTES_MAX: Final = 1 << 47
#: Calls of collectives that peers may make before this worker has made them, over all groups that are not open here.
EARLY_CALLS_MAX: Final = 2048
#: Bytes of the data that came with such calls.
EARLY_BYTES_MAX: Final = 64 << 20
#: Handle of a worker in a process group that torchft configures, in characters.
HANDLE_CHARACTERS_MAX: Final = 512
#: Messages of one group, of different tags and directions, that its ranks announce to one of them before it announces
#: them; and the fewest that each rank may announce. Data travels with no more than these.
EARLY_MESSAGES_MAX: Final = 512
EARLY_MESSAGES_MIN: Final = 64
#: Groups that have ended, whose errors a worker keeps for members that have not heard of them.
ENDED_GROUPS_MAX: Final = 256
#: Open groups of one worker, and names of its groups.
GROUPS_MAX: Final = 4096
#: Of a waiting call of a group, the workers that are reported, the characters that name it, and the group's key.
AWAITED_REPORTED_MAX: Final = 16
GROUP_CALL_CHARACTERS_MAX: Final = 200
GROUP_KEY_BYTES_MAX: Final = 64
#: Names of groups that a run reconfigures.
GROUP_NAMES_MAX: Final = 1024

#: Workers of a collective of torch.distributed: each has a place in one slice. Bytes that each gives to it.
COLLECTIVE_WORKERS_MAX: Final = 512
COLLECTIVE_BYTES_MAX: Final = 1 << 30
#: Bytes of a value that a framework broadcasts, such as a path.
VALUE_BYTES_MAX: Final = 1 << 20

#: A longer wait must name the peer and the reason.
REPORT_WAIT_SECONDS: Final = 10.0
#: Time after which a server sends the reason of a wait, so that the worker can include it in its own report.
WAIT_REASON_SECONDS: Final = 5.0
#: Limit on a worker's seconds, and its samples a second: sums of all workers stay finite, which their JSON forms need.
WORKER_TOTAL_MAX: Final = 1e15


# --- pauses and rates -------------------------------------------------------------------------------------------------


FIRST_SECONDS: Final = 0.05
LONGEST_SECONDS: Final = 1.0
#: Longest pause of a member that looks for the scheduler at several addresses: until it has a session it gets no map.
_SEARCHING_SECONDS: Final = 0.15


class Random(Protocol):
    """Subset of ``random.Random`` that ``Backoff`` needs."""

    def random(self) -> float:
        """Return a number in [0, 1)."""


class Backoff:
    """Exponential backoff: pauses double from 50 ms to ``longest`` seconds. Each is shortened by a random factor of up
    to one half, so that clients do not retry in lockstep."""

    def __init__(self, rng: Random, longest: float = LONGEST_SECONDS) -> None:
        self._rng = rng
        self._longest = longest
        self._ceiling = min(FIRST_SECONDS, longest)

    @classmethod
    def for_session(cls, rng: Random, heartbeat_seconds: float, *, has_standby: bool = False) -> Backoff:
        """Return the backoff of a member whose session broke. It allows several attempts within the lease.

        has_standby: True if each attempt goes to another one of several addresses.
        """
        return cls(rng, min(_SEARCHING_SECONDS if has_standby else LONGEST_SECONDS, heartbeat_seconds))

    def next_seconds(self) -> float:
        """Return the next pause, in seconds."""
        pause = self._ceiling * (1.0 - 0.5 * self._rng.random())
        self._ceiling = min(self._ceiling * 2, self._longest)
        return pause

    def reset(self) -> None:
        """Restart with a short pause, after a success."""
        self._ceiling = min(FIRST_SECONDS, self._longest)


@dataclass(slots=True)
class Pacer:
    """Queue that releases ``per_second`` events.

    burst: number of events that pass without waiting after a quiet period.
    held_max: largest number of waiting events.
    """

    per_second: float
    burst: int
    held_max: int
    #: Release time of the last event if bursts were not allowed.
    _last: float = float("-inf")

    def wait_seconds(self, now: float) -> float | None:
        """Return the time until an event at ``now`` may pass, or None if too many already wait. A rejected event is not
        queued."""
        gap = 1.0 / self.per_second
        turn = max(self._last, now - self.burst * gap) + gap
        wait = max(0.0, turn - now)
        if wait > self.held_max * gap:
            return None
        self._last = turn
        return wait


class FailureLimit:
    """Addresses with too many failures: a burst, which decays at a fixed rate. One success forgives all of them.

    per_second, burst: of each address.
    addresses_max: number of addresses that are remembered; one more forgets the one that failed first.
    """

    def __init__(self, per_second: float, burst: int, addresses_max: int) -> None:
        self._per_second, self._burst, self._addresses_max = per_second, burst, addresses_max
        #: Failures of each address that have not decayed, and the time of that count.
        self._failed: dict[str, tuple[float, float]] = {}

    def is_exceeded(self, address: str, now: float) -> bool:
        """True if connections of this address are to be refused now."""
        return self._count(address, now) >= self._burst

    def fail(self, address: str, now: float) -> None:
        """Count a failure."""
        self._failed[address] = self._count(address, now) + 1, now
        if len(self._failed) > self._addresses_max:
            del self._failed[next(iter(self._failed))]

    def succeed(self, address: str) -> None:
        """Forgive an address, which has a member."""
        self._failed.pop(address, None)

    def _count(self, address: str, now: float) -> float:
        count, since = self._failed.get(address, (0.0, now))
        return max(0.0, count - self._per_second * (now - since))


@dataclass(slots=True)
class LogPacer:
    """Rate limit for log lines that strangers can trigger: counts events and releases one line per ``seconds``."""

    seconds: float
    _count: int = 0
    _logged: float = float("-inf")

    def note(self, now: float) -> int:
        """Count an event. Return the number of events since the last line if a line is due, otherwise 0."""
        self._count += 1
        if now - self._logged < self.seconds:
            return 0
        count, self._count, self._logged = self._count, 0, now
        return count
