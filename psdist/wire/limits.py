"""Limits on everything that a peer can make a process hold, and the version of the protocol.

They are in one place, so that both sides have the same ones, and an error can name them. The ranges of single values
(names, slices, hyperparameters) are with their types in ``psdist.types`` and ``psdist.optim``, on which all this
stands.
"""

from __future__ import annotations

import re
from typing import Final

#: Registration refuses another number. It is raised when an older peer could misread a message.
PROTOCOL_VERSION: Final = 4

#: Largest message on the data path: a slice of 4 MiB and its header, with room for slices in float64 one day.
DATA_MESSAGE_BYTES: Final = 12 << 20
#: Largest message to or from the scheduler: a layout of TENSORS_MAX tensors with names of up to 200 characters fits.
CONTROL_MESSAGE_BYTES: Final = 64 << 20
#: Metadata of a call, which holds the token.
METADATA_BYTES: Final = 16 << 10
#: Largest message on the socket of an attachment, which carries no payloads: it is a list of slices.
SHARED_MESSAGE_BYTES: Final = 4 << 20
#: Who does not answer for so long, though its peer asks, is hung up on, where the run's lease is not known: before a
#: process has registered, and at the data servers' side. Members use ``--failure-timeout``. To hang up expels nobody.
KEEPALIVE_SECONDS: Final = 2.0
#: Pings come at most so often: gRPC hangs up on a peer that sends more.
KEEPALIVE_MIN_SECONDS: Final = 1.0
#: Largest HTTP/2 frame that is asked for. It fits the window.
FRAME_BYTES: Final = 1 << 20

#: Members of a run in the cluster map, which every member holds.
MEMBERS_MAX: Final = 4096
CONCURRENT_CALLS_MAX: Final = 4096
#: gRPC counts connections that broke until it notices, for up to twice KEEPALIVE_SECONDS, and members of a large run
#: come back all at once: each may have an old one beside its new one. As many again may belong to strangers who hold
#: connections open without a token; each costs about 10 KiB. Fewer if the process may not open as many files.
CONNECTIONS_MAX: Final = 4 * MEMBERS_MAX
#: Open files that connections leave for everything else: the store, snapshots, connections that the process makes.
FILES_RESERVED: Final = 512
#: A connection must begin with HTTP/2's greeting within this time.
GREETING_SECONDS: Final = 5.0
#: A connection without a call is closed after this time. Members keep a stream open, or connect again for the next
#: call.
IDLE_CONNECTION_SECONDS: Final = 60.0
#: Calls without the token: refusals that are sent per second after the first few, and calls that wait for theirs. Each
#: may hold a window of the transport.
REFUSALS_PER_SECOND: Final = 50
REFUSALS_BURST: Final = 20
REFUSALS_HELD_MAX: Final = 256
#: Health checks without the token: answers per second, and checks that wait for theirs.
PROBES_PER_SECOND: Final = 100
PROBES_HELD_MAX: Final = 64
#: What strangers do is logged at most once in this time.
STRANGERS_LOG_SECONDS: Final = 60.0
#: Flow-control windows of one stream: what the transport may read ahead of the program. A server's counts for each
#: worker in its memory; a client has few streams. Larger ones make transfers cheaper: with 1 MiB at the server, and
#: frames of 1 MiB in place of 16 KiB, a step of 25 M parameters took 9 % less CPU time than with 256 KiB on both sides.
#: 512 KiB is what the bound on a server's memory has room for.
SERVER_WINDOW_BYTES: Final = 512 << 10
CLIENT_WINDOW_BYTES: Final = 4 << 20
#: Slices of one stream that a server holds and has not applied; more are left in the network.
HELD_SLICES_MAX: Final = 2
#: Unanswered calls of one connection may name each slice of the parameter set so many times on average.
SHARED_ROUNDS_MAX: Final = 4
#: Calls of one attachment or direct connection that are not over. Each bucket of a step is a call.
STREAM_CALLS_MAX: Final = 4096
#: Payloads of one push over a direct connection that a worker may send before the server lets go of the first of them.
#: As many are on their way or held by the server.
DIRECT_WINDOW_SLICES: Final = 3
#: Differences of weights that one answer may have (``pull_compression``), and that servers keep of a slice.
DIFFERENCES_MAX: Final = 64
#: Direct connections to one server that were promised, and did not come yet.
NONCES_MAX: Final = MEMBERS_MAX
#: A promised connection must come, and show its nonce, within so long.
NONCE_SECONDS: Final = 5.0
#: Direct connections to one server that have not shown a nonce yet. One more cuts off the oldest.
UNIDENTIFIED_MAX: Final = 256
#: Header of a connection's first frame, which nobody has authenticated.
OPENING_BYTES: Final = 64
#: A frame that has come in part must grow, and a peer must read what it asked for, at least once in so long.
STALL_SECONDS: Final = 60.0

#: Member ids that a scheduler remembers, so that their incarnations are never given twice.
KNOWN_IDS_MAX: Final = 4 * MEMBERS_MAX
#: Calls of one member that may wait at the scheduler at a time.
WAITS_PER_MEMBER_MAX: Final = 64
#: Messages of one call that a peer may leave unread. Room for news of every member's loss.
UNREAD_MAX: Final = 8192
#: Servers that one worker reports as unreachable at a time, the characters of each reason, and the longest time.
UNREACHABLE_REPORTED_MAX: Final = 64
UNREACHABLE_CHARACTERS_MAX: Final = 300
UNREACHABLE_SECONDS_MAX: Final = 1e6
#: Barriers of one worker whose counts are remembered; the oldest are forgotten first.
BARRIER_NAMES_MAX: Final = 64
#: Characters of an error's message, and of each of its details: trailing metadata is limited.
ERROR_CHARACTERS_MAX: Final = 1000
DETAIL_CHARACTERS_MAX: Final = 200
#: Characters of a text that a member reports, such as its host or a reason.
TEXT_CHARACTERS_MAX: Final = 1024
#: Ranks of a run: each contribution to a slice is kept until the step is complete.
WORLD_MAX: Final = 4096
#: Lost workers, by parameter set, whose pushes servers still know, so that they may resume them.
DEPARTED_MAX: Final = 256
#: How often a worker may have passed a barrier, by its own report: a store holds numbers of up to 64 bits.
BARRIERS_PASSED_MAX: Final = 1 << 62
#: Copies of each shard that the scheduler can be asked for.
REPLICAS_MAX: Final = 2

PARAMETERS_MAX: Final = 1024
#: Pushes that a worker remembers to infer the iterations of its script. The longest that it infers is half of them.
ORDER_PUSHES_MAX: Final = 4096
#: Pushes of one iteration of a script, over all of its parameter sets.
PERIOD_MAX: Final = 1 << 20
#: Tensors of one layout, each of which has a name in the scheduler's memory.
TENSORS_MAX: Final = 1 << 18
DIMENSIONS_MAX: Final = 32
#: Elements of the flat vector of a parameter set (4 TiB of float32).
ELEMENTS_MAX: Final = 1 << 40
#: Slices of a parameter set: those of the largest vector at the largest slice.
SLICES_MAX: Final = 1 << 22
#: Parameter sets that one message may speak of.
NAMES_MAX: Final = 4096
#: Bytes of gradients of one parameter set that a primary keeps until its replicas acknowledge them.
KEPT_BYTES_MAX: Final = 32 << 20
DATASETS_MAX: Final = 64
#: Reports on leases that a scheduler remembers. Beyond that the oldest count as in every snapshot.
REPORTS_MAX: Final = 1 << 16
#: Ranges of one data set that a worker may hold at a time.
LEASES_MAX: Final = 64
#: Stretches in a data set's position, which is in every snapshot.
SPANS_MAX: Final = 1 << 16

#: Bytes of the state that one worker keeps in snapshots for one parameter set.
STATE_BYTES_MAX: Final = 1 << 32
#: Bytes of a commit record, and of a manifest: whoever can write to the storage decides what a reader loads.
COMMIT_BYTES_MAX: Final = 1 << 20
MANIFEST_BYTES_MAX: Final = 1 << 30
#: Characters of a text in a manifest or commit record, such as the reason.
SNAPSHOT_TEXT_MAX: Final = 4096

#: A run's name, which is also the name of files. A dot must not come first.
RUN_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: Characters of a token: it travels in the metadata of each call.
TOKEN_CHARACTERS_MAX: Final = 4096
#: Bytes of the file in which a scheduler leaves its address; more are not read.
ADDRESS_FILE_BYTES_MAX: Final = 512
#: Bytes of the record that a launcher leaves of its run; more are not read.
RUN_RECORD_BYTES_MAX: Final = 16 << 10
#: Bytes of a line that a child process has not ended; a longer one is shown in pieces.
OUTPUT_LINE_BYTES_MAX: Final = 64 << 10

#: Names that one worker may report metrics under, and the characters of each.
METRIC_NAMES_MAX: Final = 24
METRIC_NAME_CHARACTERS_MAX: Final = 64
#: Bytes of a line by which a worker reports metrics to its launcher. A pipe of Linux takes as many at once, or none.
METRIC_LINE_BYTES_MAX: Final = 4096

#: A wait that lasts longer says for whom it waits.
REPORT_WAIT_SECONDS: Final = 10.0
#: A server sends the reason of a wait after so long, so that the worker knows it when it reports the wait.
WAIT_REASON_SECONDS: Final = 5.0
