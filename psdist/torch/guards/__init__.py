"""Guards of a wrapped model: checks for changes that would train something else than the script means."""
