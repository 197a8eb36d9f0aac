"""Streams inferences through a GPU: two are in flight, so that the copies of one overlap the computation of the other.

For workers, which time libraries so, and for programs that load libraries. Needs NumPy and, once something is streamed,
CUDA's runtime as `cuda.bindings.runtime`, which nothing here imports before. Of TVM nothing: its tensors are asked what
any tensor on a device tells.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Arrays = list[NDArray[Any]]
#: While one of them is computed, the copies of the one before and of the one after run.
IN_FLIGHT: Final = 2
INSTALL: Final = 'pip install "tunery[cuda]"'


class CudaFailed(RuntimeError):
    """CUDA is not there, or refused something. The message says what."""


class Tensor(Protocol):
    """A tensor on the GPU, contiguous, such as TVM's."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...
    def data_ptr(self) -> int: ...


def load_cudart() -> None:
    """Make CUDA's runtime known to this process, before TVM is imported, whose own libraries are linked against it.
    CudaFailed if it is not installed."""
    try:
        from cuda import pathfinder

        pathfinder.load_nvidia_dynamic_lib("cudart")
    except (ImportError, RuntimeError) as error:
        raise CudaFailed(f"CUDA's runtime is not installed ({error}); {INSTALL}") from None


def cuda_runtime() -> Any:
    """The module `cuda.bindings.runtime`. CudaFailed without it."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise CudaFailed(f"CUDA cannot be called: cuda-bindings is not installed ({error}); {INSTALL}") from None
    return runtime


class Overlapped:
    """A model's function on CUDA's first GPU, fed through pinned buffers. Frees what it holds when it is closed.

    Why no inference reads what another one writes:

    - TVM launches each kernel on the stream that TVM-FFI holds for the calling thread (`TVMFFIEnvGetStream`, read at
      every launch), and its VM takes intermediates and outputs from one pool for the whole process, to which they
      return when the host drops them, whether or not the kernels that use them have run. Two computations on two
      streams would be given the same memory. So all of them, plain calls and other libraries too, run on one stream:
      the legacy default one, which `on_default_stream` chooses for the length of a call, whatever the thread had.
    - Only copies overlap it. Each inference in flight has a stream of its own for them, "non-blocking": any other would
      wait for the default stream by itself, and that for it. So every wait is written here: the computation waits for
      its inputs (`arrived`), the copy of its outputs for the computation (`computed`), the host for that copy.
    - Outputs are kept until the host has seen them copied: only then may the pool give their memory to another
      computation. Until then nothing else is put into the same slot either, so its inputs have been read.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tensors: Callable[[], Sequence[Tensor]],
        on_default_stream: Callable[[], AbstractContextManager[Any]],
        runtime: Any = None,
    ) -> None:
        """`function`: of device tensors, to one or to several, returning before they are computed. `tensors`: makes
        one inference's inputs on the device. `on_default_stream`: within it, TVM's kernels go to CUDA's default stream.
        `runtime`: the module `cuda.bindings.runtime`.
        """
        self._cuda = _Cuda(cuda_runtime() if runtime is None else runtime)
        self._function, self._on_default_stream = function, on_default_stream
        with ExitStack() as owned:
            self._owned = owned
            self._slots = [self._slot(list(tensors())) for _ in range(IN_FLIGHT)]
            self._owned = owned.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for what is in flight, and free everything."""
        self._abandon()
        self._slots = []
        self._owned.close()

    def stream(self, batches: Iterable[Sequence[NDArray[Any]]]) -> Generator[Arrays, None, None]:
        """The answer to each of `batches`, in their order, each of arrays of its own. One stream at a time.

        A batch is the model's inputs in its order, of its shapes and dtypes. Two are taken ahead of the answers. What
        is raised for a batch, or by `batches` in place of one, comes after the answers to all before it, and ends the
        stream. But where the GPU itself fails, no later answer can be had, and some earlier ones cannot either.
        """
        source = iter(batches)
        free, flying = deque(self._slots), deque[_Slot]()
        failure: Exception | None = None
        try:
            while failure is None:
                try:
                    arrays = next(source)
                except StopIteration:
                    break
                except Exception as error:
                    failure = error
                    break
                answer = None
                if not free:
                    answer = self._collect(flying[0])
                    free.append(flying.popleft())
                try:
                    # Before the answer is handed over: the GPU would wait for whoever takes it.
                    self._submit(free[0], arrays)
                    flying.append(free.popleft())
                except Exception as error:
                    failure = error
                if answer is not None:
                    yield answer
            while flying:
                answer = self._collect(flying[0])
                flying.popleft()
                yield answer
            if failure is not None:
                raise failure
        finally:
            self._abandon()

    def _slot(self, tensors: list[Tensor]) -> _Slot:
        return _Slot(
            self._cuda.copying_stream(self._owned),
            self._cuda.event(self._owned),
            self._cuda.event(self._owned),
            tensors,
            [self._pinned(tensor) for tensor in tensors],
        )

    def _pinned(self, tensor: Tensor) -> NDArray[Any]:
        """Host memory for a tensor's numbers, of its shape, that CUDA reads and writes while the host does other work:
        with any other it copies to a buffer of its own first, and the host waits."""
        shape, dtype = tuple(int(size) for size in tensor.shape), np.dtype(str(tensor.dtype))
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size == 0:
            return np.empty(shape, dtype)
        memory = (ctypes.c_uint8 * size).from_address(self._cuda.pinned(size, self._owned))
        return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)

    def _submit(self, slot: _Slot, arrays: Sequence[NDArray[Any]]) -> None:
        """Enqueue one inference; nothing here waits for the GPU."""
        slot.in_flight = True
        cuda = self._cuda
        for array, staged, tensor in zip(arrays, slot.staged, slot.tensors, strict=True):
            np.copyto(staged, array, casting="no")
            cuda.copy(tensor.data_ptr(), staged.ctypes.data, staged.nbytes, slot.copying)
        cuda.record(slot.arrived, slot.copying)
        cuda.wait(cuda.computing, slot.arrived)
        with self._on_default_stream():
            result = self._function(*slot.tensors)
        slot.results = [result] if hasattr(result, "data_ptr") else list(result)
        cuda.record(slot.computed, cuda.computing)
        cuda.wait(slot.copying, slot.computed)
        if slot.answers is None:  # the first tells what a library's outputs are; they are always the same
            slot.answers = [self._pinned(result) for result in slot.results]
        for answer, result in zip(slot.answers, slot.results, strict=True):
            cuda.copy(answer.ctypes.data, result.data_ptr(), answer.nbytes, slot.copying)

    def _collect(self, slot: _Slot) -> Arrays:
        """Wait for an inference's outputs. Its slot is free then."""
        self._cuda.synchronize(slot.copying)
        slot.results, slot.in_flight = [], False
        return [answer.copy() for answer in slot.answers or []]

    def _abandon(self) -> None:
        """Wait for what nobody waited for, before its memory is used again. Whatever made it fail has been raised."""
        abandoned = [slot for slot in self._slots if slot.in_flight]
        for slot in abandoned:
            self._cuda.quietly("cudaStreamSynchronize", slot.copying)
        if abandoned:  # one that failed half-way has kernels there, but no copy that waits for them
            self._cuda.quietly("cudaStreamSynchronize", self._cuda.computing)
        for slot in abandoned:
            slot.results, slot.in_flight = [], False


@dataclass(slots=True)
class _Slot:
    """What one inference in flight has for itself."""

    copying: Any  #: the stream of its copies
    arrived: Any  #: event: its inputs are on the device
    computed: Any  #: event: its outputs are
    tensors: list[Tensor]
    staged: Arrays  #: its inputs in pinned memory
    results: list[Tensor] = field(default_factory=list)
    answers: Arrays | None = None  #: its outputs in pinned memory, made with the first ones
    in_flight: bool = False


class _Cuda:
    """The calls of CUDA's runtime that are needed here. CudaFailed if one of them is refused."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        #: The default stream by its own name: number 0 is another one where CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM
        #: is set, and TVM's 0 is this one.
        self.computing: Any = runtime.cudaStreamLegacy

    def copying_stream(self, owned: ExitStack) -> Any:
        stream = self._ask("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)
        owned.callback(self.quietly, "cudaStreamDestroy", stream)
        return stream

    def event(self, owned: ExitStack) -> Any:
        event = self._ask("cudaEventCreateWithFlags", self._runtime.cudaEventDisableTiming)
        owned.callback(self.quietly, "cudaEventDestroy", event)
        return event

    def pinned(self, size: int, owned: ExitStack) -> int:
        address = int(self._ask("cudaHostAlloc", size, self._runtime.cudaHostAllocDefault))
        owned.callback(self.quietly, "cudaFreeHost", address)
        return address

    def copy(self, to: int, source: int, size: int, stream: Any) -> None:
        if size:
            # The addresses tell the direction: an output may lie in the host's memory too.
            self._ask("cudaMemcpyAsync", to, source, size, self._runtime.cudaMemcpyKind.cudaMemcpyDefault, stream)

    def record(self, event: Any, stream: Any) -> None:
        self._ask("cudaEventRecord", event, stream)

    def wait(self, stream: Any, event: Any) -> None:
        """What is enqueued to the stream from now on begins after what the event was last recorded behind."""
        self._ask("cudaStreamWaitEvent", stream, event, 0)

    def synchronize(self, stream: Any) -> None:
        self._ask("cudaStreamSynchronize", stream)

    def quietly(self, name: str, *arguments: Any) -> None:
        """Whatever comes of it: after an error of the GPU every call gives that error, which was raised once."""
        getattr(self._runtime, name)(*arguments)

    def _ask(self, name: str, *arguments: Any) -> Any:
        error, *answers = getattr(self._runtime, name)(*arguments)
        if error != self._runtime.cudaError_t.cudaSuccess:
            _, said = self._runtime.cudaGetErrorString(error)
            raise CudaFailed(f"{name}: {said.decode() if isinstance(said, bytes) else error}")
        return answers[0] if answers else None
