"""Chaos tests: faults on real processes and real sockets, and a count of the updates that they lose or repeat.

The unmodified programs are started, killed, frozen and disconnected from each other. At the end the weights are
compared with the acknowledgements that the workers received. ``python -m tests.chaos`` is its command line.
"""
