"""The scheduler's part of its dashboard: readings of the run, made on the scheduler's loop."""

from __future__ import annotations

import logging
import time

from psdist.errors import ConfigurationError
from psdist.monitoring.dashboard_link import view_key
from psdist.settings.config import DashboardEndpoint
from psdist_scheduler.dashboard.feed import Reading
from psdist_scheduler.dashboard.server import DashboardServer
from psdist_scheduler.scheduler import Scheduler

logger = logging.getLogger("psdist.scheduler")


def serve(scheduler: Scheduler, endpoint: DashboardEndpoint, optional: bool) -> DashboardServer | None:
    """Serve the dashboard of a run until it is closed.

    optional: if the port cannot be bound, warn and return None, as the scheduler of a run that trains already.
    Otherwise raises ConfigurationError and InsecureBindError.
    """
    settings = scheduler.cluster.settings

    def read(after: int) -> Reading:
        began = time.perf_counter()
        status, samples = scheduler.status(), scheduler.reports.samples.after(after)
        workers = sum(member.role == "worker" and member.live for member in scheduler.cluster.members.all)
        heartbeat = max(settings.heartbeat_of("server", workers), settings.heartbeat_of("worker", workers))
        return Reading(status, samples, heartbeat, time.perf_counter() - began)

    try:
        server = DashboardServer(endpoint, view_key(endpoint.token, settings.run_id), read)
    except ConfigurationError as error:
        if not optional:
            raise
        logger.warning("the run continues without its dashboard: %s", error)
        return None
    scheduler.reports.dashboard_address = server.address
    logger.info("dashboard: http://%s/", server.address)
    return server
