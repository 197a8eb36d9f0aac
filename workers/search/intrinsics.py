"""Keeps TVM from importing the tensor intrinsics of every device when those of one are wanted.

`import tvm.s_tir.tensor_intrin` parses about 500 TVMScript functions, most of them for CUDA, and takes half a minute;
each `TuneContext` imports it. This puts a package of the same name in its place that holds the modules of one device.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Final

_NAME: Final = "tvm.s_tir.tensor_intrin"
#: Weights are read from here: more than the last cache of a CPU holds.
POOL_BYTES: Final = 128 << 20


def preload(module: str, *, measures: bool = True) -> tuple[str, ...]:
    """What a fork server needs for the steps of a search, on a device whose tensor intrinsics are in `module`; "" if
    none are needed. Of one that measures nothing: what tells without measuring.

    Here and not beside the steps, so that a server can be started before TVM is imported: both take seconds, and go on
    at once.
    """
    steps = "workers.search.forked_steps"  # else each child would import it, for longer than most steps take
    known = (f"{__name__}:use_only:{module}", steps)
    return (*known, f"workers.search.sampling:fill_pool:{POOL_BYTES}") if measures else known


def use_only(*modules: str) -> None:
    """Load `modules` ("x86", "arm_cpu", "cuda", …) and no others; called again, it adds to those that are there.

    If somebody imported TVM's own package first, then all are there already, and this does nothing.
    """
    if _NAME not in sys.modules:
        import tvm.s_tir

        package = types.ModuleType(_NAME)
        package.__path__ = [str(Path(tvm.s_tir.__file__).parent / "tensor_intrin")]
        sys.modules[_NAME] = package
        tvm.s_tir.tensor_intrin = package
    for module in filter(None, modules):
        importlib.import_module(f"{_NAME}.{module}")
