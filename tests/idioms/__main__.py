"""Write the idioms into ``docs/torch-features.md``: ``python -m tests.idioms``."""

from __future__ import annotations

from tests.idioms.table import PAGE, page

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
