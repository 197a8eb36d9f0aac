"""The roof of a board: `roof`'s kernels, compiled here and timed there.

The process is one of its own, `python -m workers.devices.board_roof SPEC PARENT`, with a deadline: a board that freezes
never answers, and TVM's client waits for ever.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from tuning_db.keys import DeviceIdentity, to_json
from workers.devices.board_session import ANSWER_S, CONNECT_S, Lost, import_client, trial, upload_s
from workers.devices.roof import Plan, RoofMeasurement, compile_kernel, measured_apart
from workers.devices.tracker import Boards, Tracker
from workers.linker import linker_for
from workers.processes import die_with_parent

#: What a board is taken to have. A board tells what is free, which is another number each time.
_MEMORY_BYTES: Final = 512 << 20
#: From the arrival of the kernels.
_RUN_S: Final = 60.0
#: TVM's import and the compiler's work, on a busy machine.
_COMPILE_S: Final = 60.0


def measure(boards: Boards, device: DeviceIdentity, target: str) -> RoofMeasurement:
    """The roof of the next of `boards` that is free. `target` is TVM's of `device`, as canonical JSON.

    Takes 5 s and what the sending takes. Raises RoofNotMeasured.
    """
    spec = {
        "tracker": [boards.tracker.host, boards.tracker.port], "key": boards.key, "patience_s": boards.patience_s,
        "device": to_json(device), "target": target,
    }  # fmt: skip
    deadline_s = _COMPILE_S + boards.patience_s + CONNECT_S + upload_s([]) + _RUN_S + ANSWER_S
    return measured_apart("workers.devices.board_roof", spec, {}, deadline_s)


def main(arguments: Sequence[str]) -> int:
    die_with_parent(int(arguments[1]))
    spec = json.loads(arguments[0])
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_client()
    import tvm

    device = DeviceIdentity.from_json(spec["device"])
    target = tvm.target.Target(json.loads(spec["target"]))
    plan = Plan.of(target, device.cache_bytes, device.cores, _MEMORY_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        files: list[tuple[str, str]] = []
        for name, kernel in plan.kernels().items():
            path = Path(folder) / f"{name}.o"
            compile_kernel(kernel, target).mod.write_to_file(str(path), "o")
            linker_for(device.arch).link(path.with_suffix(".so"), [path])
            files.append((str(path.with_suffix(".so")), f"{name}.so"))
        libraries = {Path(name).stem: name for _, name in files}
        # A board that was given out offers itself anew when nobody has come for some seconds: not before.
        lease = Boards(Tracker(*spec["tracker"]), spec["key"], spec["patience_s"]).request()
        said = trial(lease, device, files, "measure_roof", [asdict(plan), libraries], _RUN_S, CONNECT_S)
    if isinstance(said, Lost):
        print(said.message, file=sys.stderr, flush=True)
        os._exit(1)
    json.dump(said.result(), answer)
    answer.close()
    # TVM's clients wait for their sessions when they are collected.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
