"""Collectives between the workers of a run, for numpy arrays.

``Context.collectives`` is the group of all workers, ``Context.new_group`` makes others. docs/collectives.md has the
calls, and what is exact.
"""

from typing import Final

#: Default time limit of silence, in seconds: above the retransmission of a lost packet, which takes 0.2 s.
SILENCE_SECONDS: Final = 0.4
