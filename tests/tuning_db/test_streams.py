"""Inferences that are streamed through a GPU are answered as if each ran alone, and in less time. The GPU here is one
that does everything as late as it may (`tests/cuda_runtime.py`); its waits, left out, give wrong numbers."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cuda_runtime import LEGACY, Runtime
from tuning_db.streams import CudaFailed, Overlapped

Array = NDArray[np.float32]
BATCHES = [[np.full((2, 3), number, np.float32), np.asarray(number, np.int64)] for number in range(9)]


@dataclass(eq=False)
class Memory:
    """A tensor on the device. When the host drops it, the pool gives its memory to the next one."""

    array: NDArray[Any]
    pool: list[NDArray[Any]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def __del__(self) -> None:
        self.pool.append(self.array)


@dataclass
class Model:
    """x + 10 n, and n itself, by two kernels with an intermediate between them that comes from the pool."""

    gpu: Runtime
    pool: list[NDArray[Any]] = field(default_factory=list)
    on_default: bool = False
    wrong: int = -1  #: the call that is refused
    calls: int = 0

    def tensors(self) -> list[Memory]:
        return [Memory(np.zeros((2, 3), np.float32)), Memory(np.zeros((), np.int64))]

    @contextmanager
    def on_default_stream(self) -> Iterator[None]:
        self.on_default = True
        yield
        self.on_default = False

    def __call__(self, x: Memory, n: Memory) -> list[Memory]:
        assert self.on_default
        self.calls += 1
        if self.calls == self.wrong + 1:
            raise ValueError("the kernel is refused")
        between, y = self._empty(), self._empty()
        b, out = between.array, y.array
        self.gpu.kernel(lambda: np.multiply(n.array, 10, out=b, casting="unsafe"), 1.5)
        self.gpu.kernel(lambda: np.add(x.array, b, out=out), 1.5)
        return [y, n]  # `between` is dropped before its kernels have run, and its memory is the next call's

    def _empty(self) -> Memory:
        array = self.pool.pop() if self.pool else np.zeros((2, 3), np.float32)
        return Memory(array, self.pool)

    def overlapped(self) -> Overlapped:
        return Overlapped(self, self.tensors, self.on_default_stream, self.gpu)


def is_right(number: int, answer: Sequence[NDArray[Any]]) -> bool:
    y, n = answer
    return bool((y == 11 * number).all()) and y.shape == (2, 3) and n.shape == () and int(n) == number


def check(stream: Iterable[Sequence[NDArray[Any]]], found: list[bool]) -> None:
    """Put down for each answer whether it is right."""
    for number, answer in enumerate(stream):
        found.append(is_right(number, answer))


def answers(gpu: Runtime) -> list[list[NDArray[Any]]]:
    with Model(gpu).overlapped() as overlapped:
        return list(overlapped.stream(BATCHES))


@pytest.mark.parametrize("seed", [None, *range(40)])
def test_answers_are_those_of_each_alone(seed: int | None) -> None:
    """Every batch's answer comes in its place with its own numbers, however the GPU's streams advance; and stays so
    while later ones are computed."""
    gpu = Runtime(None if seed is None else Random(seed))
    found = answers(gpu)
    assert [is_right(number, answer) for number, answer in enumerate(found)] == [True] * len(BATCHES)
    assert gpu.is_empty()


@pytest.mark.parametrize(
    "forgotten",
    [
        pytest.param(lambda name, stream: (name, stream) == ("cudaStreamWaitEvent", LEGACY), id="inputs"),
        pytest.param(lambda name, stream: name == "cudaStreamWaitEvent" and stream != LEGACY, id="computation"),
        pytest.param(lambda name, _stream: name == "cudaStreamSynchronize", id="outputs"),
    ],
)
def test_every_wait_is_needed(forgotten: Callable[[str, Any], bool]) -> None:
    """Without the computation's wait for its inputs, the outputs' for the computation, or the host's for the outputs,
    the GPU of these tests gives wrong numbers: they would show that one is missing."""
    found = []
    for seed in range(10):
        gpu = Runtime(Random(seed), forgotten=forgotten)
        with Model(gpu).overlapped() as overlapped:
            found += [is_right(number, answer) for number, answer in enumerate(overlapped.stream(BATCHES))]
            gpu.forgotten = lambda _name, _stream: False
            for stream in gpu.streams:
                gpu.cudaStreamSynchronize(stream)
    assert not all(found)


def test_copies_take_no_time_of_their_own() -> None:
    """Of inferences of 3 s with a second's copy each way, all but the first and the last copies pass meanwhile."""
    gpu = Runtime(copy_s=0.5)  # two inputs, two outputs
    answers(gpu)
    assert gpu.clock_s == pytest.approx(1 + 3 * len(BATCHES) + 1)


def test_where_copies_take_longer() -> None:
    """Inferences whose copies take longer than their computation cost what the slower of the two directions does, and
    two of them share what is left."""
    gpu = Runtime(copy_s=4)
    answers(gpu)
    alone_s = 8 + 3 + 8
    assert gpu.clock_s < 0.6 * alone_s * len(BATCHES)


def test_nothing_is_taken_before_it_is_asked_for() -> None:
    """A stream takes two batches ahead of the answers, and none before it is begun."""
    taken: list[int] = []

    def batches() -> Iterator[list[NDArray[Any]]]:
        for number, batch in enumerate(BATCHES):
            taken.append(number)
            yield batch

    with Model(Runtime()).overlapped() as overlapped:
        stream = overlapped.stream(batches())
        assert taken == []
        assert is_right(0, next(stream))
        assert taken == [0, 1, 2]
        assert is_right(1, next(stream))
        assert taken == [0, 1, 2, 3]


@pytest.mark.parametrize("many", [0, 1, 2, 3])
def test_few_batches(many: int) -> None:
    """No batch has no answer, and fewer than are in flight have theirs."""
    with Model(Runtime()).overlapped() as overlapped:
        assert len(list(overlapped.stream(BATCHES[:many]))) == many
        assert len(list(overlapped.stream(BATCHES[:many]))) == many


@pytest.mark.parametrize("wrong", [0, 1, 2, 5])
def test_an_error_comes_in_its_place(wrong: int) -> None:
    """What a batch is refused for is raised after the answers before it; nothing is left, and the next stream works."""
    gpu = Runtime(Random(wrong))
    model = Model(gpu, wrong=wrong)
    with model.overlapped() as overlapped:
        with pytest.raises(ValueError, match="the kernel is refused"):
            check(overlapped.stream(BATCHES), found := [])
        assert found == [True] * wrong
        assert all(is_right(number, answer) for number, answer in enumerate(overlapped.stream(BATCHES)))
    assert gpu.is_empty()


@pytest.mark.parametrize("wrong", [0, 1, 4])
def test_an_error_of_the_batches(wrong: int) -> None:
    """What the iterable raises in place of a batch, or a batch is refused for, comes after the answers before it."""

    def batches() -> Iterator[list[NDArray[Any]]]:
        yield from BATCHES[:wrong]
        raise KeyError("no such file")

    with Model(Runtime()).overlapped() as overlapped:
        for source, kind in (
            (batches(), KeyError),
            ([*BATCHES[:wrong], [np.zeros(7, np.float32), np.int64(1)]], ValueError),
        ):
            with pytest.raises(kind):
                check(overlapped.stream(source), found := [])
            assert found == [True] * wrong


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_stream_that_is_given_up(taken: int) -> None:
    """Closed early, a stream waits for what is in flight; what it held is freed with the rest, or used by the next."""
    gpu = Runtime()
    overlapped = Model(gpu).overlapped()
    stream = overlapped.stream(BATCHES)
    for number in range(taken):
        assert is_right(number, next(stream))
    stream.close()
    assert not any(gpu.streams.values())
    assert all(is_right(number, answer) for number, answer in enumerate(overlapped.stream(BATCHES)))
    left = overlapped.stream(BATCHES)
    next(left)
    overlapped.close()
    assert gpu.is_empty()


@pytest.mark.parametrize("name", ["cudaHostAlloc", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags"])
@pytest.mark.parametrize("after", [0, 1])
def test_no_memory(name: str, after: int) -> None:
    """Where CUDA has no more of something, that is said, and what there was of it is freed."""
    counted = 0

    def refused(called: str) -> bool:
        nonlocal counted
        counted += called == name
        return called == name and counted > after

    gpu = Runtime(refused=refused)
    with pytest.raises(CudaFailed, match=f"{name}: cudaErrorMemoryAllocation"):
        Model(gpu).overlapped()
    assert gpu.is_empty()


def test_a_gpu_that_fails() -> None:
    """An error of the GPU is raised in place of the answer that was waited for, and what can be freed is."""
    gpu = Runtime()
    with Model(gpu).overlapped() as overlapped:
        stream = overlapped.stream(BATCHES)
        assert is_right(0, next(stream))
        gpu.refused = lambda name: name == "cudaStreamSynchronize"
        with pytest.raises(CudaFailed, match="cudaStreamSynchronize: cudaErrorIllegalAddress"):
            next(stream)
    assert gpu.is_empty()


def test_the_recorded_runtime_is_called_as_the_real_one() -> None:
    """Every function that these tests' runtime has, CUDA's own has, with parameters of the same names; and without a
    driver that one says so."""
    runtime = pytest.importorskip("cuda.bindings.runtime", reason='pip install "tunery[cuda]"')
    for name, function in inspect.getmembers(Runtime, inspect.isfunction):
        if not name.startswith("cuda"):
            continue
        said = str(getattr(runtime, name).__doc__).partition("\n")[0].partition("(")[2].rstrip(")")
        theirs = [part.partition(":")[0].split()[-1] for part in said.split(", ")]
        assert list(inspect.signature(function).parameters)[1:] == theirs, name
    for name in ("cudaStreamLegacy", "cudaStreamNonBlocking", "cudaEventDisableTiming", "cudaHostAllocDefault"):
        assert getattr(runtime, name) == getattr(Runtime, name)
    assert runtime.cudaMemcpyKind.cudaMemcpyDefault == Runtime.cudaMemcpyKind.cudaMemcpyDefault
    if runtime.cudaGetDeviceCount()[0] != runtime.cudaError_t.cudaSuccess:
        with pytest.raises(CudaFailed, match=r"cudaStreamCreateWithFlags: .*driver"):
            Overlapped(_never, list, _nowhere)


def test_cuda_is_not_imported_before_it_is_needed() -> None:
    """Loading code that can use GPUs imports nothing of CUDA."""
    program = (
        "import sys, service.loading, workers.packaging.reference, workers.devices.local_gpu, workers.devices.lane\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'cuda', 'tvm', 'pynvml', 'tensorrt'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def _never(*_tensors: Any) -> Any:
    raise AssertionError("called")


def _nowhere() -> AbstractContextManager[None]:
    raise AssertionError("called")
