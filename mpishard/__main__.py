"""`python -m mpishard`: the command line."""

from mpishard.cli import main

raise SystemExit(main())
