"""A small file system in memory, for tests of disks that are full or read-only."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest


class Mount:
    """Mounted at ``path``, which it makes; skips the test where none may be mounted."""

    def __init__(self, path: Path, options: str) -> None:
        self.path = path
        self._libc = ctypes.CDLL(None, use_errno=True)
        path.mkdir()
        if self._libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, options.encode()):
            pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")

    def remount(self, options: str, *, readonly: bool = False) -> bool:
        """Whether it is done: it cannot be as long as a file is open for writing."""
        flags = 32 | (1 if readonly else 0)  # MS_REMOUNT, MS_RDONLY
        done = self._libc.mount(b"none", os.fsencode(self.path), b"tmpfs", flags, options.encode())
        assert done == 0 or ctypes.get_errno() == errno.EBUSY, os.strerror(ctypes.get_errno())
        return bool(done == 0)

    def fill(self) -> None:
        """Leaves no byte."""
        with (self.path / "filled").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    return

    def close(self) -> None:
        """Unmounts it."""
        self._libc.umount2(os.fsencode(self.path), 2)  # MNT_DETACH
