"""``python -m psdist``: the command ``psdist``, for interpreters whose scripts are not on the path."""

from psdist.cli.main import main

if __name__ == "__main__":
    main()
