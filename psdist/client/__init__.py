"""The client library: what a worker's script uses.

Top down: ``context`` (``psdist.init``), ``sync_client`` (a face over) ``async_client``, ``parameters`` (one handle),
``creation`` and ``scheduler_session`` (the scheduler), ``data_path`` and ``requests`` (the servers). Pure, without any
waiting: ``partition``, ``routing``, ``push_sequence``, ``snapshot_marks``, ``retry``. Nothing here imports the servers'
or the scheduler's code.

Importing it turns gRPC's fork handlers off, unless the environment says otherwise: while its threads are at work they
crash the child now and then (grpcio 1.85: 3 of 40 forks), and a script may well fork, for a data loader say. A forked
child cannot use psdist, and is told so (``loop.shared``), but it need not die. gRPC reads this when it is imported.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
