"""Measures candidates on this process's GPU: the steps of a process that `spawned` has started for it, which sees that
GPU alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tuning_db.keys import DeviceIdentity, to_json
from workers.devices import local_gpu
from workers.devices.health import Conditions
from workers.search.candidates import Built, Measurement

#: How often the reference kernel is run: what else runs on a GPU only ever takes away.
_SAMPLES = 6
_REFERENCE = Measurement(repeat=1, min_repeat_s=0.0005)

#: Of this process, from `prepare` on: the loaded reference kernel.
_reference: Any = None


def preload(identity: DeviceIdentity, reference: Built) -> tuple[str, ...]:
    """What the process does before it serves. `reference`: of `gpu_steps.build_reference`."""
    asked = {"device": to_json(identity), "library": reference.library, "arguments": reference.arguments}
    return (f"{__name__}:prepare:{json.dumps(asked)}",)


def prepare(asked: str) -> None:
    """UnusableDevice unless this process's GPU is the one that is asked for, and TVM reaches it."""
    global _reference
    data = json.loads(asked)
    local_gpu.load_runtime()
    local_gpu.expect(DeviceIdentity.from_json(data["device"]))
    from workers.search import sampling

    built = Built(data["library"], tuple((dtype, tuple(shape)) for dtype, shape in data["arguments"]), None)
    [_reference] = sampling.samplers([built], _REFERENCE, _gpu())


def measure(
    built: Built, measurement: Measurement, hopeless_s: float | None = None
) -> tuple[tuple[float, ...], Conditions]:
    """`sampling.measure_guarded`, on the GPU."""
    from workers.search import sampling

    run_s = sampling.measure(built, measurement, hopeless_s, _gpu())
    for _ in range(_SAMPLES):
        _reference.sample()
    temperature_c, khz = local_gpu.sensors(local_gpu.nvml_module())
    return run_s, Conditions(min(_reference.seconds[-_SAMPLES:]), temperature_c, khz)


def measure_in_turn(candidates: Sequence[Built], measurement: Measurement) -> list[tuple[float, ...]]:
    """`sampling.measure_in_turn`, on the GPU."""
    from workers.search import sampling

    return sampling.measure_in_turn(candidates, measurement, _gpu())


def _gpu() -> Any:
    import tvm

    return tvm.cuda(0)
