"""The client library: what a worker's script uses.

Top down: ``context`` (``psdist.init``), ``sync_client`` over ``async_client``, ``parameters`` (one handle),
``exchange`` (one call), ``transport`` (to the servers), ``session`` (with the scheduler), ``core`` (pure). Nothing here
imports code of the servers or the scheduler.

Importing this package turns gRPC's fork handlers off, unless the environment says otherwise. While gRPC's threads are
busy, those handlers crash a forked child now and then (grpcio 1.85: 3 of 40 forks), and a script may fork, for a data
loader say. A forked child cannot use psdist and gets an error (``loop.shared``), but it does not die. gRPC reads this
setting when it is imported.
"""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
