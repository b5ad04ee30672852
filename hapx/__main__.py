"""`python -m hapx` is the command `hapx`."""

from __future__ import annotations

from hapx.cli import main

if __name__ == "__main__":
    main()
