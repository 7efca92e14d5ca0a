"""Version of the package, in a module without imports so that every other module can read it."""

from typing import Final

__version__: Final = "0.2.0.dev0"
