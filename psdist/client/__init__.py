"""The client library: what a worker's script uses.

Top down: ``context`` (``psdist.init``), ``sync_client`` over ``async_client``, ``parameters`` (one handle),
``exchange`` (one call), ``transport`` (to the servers), ``session`` (with the scheduler), ``core`` (pure). Nothing here
imports code of the servers or the scheduler.
"""
