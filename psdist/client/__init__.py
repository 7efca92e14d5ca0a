"""The client library: what a worker's script uses.

Top down: ``context`` (``psdist.init``), ``sync_client`` (a face over) ``async_client``, ``parameters`` (one handle),
``creation`` and ``connection`` (the scheduler), ``transfer`` and ``jobs`` (the servers). Pure, without any waiting:
``partition``, ``routing``, ``session``, ``retry``. Nothing here imports the servers' or the scheduler's code.
"""
