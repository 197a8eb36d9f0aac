"""How this process treats denormal numbers: a library that is loaded must not change it for all that runs beside it.

Compilers that are told to be fast link start-up code that flushes denormals to zero for the thread that loads a library
(GCC's `crtfastmath.o`). Ours hold none, whatever options they are compiled with.
"""

from __future__ import annotations

import ctypes
import platform
from typing import Final

#: By what `uname -m` says: bytes of the C library's fenv_t before the control register, and the register's bits that
#: flush denormals: of x86's MXCSR FTZ and DAZ, of Arm's FPCR FZ16 and FZ.
_REGISTERS: Final = {"x86_64": (28, 0x8040), "aarch64": (0, 0x1080000)}
_ENVIRONMENT_BYTES: Final = 64


def denormal_mode() -> int | None:
    """The bits of this thread's control register that flush denormals to zero, 0 where none is set; None where this
    machine's register is not known."""
    if platform.machine() not in _REGISTERS:
        return None
    offset, mask = _REGISTERS[platform.machine()]
    environment = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    if ctypes.CDLL("libm.so.6").fegetenv(environment) != 0:
        return None
    return int.from_bytes(environment.raw[offset : offset + 4], "little") & mask
