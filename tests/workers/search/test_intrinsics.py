"""Loading the tensor intrinsics of one device alone."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from tvm.s_tir import meta_schedule as ms

from tests.workers import steps
from tests.workers.conftest import Host
from tests.workers.search.samples import matmul_module
from workers.search.forkserver import ForkServer
from workers.search.intrinsics import preload

PROGRAM = """
import sys
from workers.search.intrinsics import use_only
use_only()  # as a step that wants none does, before one that wants some
use_only(sys.argv[1])
from tvm.s_tir import TensorIntrin
import tvm.s_tir.tensor_intrin
print(*sorted(name.rpartition(".")[2] for name in sys.modules if name.startswith("tvm.s_tir.tensor_intrin.")))
print(TensorIntrin.get(sys.argv[2], allow_missing=True) is not None)
"""


@pytest.mark.parametrize(("module", "intrinsic"), [("x86", "dot_16x4_vnni"), ("arm_cpu", "dot_4x4_i8i8s32_neon")])
def test_one_device(module: str, intrinsic: str) -> None:
    """The intrinsics of the device asked for are there, and those of GPUs are not even imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, intrinsic], capture_output=True, text=True, timeout=120, check=True
    )
    loaded, found = done.stdout.splitlines()
    assert module in loaded.split()
    assert "cuda" not in loaded.split()
    assert found == "True"


def test_steps_import_nothing(host: Host) -> None:
    """A step of a search finds all that it needs imported, or its child would import it for that step alone; and what a
    server imports for it starts no thread, which a fork would not survive."""
    with ForkServer(preload(host.intrinsics)) as server:
        assert server.call(steps.imported_by, "workers.search.forked_steps", deadline_s=60) == []
        assert psutil.Process(server.pid).num_threads() == 1


def test_default_space_needs_no_other(host: Host) -> None:
    """A context with MetaSchedule's default space for this machine finds its intrinsics, and imports no others."""
    before = set(sys.modules)
    context = ms.TuneContext(
        matmul_module(16, 16, 16), target=host.target, space_generator="post-order-apply", rand_state=1, logger=None
    )
    assert len(context.generate_design_space()) > 1
    assert not [name for name in set(sys.modules) - before if name.startswith("tvm.s_tir.tensor_intrin.")]
