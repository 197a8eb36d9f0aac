"""`python -m workers.devices.probe`: prints what this machine's device is, and what compiles for it, as JSON."""

from __future__ import annotations

import json
import os
import sys

from tuning_db.keys import to_json


def main() -> int:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from workers import toolchain
    from workers.devices import local_cpu
    from workers.devices.identity import UnusableDevice

    try:
        identity, target = local_cpu.probe()
    except UnusableDevice as error:
        print(error, file=sys.stderr)
        return 2
    json.dump({"identity": to_json(identity), "target": target, "toolchain": to_json(toolchain.current())}, answer)
    answer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
