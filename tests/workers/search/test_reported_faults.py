"""Faults that people reported of tuners, boards and libraries: those that nothing else here shows.

Held elsewhere. Of tuners: operators without a candidate (tvm#12330, tvm#18423), every trial failed (tvm#6612) and one
operator tuned alone (tvm#10366) in `test_scheduler.py`; a build that does not stop (tvm#11434) and processes that
outlive their owner (tvm#13778, tvm#3602) in `test_forkserver.py`; builds that leak (tvm#11096) in
`test_forked_steps.py`; an abort (tvm#19976) in `e2e/test_faults.py`; symbolic dimensions (tvm#17465) in
`service/test_jobs.py`; a target without its cores (pytorch/pytorch#90213) in `devices/test_recordings.py`; xgboost
without a name (tvm#11409, tvm#12009) in `test_toolchain.py`; GPU kernels that nothing tuned
(mlc-ai/web-stable-diffusion#43) in `packaging/test_gpu_library.py`.
Of boards: time in the queue (tvm#13963) and reboots (tvm#10240) in `test_rpc_lane.py`, sessions that stay open
(tvm#12779) and trackers that list what cannot be had (tvm#11058) in `devices/test_board.py`.
Of libraries: another GPU's machine code (mlc-ai/mlc-llm#1631) in `packaging/test_gpu_library.py`, linkers of another
machine (tvm#376, tvm#5747) in `test_linker.py`, versions of the C library (yangao07/longcallD#30) in `test_elf.py` and
`boards/test_boards.py`, hidden features (jax-ml/jax#2906) in `devices/test_local_cpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.samples import make_key
from tests.workers.conftest import Host, lower
from tests.workers.graph.nets import Net
from tuning_db.blobs import BlobStore
from tuning_db.errors import NoValidCandidate
from tuning_db.jobs import JobSpec, SearchConfig
from tuning_db.keys import ArtifactKey, DeviceIdentity
from tuning_db.store import TuningStore
from tuning_db.trials import Failed, FailureKind, Measured
from workers import toolchain
from workers.devices.lane import LocalLane
from workers.graph import pipeline
from workers.graph.operators import Model
from workers.packaging import library
from workers.search.candidates import Built
from workers.search.forkserver import ForkServer
from workers.search.guards import Guard
from workers.search.lanes import LocalBuilder, Runner
from workers.search.records import Records
from workers.search.templates.registry import TEMPLATES
from workers.settings import Settings
from workers.tuning import Attempt, SearchOutcome


class Broken:
    """A runner of a device on which nothing runs."""

    guard = Guard()
    at_once = 1

    def run_all(self, wanted: Sequence[tuple[Built, float | None]]) -> list[Measured | Failed]:
        return [Failed(FailureKind.RUN_ERROR, "the device is gone")] * len(wanted)

    def compare(self, candidates: Sequence[Built]) -> list[Measured] | Failed:
        return Failed(FailureKind.RUN_ERROR, "the device is gone")

    def close(self) -> None:
        pass


class Lane(LocalLane):
    """This machine's CPU, whose roof nobody asks for."""

    def roof(self, key: ArtifactKey) -> None:
        return None


class BrokenLane(Lane):
    def runner(self, server: ForkServer, key: ArtifactKey, folder: Path, warn: Callable[[str], None]) -> Runner:
        return Broken()


def test_operators_that_tuners_choke_on(
    server: ForkServer, host: Host, sqlite_store: TuningStore, blobs: BlobStore, tmp_path: Path
) -> None:
    """tvm#18423, tvm#18424, tvm#18380: gathering, reversing and maxima beside a convolution are searched or left as
    they are, the convolution is tuned, and the model compiles with what was found. tvm#6612: where every trial fails,
    so does the job."""
    net = Net()
    x = net.conv(net.input(1, 8, 12, 12), 8, 16, (3, 3), pads=[1, 1, 1, 1])
    x = net("Reshape", x, net.constant(np.array([12, 16, 12])))
    x = net("ReverseSequence", x, net.constant(np.full(16, 5)), time_axis=0, batch_axis=1)
    x = net("Gather", x, net.constant(np.array([7, 0, -1])), axis=2)
    _, imported = lower(net.model(net("ReduceMax", x, axes=[1])), host, tmp_path)
    with host.target, pipeline.pass_context():
        model = Model(pipeline.simplify()(imported.module), host.target, host.cpu.lanes, True, host.cpu.dot)

    def search(lane: Lane, device: DeviceIdentity) -> SearchOutcome:
        key = make_key(device=device, target=host.target_json, toolchain=toolchain.current())
        job = sqlite_store.submit(JobSpec(key, SearchConfig(trials=8, seconds=120))).job
        claimed = sqlite_store.claim(job.id, "worker")
        assert claimed is not None
        attempt = Attempt(Settings(data_dir=tmp_path), sqlite_store, blobs, claimed[0], tmp_path)
        attempt.lane = lane
        records = Records(sqlite_store, claimed[0], key.record_scope())
        build = partial(LocalBuilder, server, host.target_json, workers=2)
        operators = model.extract(records.adopt)
        return attempt._search(server, host.target_json, host.cpu, TEMPLATES, build, operators, records)

    outcome = search(Lane(), host.identity)
    assert [n for n, choice in outcome.choices.items() if "conv" in n and choice.trial is not None], list(
        outcome.choices
    )
    library.compile_library(model.assemble(outcome.choices), host.target, tmp_path / "tuned.so")
    with pytest.raises(NoValidCandidate, match="none of 8 candidates could be built and run"):
        search(BrokenLane(), replace(host.identity, model="broken"))
