"""Write ``docs/torch-idioms.md``: ``python -m tests.idioms``."""

from __future__ import annotations

from tests.idioms.table import page
from tests.support.tree import ROOT

if __name__ == "__main__":
    (ROOT / "docs/torch-idioms.md").write_text(page(), encoding="utf-8")
