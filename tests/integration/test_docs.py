"""The client that docs/wire.md shows runs as it stands there: what the page tells is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from psdist.launch.embedded import EmbeddedCluster

PAGE = Path(__file__).resolve().parents[2] / "docs/wire.md"


def test_the_client_of_the_wire_page_trains(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    script = tmp_path / "client.py"
    script.write_text(code)
    cluster = EmbeddedCluster(servers=2)
    try:
        environment = os.environ | {"PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token}
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment, timeout=60
        )
    finally:
        cluster.close()
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[(0\.999\d+ ?){4}\]\n", done.stdout), done.stdout
