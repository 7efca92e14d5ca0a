"""Small in-memory file system, for tests of full or read-only disks."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest


class Mount:
    """File system mounted at ``path``, which is created. Skips the test if mounting is not allowed."""

    def __init__(self, path: Path, options: str) -> None:
        self.path = path
        self._libc = ctypes.CDLL(None, use_errno=True)
        path.mkdir()
        if self._libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, options.encode()):
            pytest.skip(f"no file system can be mounted here: {os.strerror(ctypes.get_errno())}")

    def remount(self, options: str, *, readonly: bool = False) -> bool:
        """Remount the file system. Return False if it is busy: a file is open for writing."""
        flags = 32 | (1 if readonly else 0)  # MS_REMOUNT, MS_RDONLY
        done = self._libc.mount(b"none", os.fsencode(self.path), b"tmpfs", flags, options.encode())
        assert done == 0 or ctypes.get_errno() == errno.EBUSY, os.strerror(ctypes.get_errno())
        return bool(done == 0)

    def fill(self) -> None:
        """Fill the file system to the last byte."""
        with (self.path / "filled").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(4096))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    return

    def close(self) -> None:
        """Unmount the file system."""
        self._libc.umount2(os.fsencode(self.path), 2)  # MNT_DETACH
