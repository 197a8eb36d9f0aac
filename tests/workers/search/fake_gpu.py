"""This machine's CPU in a GPU's place, in a process that `spawned` has started: `install` is preloaded there.

Faked: CUDA's runtime, and what NVML says. Kernels are libraries for this CPU.
"""

from __future__ import annotations

from typing import Any

import tvm

from tests.workers.devices.nvml import Gpu, Recorded
from tests.workers.devices.recordings import H100
from workers.devices import local_gpu

INSTALL = f"{__name__}:install:"
MACHINE = Recorded([Gpu(H100, "GPU-1d0d1b8e-0f4e", 16896, divided=False)])


def install(_nothing: str) -> None:
    here: Any = local_gpu
    here.load_runtime = lambda: None
    here.require_runtime = lambda _facts: None
    here.nvml_module = lambda: MACHINE
    tvm.cuda = tvm.cpu
