"""The rules by which trials count, on recorded and on simulated references."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from workers.devices.health import Conditions
from workers.search.guards import COOLING_S, Guard

#: As of a Raspberry Pi 4 without a heat sink under load (raspberrypi.com, "Thermal testing Raspberry Pi 4"): from
#: 80 °C on its clock goes from 1.5 GHz down to 1 GHz in steps. Seconds of the reference, in the clocks' proportion.
THROTTLING = [
    (Conditions(0.0014, 62.0, 1_500_000, "ondemand"), 3),
    (Conditions(0.0014, 79.0, 1_500_000, "ondemand"), 3),
    (Conditions(0.0021, 81.0, 1_000_000, "ondemand"), 9),
]


def play(guard: Guard, references: Sequence[Conditions | float], slot: str = "") -> list[int]:
    """Measures trials until the recording ends. Which of the entries counted."""
    entries = enumerate(references)
    counted: list[int] = []

    def once() -> tuple[int, str, Conditions]:
        number, found = next(entries)
        return number, slot, found if isinstance(found, Conditions) else Conditions(found)

    while True:
        try:
            counted.append(guard.measure(once))
        except StopIteration:
            return counted


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def pauses_s() -> list[float]:
    return []


@pytest.fixture
def guard(said: list[str], pauses_s: list[float]) -> Guard:
    return Guard(said.append, pauses_s.append)


def test_a_steady_machine(guard: Guard, said: list[str], pauses_s: list[float]) -> None:
    """Within a tenth of the first reference each trial counts, and is measured once."""
    assert play(guard, [1.0, 1.09, 0.91, 1.0, 1.099]) == [0, 1, 2, 3, 4]
    assert (guard.trials, guard.repeated, said, pauses_s) == (5, 0, [], [])


def test_a_disturbance(guard: Guard, said: list[str], pauses_s: list[float]) -> None:
    """A trial with a reference that drifted is discarded and measured again at once; the next that fits counts."""
    assert play(guard, [1.0, 1.3, 1.0, 0.8, 1.5, 1.02]) == [0, 2, 5]
    assert (guard.trials, guard.repeated, guard.unsettled) == (3, 3, 0)
    assert (said, pauses_s) == ([], [])


def test_a_board_that_throttles(guard: Guard, said: list[str], pauses_s: list[float]) -> None:
    """Warm, but as fast as before, it goes on; slower and warmer, it is let cool down; when it stays slow, that is its
    speed from now on, which is said once with clock and temperature."""
    recording = [found for found, times in THROTTLING for _ in range(times)]
    assert play(guard, recording, "@pi:9090") == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 14]
    assert pauses_s == list(COOLING_S)
    assert guard.cooled_s == sum(COOLING_S)
    assert len(said) == 1
    assert said[0].startswith(
        "pi:9090 stays at another speed, °C 62.0 → 81.0, kHz 1500000 → 1000000: the reference kernel takes 1.50 times"
    )
    assert guard.level["@pi:9090"].reference_s == guard.latest["@pi:9090"].reference_s == 0.0021


def test_a_clock_that_goes_up(guard: Guard, said: list[str], pauses_s: list[float]) -> None:
    """Faster for good, though warmer: nothing is to be waited for."""
    warmer = Conditions(0.5, 90.0)
    assert play(guard, [Conditions(1.0, 40.0), warmer, warmer, warmer, warmer]) == [0, 3, 4]
    assert pauses_s == []
    assert "takes 0.50 of the time of before" in said[0]


def test_a_machine_that_is_never_steady(guard: Guard, said: list[str]) -> None:
    """Of a machine that others use a tenth of the trials is measured again at most, and it is counted what counts all
    the same."""
    counted = play(guard, [1.0, *([1.2, 1.5, 1.9, 2.4] * 200)])
    assert guard.repeated <= 0.1 * guard.trials
    assert len(counted) == guard.trials >= 720
    assert guard.unsettled == guard.trials - 1
    assert said == []


def test_each_slot_by_its_own_speed(guard: Guard, said: list[str]) -> None:
    """Boards of one device need not be equally fast: neither is judged by the other, nor by what failed."""
    assert play(guard, [1.0, 1.0], "@a") == [0, 1]
    assert play(guard, [2.0, 2.0], "@b") == [0, 1]
    assert guard.measure(lambda: ("failed", "@a", None)) == "failed"
    assert (guard.trials, guard.repeated, said) == (4, 0, [])
    assert {slot: level.reference_s for slot, level in guard.level.items()} == {"@a": 1.0, "@b": 2.0}
