"""Base of objects that can be neither pickled nor copied."""

from __future__ import annotations

from typing import NoReturn

from psdist.errors import InvalidArgumentError


class ProcessBound:
    """Base of classes whose objects are neither copied nor pickled."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise InvalidArgumentError(
            f"a {name} cannot be pickled or copied: it holds connections of this process. In another process call "
            "psdist.init() or make a client, and send arrays between processes instead"
        )
