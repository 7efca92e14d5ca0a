"""Starts schedulers, servers and workers as processes, watches over them, and ends them all.

``plan`` says which processes a run has; ``supervisor`` (pure) decides what an exit means; ``process`` spawns, prefixes
and kills; ``local`` and ``agent`` join the three for a run on this machine and for one node of many. The process that
does this imports neither grpc nor numpy: it must start fast, and a process that has imported grpc must not fork.
"""
