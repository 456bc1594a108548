"""The command line: `mpishard`, also as `python -m mpishard`."""

from mpishard.cli.root import main

__all__ = ["main"]
