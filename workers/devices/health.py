"""How a machine is while something is measured on it: governor, clock, temperature, and how long a fixed kernel takes.

For workers and boards alike: the standard library, and NumPy for the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

#: Square roots of so many numbers: what lies in any first cache, and takes a core's clock and nothing else.
_NUMBERS: Final = 4096
_CALLS: Final = 128
_SAMPLES: Final = 6


@dataclass(frozen=True, slots=True)
class Conditions:
    """What was seen right after something was measured. None is what the kernel does not tell."""

    reference_s: float  #: of the fixed kernel, which measures the clock that is really there
    temperature_c: float | None = None  #: of the hottest zone
    khz: int | None = None  #: of the fastest processor, as the governor has set it
    governor: str | None = None  #: several with commas where processors differ

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)


def conditions(root: Path = Path("/")) -> Conditions:
    """Those of this machine now: 1 to 10 ms, most of it for the reference."""
    processors = root / "sys/devices/system/cpu"
    return Conditions(
        reference_s(), temperature_c(root / "sys/class/thermal"), current_khz(processors), governor(processors)
    )


def reference_s() -> float:
    """Seconds of the fixed kernel on one core: the fastest of a few, for what else runs only ever takes away."""
    import numpy as np

    numbers = np.full(_NUMBERS, 2.0, dtype=np.float32)
    roots = np.empty_like(numbers)
    fastest_s = float("inf")
    for _ in range(_SAMPLES):
        start_s = time.perf_counter()
        for _ in range(_CALLS):
            np.sqrt(numbers, out=roots)
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return fastest_s


def governor(folder: Path) -> str | None:
    """What governs the clocks of all processors: one word, or several with commas where they differ."""
    found = {path.read_text().strip() for path in folder.glob("cpu[0-9]*/cpufreq/scaling_governor")}
    return ",".join(sorted(found)) or None


def current_khz(folder: Path) -> int | None:
    """The highest clock of any processor now."""
    return max(_numbers(folder, "cpu[0-9]*/cpufreq/scaling_cur_freq"), default=None)


def temperature_c(folder: Path) -> float | None:
    """Degrees Celsius of the hottest thermal zone."""
    return max((value / 1000 for value in _numbers(folder, "thermal_zone*/temp")), default=None)


def _numbers(folder: Path, pattern: str) -> list[int]:
    found = []
    for path in folder.glob(pattern):
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # a sensor or a processor that is switched off
            continue
    return found
