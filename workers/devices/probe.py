"""`python -m workers.devices.probe`: prints what the worker's device is, and what compiles for it, as JSON.

The settings say which device: this machine's CPU, a GPU of it, or the boards of a tracker. Nothing is waited for.
"""

from __future__ import annotations

import json
import os
import sys

from tuning_db.keys import to_json


def main() -> int:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from tuning_db.errors import BuildFailed
    from workers.devices.identity import UnusableDevice
    from workers.devices.lane import lane_of
    from workers.devices.tracker import BoardUnusable
    from workers.linker import NoLinker
    from workers.settings import Settings

    try:
        lane = lane_of(Settings(), patience_s=0)
        identity, target = lane.probe()
        toolchain = lane.toolchain()
    except (UnusableDevice, BoardUnusable, NoLinker, BuildFailed) as error:
        print(error, file=sys.stderr)
        return 2
    json.dump({"identity": to_json(identity), "target": target, "toolchain": to_json(toolchain)}, answer)
    answer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
