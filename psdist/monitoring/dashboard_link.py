"""Link to the dashboard of a run, the key in it, and the socket that listens for it.

The key is derived from the run's token: it opens the dashboard, which only shows, and nothing else. It is in the
fragment of the link, which a browser sends to nobody.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from importlib.util import find_spec

from psdist import addresses
from psdist.errors import ConfigurationError
from psdist.wire import limits


def view_key(token: str, run_id: str) -> str:
    """Return the key that opens the dashboard of a run; empty without a token."""
    if not token:
        return ""
    return hmac.new(token.encode(), f"psdist dashboard {run_id}".encode(), hashlib.sha256).hexdigest()[:40]


def dashboard_link(address: str, key: str) -> str:
    """Return the link. address: ``host:port``. key: empty if the dashboard needs none."""
    return f"http://{address}/#key={key}" if key else f"http://{address}/"


def require_dashboard() -> None:
    """Raise ConfigurationError if the libraries of the dashboard are not installed."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the dashboard needs {' and '.join(missing)}: pip install 'psdist[dashboard]', or leave out --dashboard "
            "and --dashboard-port"
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that browsers that connect before it is served wait. port: 0 takes a free one.

    Raises ConfigurationError if this machine has no such address, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host.strip("[]"), port))
        listening.listen(limits.DASHBOARD_CONNECTIONS_MAX)
    except OSError as error:
        listening.close()
        raise addresses.unbound("the dashboard", "--dashboard", host, port, error) from None
    return listening
