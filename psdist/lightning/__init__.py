"""Lightning with the weights on parameter servers. Needs the extra ``lightning``.

``PsdistStrategy`` is passed to Lightning's Trainer. The module and the other arguments stay as they are.
"""

from __future__ import annotations

try:
    import lightning.pytorch as _lightning
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("psdist.lightning needs Lightning: pip install lightning", name=error.name) from error

from psdist.lightning.strategy import PsdistStrategy

__all__ = ["PsdistStrategy"]

del _lightning
