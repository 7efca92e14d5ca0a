"""Chaos: faults on real processes and real sockets, and a count of what was lost or repeated by them.

What it is: the programs are started as they are, killed, frozen and cut off from each other, and at the end the weights
are compared with what the workers were promised. What it is not: a part of training; nothing here is imported by it.
"""
