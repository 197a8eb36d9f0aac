"""For developers: ``python -m tuning_db.migrations check`` says whether rows and migrations agree."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tuning_db.migrations import drift, upgrade


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tuning_db.migrations", description=__doc__)
    parser.add_argument("command", choices=["check", "upgrade"])
    parser.add_argument("url", nargs="?", help="a database; check makes an SQLite file of its own without it")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.url is None and arguments.command == "upgrade":
            parser.error("upgrade needs the database's URL")
        url = arguments.url or f"sqlite:///{Path(folder) / 'check.db'}"
        upgrade(url)
        if arguments.command == "upgrade":
            return 0
        differences = drift(url)
    for difference in differences:
        sys.stdout.write(f"{difference}\n")
    if differences:
        sys.stdout.write("tuning_db/models.py says more than the migrations do: add a script to migrations/versions\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
