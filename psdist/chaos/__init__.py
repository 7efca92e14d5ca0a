"""Chaos tests: faults on real processes and real sockets, and a count of the updates that they lose or repeat.

The programs are started as they are, killed, frozen and disconnected from each other. At the end the weights are
compared with what the workers were promised. Training imports nothing of this.
"""
