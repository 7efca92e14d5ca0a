"""The command line: one module for each command.

Modules import grpc, numpy and rich only inside the command that needs them, so that ``psdist run`` starts fast.
"""
