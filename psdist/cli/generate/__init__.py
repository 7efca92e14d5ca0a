"""``psdist generate``: files that run psdist under an engine, from templates that an operator can read and change."""
