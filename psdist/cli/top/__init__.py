"""The screen of ``psdist top``: six panels about a run, in the terminal."""
