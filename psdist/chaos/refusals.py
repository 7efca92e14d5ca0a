"""Counts updates that replicas refused, from the logs of the servers. Pure.

A refused update may be sent again once, after the copy was filled or the stream was reopened. A second refusal of the
same update means that the primary repeats it endlessly.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Final

#: How servers log a refused update: it does not fit the copy (``replicator``), or updates before it are missing
#: (``rpc_handlers``, with the text of ``core.replication``).
STALE: Final = "a copy is stale"
GAP: Final = "Replicate refused: update "
#: The primary's end of the connection, which differs once it has dialed again (``rpc_handlers``).
_CALLER: Final = re.compile(r" \(a call from [^)]*\)")


def count_refusals(logs: Iterable[str]) -> Counter[str]:
    """Count refusals by log line without its time and caller. It names the shard, and the version or the lsn.

    logs: the whole log of each server.
    """
    lines = (line.partition(" ")[2] for text in logs for line in text.splitlines())
    return Counter(_CALLER.sub("", line) for line in lines if STALE in line or GAP in line)
