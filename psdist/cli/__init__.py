"""The command line: flags with their environment twins, and one module for each command.

Nothing here is imported by the library, except ``psdist.settings.flags`` by ``psdist.settings.config``.
Modules import grpc, numpy and rich only inside the command that needs them, so that ``psdist run`` starts at once.
"""
