"""Measures compiled candidates where it runs: on a worker in a forked child of `forkserver`, on a board in one of its
server's, for a GPU in a process of `spawned`. Needs TVM's runtime alone.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tvm.runtime

from workers.devices.health import Conditions, conditions
from workers.search.candidates import Built, Measurement

_pool = np.empty(0, dtype=np.float32)
#: Numbers in a cache line: TVM takes no tensor that begins within one.
_LINE: Final = 16
#: Numbers that are made; the others are copies of them.
_BLOCK: Final = 1 << 20
#: Copies of a kernel's weights at most: small ones stay in a cache within a model as well.
MAX_COPIES: Final = 512
#: Samples of one candidate that are this close to each other are believed.
_AGREEMENT: Final = 1.05
#: How many times the samples wanted are taken at most to find some that agree.
_EXTRA: Final = 3


def fill_pool(size: str) -> None:
    """Have so many bytes of numbers at hand, which forked children share: making them takes longer than measuring.

    They repeat each `_BLOCK`, by which no cache is fooled: it goes by their places.
    """
    global _pool
    block = np.random.default_rng(0).random(_BLOCK, dtype=np.float32)
    # The lower half of each, read as float16, is of [6e-5, 1) too: neither NaN nor what may be converted more slowly.
    bits = block.view(np.uint32)
    bits &= 0xFFFF3BFF
    bits |= 0x00000400
    numbers = np.empty(int(size) // 4 + _LINE, dtype=np.float32)
    begin = (-numbers.ctypes.data % (4 * _LINE)) // 4
    _pool = numbers[begin : begin + int(size) // 4]
    for start in range(0, _pool.size, _BLOCK):
        part = _pool[start : start + _BLOCK]
        part[:] = block[: part.size]


def measure(
    built: Built, measurement: Measurement, hopeless_s: float | None = None, device: Any = None
) -> tuple[float, ...]:
    """Seconds of one call, on the CPU unless another `device` of TVM's is given: `measurement.repeat` samples, or one
    alone where that is above `hopeless_s` already.

    While samples disagree more are taken, up to `_EXTRA` times as many, and the fastest are kept: what else runs on the
    machine makes a sample longer, never shorter. The caller sees to it that nothing of ours does.
    """
    [sampler] = samplers([built], measurement, device)
    while not sampler.is_settled(measurement.repeat, hopeless_s):
        sampler.sample()
    return sampler.fastest(measurement.repeat)


def measure_guarded(
    built: Built, measurement: Measurement, hopeless_s: float | None = None
) -> tuple[tuple[float, ...], Conditions]:
    """`measure`, and how the machine was right after it, by which `guards` judges."""
    return measure(built, measurement, hopeless_s), conditions()


def measure_in_turn(
    candidates: Sequence[Built], measurement: Measurement, device: Any = None
) -> list[tuple[float, ...]]:
    """Seconds of one call of each, in rounds over all of them: what disturbs the machine for a while disturbs them all
    alike, so that they can be compared better than when each is measured at a time of its own. `measurement.repeat`
    samples of each are kept, the fastest of `_EXTRA` times as many."""
    found = samplers(candidates, measurement, device)
    for _ in range(_EXTRA * measurement.repeat - 1):
        for sampler in found:
            sampler.sample()
    return [sampler.fastest(measurement.repeat) for sampler in found]


@dataclass(slots=True)
class Sampler:
    """One loaded candidate and the seconds of one call that were seen, in their order.

    Each call reads another copy of the weights. Within a model a kernel's weights were last read an inference ago, and
    all others' since: measured with weights that are still in a cache, an algorithm that reads four times as many
    (Winograd's) looks faster than it will be.
    """

    function: Any
    arguments: list[list[Any]]  #: in turns
    seconds: list[float]
    device: Any  #: of TVM's
    number: int = 1  #: calls of one sample

    def sample(self) -> None:
        function, arguments, turns = self.function, self.arguments, len(self.arguments)
        start_s = time.perf_counter()
        for call in range(self.number):
            function(*arguments[call % turns])
        self.device.sync()  # calls to a GPU return before they are done
        self.seconds.append((time.perf_counter() - start_s) / self.number)

    def fastest(self, count: int) -> tuple[float, ...]:
        """In the order measured."""
        kept = sorted(range(len(self.seconds)), key=self.seconds.__getitem__)[:count]
        return tuple(self.seconds[number] for number in sorted(kept))

    def is_settled(self, count: int, hopeless_s: float | None) -> bool:
        if hopeless_s is not None and self.seconds[0] > hopeless_s and len(self.seconds) == 1:
            return True
        fastest = self.fastest(count)
        agree = len(fastest) == count and max(fastest) <= _AGREEMENT * min(fastest)
        return agree or len(self.seconds) >= _EXTRA * count


def samplers(candidates: Sequence[Built], measurement: Measurement, device: Any = None) -> list[Sampler]:
    """With one sample each, whose calls are as many as make it long enough."""
    device = tvm.runtime.cpu() if device is None else device
    os.environ["TVM_NUM_THREADS"] = str(measurement.threads)
    # Bound to cores, threads wait for whatever else runs there, while another core may be idle.
    os.environ["TVM_BIND_THREADS"] = "0"
    generator = np.random.default_rng(0)
    made = []
    for built in candidates:
        module = tvm.runtime.load_module(built.library)
        sampler = Sampler(module["main"], _arguments(built, generator, device), [], device)
        # The first samples also find how many calls the others need to be long enough.
        sampler.sample()
        while (total_s := sampler.seconds.pop() * sampler.number) < measurement.min_repeat_s:
            grow = min(100.0, 1.2 * measurement.min_repeat_s / max(total_s, 1e-9))
            sampler.number = max(sampler.number + 1, math.ceil(sampler.number * grow))
            sampler.sample()
        sampler.seconds.append(total_s / sampler.number)
        made.append(sampler)
    return made


def _arguments(built: Built, generator: np.random.Generator, device: Any) -> list[list[Any]]:
    """The arguments of one call after another: all the same, but for the weights, which lie on the CPU."""
    fixed = {
        index: random_tensor(generator, *tensor, device)
        for index, tensor in enumerate(built.arguments)
        if index not in built.weights
    }
    # In numbers of the pool, which are as long as four bytes.
    sizes = {
        index: -(-math.prod(shape) * np.dtype(dtype).itemsize // _pool.itemsize)
        for index, (dtype, shape) in enumerate(built.arguments)
        if index in built.weights
    }
    # Every copy begins in a cache line of its own.
    strides = {index: -(-size // _LINE) * _LINE for index, size in sizes.items()}
    one_copy = sum(strides.values())
    copies = max(1, min(MAX_COPIES, _pool.size // one_copy)) if one_copy else 1
    if not one_copy or one_copy > _pool.size:
        missing = {index: random_tensor(generator, *built.arguments[index], device) for index in built.weights}
        return [[(fixed | missing)[index] for index in range(len(built.arguments))]]
    turns = []
    place = 0
    for _ in range(copies):
        weights = {}
        for index in built.weights:
            dtype, shape = built.arguments[index]
            numbers = _pool[place : place + sizes[index]].view(dtype)[: math.prod(shape)].reshape(shape)
            weights[index] = tvm.runtime.from_dlpack(numbers)
            place += strides[index]
        turns.append([(fixed | weights)[index] for index in range(len(built.arguments))])
    return turns


def random_tensor(generator: np.random.Generator, dtype: str, shape: Sequence[int], device: Any = None) -> Any:
    """Floats in [0, 1), integers 0: valid as an index into anything, and the time of integer code does not depend
    on its values."""
    if dtype.startswith("float"):
        data = np.asarray(generator.random(shape, dtype=np.float32)).astype(dtype)
    else:
        data = np.zeros(shape, dtype="uint8" if dtype == "bool" else dtype).astype(dtype)
    return tvm.runtime.tensor(data, device)
