"""`python -m benchmarks`: what `mpishard bench` does, from a checkout."""

import sys

from mpishard.cli import main

raise SystemExit(main(["bench", *sys.argv[1:]]))
