"""How long each kernel of a compiled library takes, measured in a forked child."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from tuning_db.keys import TensorSpec
from workers.packaging.reference import INTEGER_RANGES, example_inputs


def profile(
    library: str,
    inputs: Sequence[TensorSpec],
    threads: int,
    repeats: int = 7,
    integers: tuple[int, int] = INTEGER_RANGES[0],
) -> dict[str, float]:
    """Median seconds of one call of each kernel, by its name in the module. The first run is a warm-up."""
    os.environ["TVM_NUM_THREADS"] = str(threads)
    machine = relax.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
    examples = example_inputs(inputs, 0, integers)
    arguments = [tvm.runtime.tensor(examples[spec.name]) for spec in inputs]
    machine["main"](*arguments)
    taken: defaultdict[str, list[float]] = defaultdict(list)
    start_s = 0.0

    def instrument(_function: Any, name: str, before_run: bool, _result: Any, *_arguments: Any) -> None:
        nonlocal start_s
        if before_run:
            start_s = time.perf_counter()
        else:
            taken[name].append(time.perf_counter() - start_s)

    machine.set_instrument(instrument)
    for _ in range(repeats):
        machine["main"](*arguments)
    return {name: statistics.median(samples) for name, samples in taken.items()}
