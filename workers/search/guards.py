"""Guards on measuring: a trial counts only where the machine was as fast as when the search began.

`sampling` warms each candidate up and repeats until its samples agree. After each trial a fixed reference kernel runs
in the same process (`devices.health`), and these rules judge what it took: a trial whose reference drifted is discarded
and measured again, after a pause to cool down where it has become warmer. A machine that stays at another speed is
taken as it is, with a warning. The rules read no clock, so they hold of recorded times; each slot is judged by its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from workers.devices.health import Conditions

T = TypeVar("T")

#: The reference may take so much longer, or shorter, than at first.
DRIFT: Final = 0.10
#: A trial is measured again so many times at most.
REPEATS: Final = 2
#: So many trials of a search, or this share of them, are measured again: a machine that others use would never be done.
_FREE_REPEATS: Final = 8
_REPEATED_SHARE: Final = 0.1
#: References in a row that agree with each other make the speed that the machine has now.
_STEADY: Final = 3
#: Slower and so much warmer than at first, a machine is let cool down: these pauses before the first and the second
#: repeat.
_WARMER_C: Final = 5.0
COOLING_S: Final = (5.0, 20.0)


@dataclass(slots=True)
class Guard:
    """The judge of one search. Thread-safe. `warn` is told of what users should know."""

    warn: Callable[[str], None] = lambda message: None
    sleep: Callable[[float], None] = time.sleep
    trials: int = 0  #: that were judged
    repeated: int = 0  #: trials that were discarded and measured again
    unsettled: int = 0  #: trials that count though the reference had drifted: it was not steady, or repeats were spent
    cooled_s: float = 0.0  #: seconds of pauses
    #: By slot: what counts as its speed, and what was seen last.
    level: dict[str, Conditions] = field(default_factory=dict)
    latest: dict[str, Conditions] = field(default_factory=dict)
    _outside: dict[str, list[float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def measure(self, once: Callable[[], tuple[T, str, Conditions | None]]) -> T:
        """What `once` returns first, when it counts. It measures one trial, and says on which slot and in which
        conditions; None for a trial that failed, which is nobody's drift."""
        for repeats in range(REPEATS + 1):
            value, slot, found = once()
            pause_s = None if found is None else self.judge(slot, found, repeats)
            if pause_s is None:
                break
            if pause_s:
                self.sleep(pause_s)
        return value

    def judge(self, slot: str, found: Conditions, repeats: int) -> float | None:
        """None if the trial counts, which has been measured again `repeats` times; else it is to be measured again
        after so many seconds."""
        with self._lock:
            self.trials += repeats == 0
            self.latest[slot] = found
            level = self.level.setdefault(slot, found)
            if abs(found.reference_s / level.reference_s - 1) <= DRIFT:
                self._outside.pop(slot, None)
                return None
            last = self._outside[slot] = [*self._outside.get(slot, ()), found.reference_s][-_STEADY:]
            allowed = max(_FREE_REPEATS, _REPEATED_SHARE * self.trials)
            if repeats < REPEATS and self.repeated + 1 <= allowed:
                self.repeated += 1
                if found.reference_s < level.reference_s or not _is_warmer(found, level):
                    return 0.0
                self.cooled_s += COOLING_S[repeats]
                return COOLING_S[repeats]
            if len(last) == _STEADY and max(last) <= (1 + DRIFT) * min(last):
                self.level[slot] = found
                del self._outside[slot]
                message = _changed(slot, level, found)
            else:
                self.unsettled += 1
                return None
        self.warn(message)
        return None


def _is_warmer(found: Conditions, level: Conditions) -> bool:
    if found.temperature_c is None or level.temperature_c is None:
        return False
    return found.temperature_c - level.temperature_c > _WARMER_C


def _changed(slot: str, before: Conditions, now: Conditions) -> str:
    times = now.reference_s / before.reference_s
    how = f"{times:.2f} times as long as" if times > 1 else f"{times:.2f} of the time of"
    pairs = {
        "°C": (before.temperature_c, now.temperature_c), "kHz": (before.khz, now.khz),
        "governor": (before.governor, now.governor),
    }  # fmt: skip
    told = "".join(f", {name} {a} → {b}" for name, (a, b) in pairs.items() if a != b)
    return (
        f"{slot.removeprefix('@') or 'this machine'} stays at another speed{told}: the reference kernel takes {how} "
        "before, and what is measured from now on cannot be compared with what was measured until now"
    )
