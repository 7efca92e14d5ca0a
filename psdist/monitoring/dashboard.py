"""The dashboard as all programs know it: its page, its link with the key, and the socket that listens for it.

The scheduler serves the page's files; ``psdist report`` writes them as one file with a saved run inside. The key comes
from a file, or from the run's token: it opens the dashboard, which only shows, and nothing else. It is in the fragment
of the link, which a browser sends to nobody.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
from contextlib import suppress
from functools import cache, partial
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from psdist import addresses
from psdist.errors import ConfigurationError
from psdist.wire import limits

#: In the private directory of a run of psdist run, a link to the file with the key, if one was named.
KEY_FILE: Final = "dashboard-key"
_DIRECTORY: Final = Path(__file__).parent / "page"
#: Content types of the files by name.
FILES: Final = {
    "index.html": "text/html",
    "dashboard.js": "text/javascript",
    "dashboard.css": "text/css",
    "uplot.js": "text/javascript",
    "uplot.css": "text/css",
}
_STYLE: Final = re.compile(r'<link rel="stylesheet" href="([a-z.]+)">')
_SCRIPT: Final = re.compile(r'<script src="([a-z.]+)" defer></script>\n')


@cache
def content(name: str) -> bytes:
    """Return the bytes of a file of the page."""
    return (_DIRECTORY / name).read_bytes()


def saved_page(run: dict[str, Any]) -> str:
    """Return the page with a run inside, as one file that loads nothing. run: of ``run_state.saved_run``.

    Its policy allows the page's own scripts alone, by their digests. Texts of the run are data to the browser: the page
    sets them as text.
    """
    page = content("index.html").decode()
    scripts = [content(name).decode() for name in _SCRIPT.findall(page)]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"
    # Nothing in the data can end its element.
    data = json.dumps(run, separators=(",", ":")).replace("<", "\\u003c")
    page = _STYLE.sub(lambda found: f"<style>{content(found[1]).decode()}</style>", _SCRIPT.sub("", page))
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
    )
    inside = [
        f'<script type="application/json" id="saved">{data}</script>',
        *(f"<script>{one}</script>" for one in scripts),
    ]
    return page.replace("</body>", "\n".join(inside) + "\n</body>")


# --- link and socket --------------------------------------------------------------------------------------------------


def view_key(token: str, run_id: str) -> str:
    """Return the key that opens the dashboard of a run; empty without a token."""
    if not token:
        return ""
    return hmac.new(token.encode(), f"psdist dashboard {run_id}".encode(), hashlib.sha256).hexdigest()[:40]


def make_key(file: Path) -> str:
    """Return the key in a file that can be replaced, and write a new one if it does not exist. Raises
    ConfigurationError."""
    try:
        with suppress(FileExistsError), open(file, "x", opener=partial(os.open, mode=0o600)) as new:
            new.write(f"{secrets.token_urlsafe(30)}\n")
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigurationError(
            f"the key in --dashboard-key-file {file} cannot be used: {reason}. Name a file that can be written, or "
            "leave the flag out",
            path=file,
        ) from None


def read_key(file: Path) -> str:
    """Return the key in a file now; empty if there is none, so that no link opens the dashboard."""
    with suppress(OSError, UnicodeError):
        return file.read_text(encoding="ascii").strip()
    return ""


def dashboard_link(address: str, key: str, *, secure: bool = False) -> str:
    """Return the link. address: ``host:port``. key: empty if the dashboard needs none. secure: with TLS."""
    place = f"{'https' if secure else 'http'}://{address}/"
    return f"{place}#key={key}" if key else place


def require_dashboard() -> None:
    """Raise ConfigurationError if the libraries of the dashboard are not installed."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the dashboard needs {' and '.join(missing)}: pip install {' '.join(missing)}, or leave out --dashboard "
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
