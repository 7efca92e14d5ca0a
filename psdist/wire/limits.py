"""Limits on everything that a peer can make a process hold, and the version of the protocol.

One place, so that a limit is the same on both sides and an error can name it.
"""

from __future__ import annotations

from typing import Final

#: Registration refuses another number. Raised when an older peer could misread a message.
PROTOCOL_VERSION: Final = 3

#: Largest message on the data path: a slice of 1 MiB and its header, with room for slices in float64 one day.
DATA_MESSAGE_BYTES: Final = 4 << 20
#: Largest message to or from the scheduler: a layout of TENSORS_MAX tensors with names of up to 200 characters fits.
CONTROL_MESSAGE_BYTES: Final = 64 << 20
METADATA_BYTES: Final = 16 << 10

TENSORS_MAX: Final = 1 << 18
DIMENSIONS_MAX: Final = 32
#: Elements of the flat vector of a parameter set (4 TiB of float32).
ELEMENTS_MAX: Final = 1 << 40
PARAMETERS_MAX: Final = 1024
MEMBERS_MAX: Final = 4096
WORLD_MAX: Final = 4096
DATASETS_MAX: Final = 64
#: Ranges of one data set that a worker may hold at a time.
LEASES_MAX: Final = 64
#: Stretches in a data set's position.
SPANS_MAX: Final = 1 << 16

#: Slices of one stream that a server holds and has not applied; more are left in the network.
HELD_SLICES_MAX: Final = 2
#: Largest message on the line of an attachment, which carries no payloads: it is a list of slices.
SHARED_MESSAGE_BYTES: Final = DATA_MESSAGE_BYTES
#: Calls of one Share stream that are not answered may name each slice of the server so many times on average.
SHARED_ROUNDS_MAX: Final = 4
CONCURRENT_CALLS_MAX: Final = 4096
CONNECTIONS_MAX: Final = 2048
#: Flow-control windows of one stream: what the transport may read ahead of the program. A server's counts for each
#: worker in its memory; a client has few streams. Larger ones make transfers cheaper: with 1 MiB at the server, and
#: frames of 1 MiB in place of 16 KiB, a step of 25 M parameters took 9 % less CPU time than with 256 KiB on both sides.
#: 512 KiB is what the bound on a server's memory has room for.
SERVER_WINDOW_BYTES: Final = 512 << 10
CLIENT_WINDOW_BYTES: Final = 4 << 20
#: Largest HTTP/2 frame that is asked for, within the window.
FRAME_BYTES: Final = 1 << 20

#: Workers that were lost, by parameters, whose pushes servers still know, so that they may go on with them.
DEPARTED_MAX: Final = 256

#: How often a worker may have passed a barrier, by its own word: a store can hold no number of 64 bits.
BARRIERS_PASSED_MAX: Final = 1 << 62

#: A wait that lasts longer says for whom it waits.
REPORT_WAIT_SECONDS: Final = 10.0

#: Bytes of the state that one worker keeps in snapshots for one parameter set.
STATE_BYTES_MAX: Final = 1 << 32
