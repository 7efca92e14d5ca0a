"""Link to the dashboard of a run, and the key in it.

The key is derived from the run's token: it opens the dashboard, which only shows, and nothing else. It is in the
fragment of the link, which a browser sends to nobody.
"""

from __future__ import annotations

import hashlib
import hmac
from importlib.util import find_spec

from psdist.errors import ConfigurationError


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
