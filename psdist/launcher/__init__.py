"""Starts schedulers, servers and workers as processes, watches them, and ends them.

``plan`` builds the command lines of a run's processes, ``supervisor`` (pure) decides the meaning of an exit, and
``process`` spawns and kills. ``local`` uses them for a run on this machine, ``agent`` for one node of many. A launcher
imports neither grpc nor numpy: it must start fast, and a process that has imported grpc must not fork.
"""
