"""Which versions of its dependencies are installed beside mpishard: ``python tests/packaging/versions.py [--oldest]``.

With ``--oldest`` it fails where one is not the lowest that setup.cfg promises.
"""

from __future__ import annotations

import configparser
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

SETUP = Path(__file__).parents[2] / "setup.cfg"


def promised() -> dict[str, Version]:
    """The lowest version of every dependency that setup.cfg names, by its name."""
    parser = configparser.ConfigParser()
    parser.read(SETUP)
    extras = parser["options.extras_require"]
    lines = [parser["options"]["install_requires"], *(extras[extra] for extra in extras)]
    found = {}
    for line in "\n".join(lines).split("\n"):
        if line:
            requirement = Requirement(line)
            (bound,) = requirement.specifier
            assert bound.operator == ">=", line
            found[requirement.name] = Version(bound.version)
    return found


def is_lowest(installed: Version, lowest: Version) -> bool:
    """Whether no older release keeps the promise, but for repairs of one: 3.12.1 where 3.12 is promised."""
    return installed >= lowest and (installed.major, installed.minor) == (lowest.major, lowest.minor)


def main() -> int:
    newer = []
    print(f"Python {platform.python_version()}")
    for name, lowest in sorted(promised().items()):
        try:
            installed = Version(version(name))
        except PackageNotFoundError:
            continue
        print(f"{name} {installed}")
        if not is_lowest(installed, lowest):
            newer.append(f"{name} {installed}, and {lowest} is promised")
    if "--oldest" in sys.argv[1:] and newer:
        print("not the oldest:", *newer, sep="\n  ")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
