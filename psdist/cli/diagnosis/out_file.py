"""Files that commands write by ``--out``: each appears whole, or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from psdist.errors import ConfigurationError, PsdistError


@contextmanager
def written_whole(path: Path, remedy: str = "") -> Iterator[IO[str]]:
    """Yield a new file, which replaces ``path`` after the block.

    Raises ConfigurationError if that is impossible, and leaves the old file as it was.

    The file has the mode of the one that it replaces, or the mode that the user's umask leaves.

    remedy: another choice besides the name of a file, for the error.
    """
    if path.exists() and not path.is_file():  # The file would take the place of a device, such as /dev/stdout.
        raise ConfigurationError(f"--out {path} exists and is no file: give the name of a file{remedy}")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with open(descriptor, "w", encoding="utf-8", newline="") as file:
            if path.exists():
                os.fchmod(descriptor, path.stat().st_mode & 0o777)
            yield file
        os.replace(draft, path)
    except PsdistError:  # Some are OSErrors, too.
        raise
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with suppress(OSError):
            os.unlink(draft)


def _unwritable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"--out {path} cannot be written: {error.strerror or error}. Give the name of another file"
    )
