"""Keeps TVM from importing the tensor intrinsics of every device when those of one are wanted.

`import tvm.s_tir.tensor_intrin` parses about 500 TVMScript functions, most of them for CUDA, and takes half a minute;
each `TuneContext` imports it. This puts a package of the same name in its place that holds the modules of one device.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

_NAME = "tvm.s_tir.tensor_intrin"


def use_only(module: str) -> None:
    """Load `module` ("x86", "arm_cpu", "cuda", …) alone. Does nothing if the package was imported already."""
    if _NAME in sys.modules:
        return
    import tvm.s_tir

    package = types.ModuleType(_NAME)
    package.__path__ = [str(Path(tvm.s_tir.__file__).parent / "tensor_intrin")]
    sys.modules[_NAME] = package
    tvm.s_tir.tensor_intrin = package
    importlib.import_module(f"{_NAME}.{module}")
