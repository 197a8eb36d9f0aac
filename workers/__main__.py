"""`python -m workers`: a worker for the CPU of this machine, with `--gpu` for a GPU of it, or with `--tracker` and
`--key` for the boards that have joined a tracker. Stops with SIGTERM, and puts back the job it was on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import structlog
from pydantic import ValidationError

from tuning_db.errors import TuneryError
from tuning_db.keys import DeviceIdentity, Toolchain
from tuning_db.messages import queue_for
from tuning_db.store import TuningStore
from workers import toolchain
from workers.celery_app import create_app
from workers.devices.identity import UnusableDevice
from workers.devices.lane import lane_of
from workers.said import last_line
from workers.settings import Settings
from workers.supervisor import Supervisor, remove_abandoned_scratch
from workers.tasks import register

_log = structlog.get_logger()


def main(arguments: Sequence[str]) -> int:
    """Exit status 2: this machine or its packages cannot be used, and the message says what to do."""
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False,
        usage="tunery worker [--gpu NUMBER|UUID | --tracker HOST:PORT --key NAME]   "
              "(other settings come from TUNERY_… variables)",
    )  # fmt: skip
    parser.add_argument("--gpu")
    parser.add_argument("--tracker")
    parser.add_argument("--key")
    given = parser.parse_args(arguments)
    # The processes that this one starts read the same settings.
    told = (("TUNERY_GPU", given.gpu), ("TUNERY_TRACKER", given.tracker), ("TUNERY_BOARD_KEY", given.key))
    for name, value in told:
        if value is not None:
            os.environ[name] = value
    try:
        settings = Settings()
    except ValidationError as error:
        parser.error("; ".join(str(each["msg"]) for each in error.errors()))
    lane = lane_of(settings)
    try:
        toolchain.check(toolchain.installed())
        os.environ.update(lane.environment())
        identity, target, tools = _probe()
        store = TuningStore(settings.database_url)
        store.ping()
    except (toolchain.UntestedToolchain, UnusableDevice, ProbeFailed, TuneryError) as error:
        _log.error("worker cannot start", message=str(error))
        return 2
    remove_abandoned_scratch()
    supervisor = Supervisor(settings, store, threading.Event())

    def report() -> None:
        while True:
            try:
                for slot in lane.slots():
                    store.report_device(f"{settings.worker_name}{slot}", identity, target, tools)
            except TuneryError as error:
                _log.warning("device not reported", message=str(error))
            if supervisor.stopping.wait(settings.report_interval_s):
                return

    threading.Thread(target=report, name="report-device", daemon=True).start()
    app = create_app(settings)
    register(app, supervisor)
    _log.info("worker starts", device=identity.name, target=target, worker=settings.worker_name)
    # Solo: one job at a time, its process started from the main thread, which lives as long as the worker does.
    app.worker_main(
        [
            "worker", "--pool=solo", "--queues", queue_for(identity.name), "--hostname", f"{settings.worker_name}@%h",
            "--loglevel=WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat",
        ]
    )  # fmt: skip
    supervisor.stopping.set()
    return 0


class ProbeFailed(Exception):
    """The device could not be probed. The message is the probe's own."""


def _probe() -> tuple[DeviceIdentity, str, Toolchain]:
    """Ask the device in a process of its own: it loads TVM, which this process never does."""
    done = subprocess.run(
        [sys.executable, "-m", "workers.devices.probe"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise ProbeFailed(f"the device cannot be used: {last_line(done.stderr, f'status {done.returncode}')}")
    data: dict[str, Any] = json.loads(done.stdout)
    return DeviceIdentity.from_json(data["identity"]), data["target"], Toolchain.from_json(data["toolchain"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
