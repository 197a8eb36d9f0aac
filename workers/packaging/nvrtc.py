"""Compiles CUDA source to machine code of one GPU architecture, by NVIDIA's NVRTC, on a machine that needs no GPU.

NVRTC and the headers that TVM's kernels include are the wheels of the extra `cuda`, and nothing else is looked at: a
toolkit that happens to be installed would be another version than the one that keys name.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tuning_db.errors import BuildFailed
from workers.said import last_line

_INSTALL: Final = 'install it with: pip install "tunery[cuda]"'
#: Package → a header of it, from the folder that is searched for headers.
_HEADERS: Final = {"nvidia-cuda-runtime": "cuda_fp16.h", "nvidia-cuda-cccl": "cuda/std/cstdint"}

#: What precompiled headers are of, before anything else in a source: TVM includes these too, between declarations.
_FIRST: Final = "#include <cuda/std/cstdint>\n#include <cuda/std/type_traits>\n#include <cuda_fp16.h>\n"


class NvrtcMissing(BuildFailed):
    """NVRTC or what it needs is not installed; the message says how to install it."""


@lru_cache(maxsize=1)
def version() -> str:
    """NVRTC's version, such as "13.5", after finding everything that compiling needs. NvrtcMissing if some lacks."""
    major, minor = _ask(_nvrtc().nvrtcVersion())
    _include_options()
    return f"{major}.{minor}"


def architectures() -> tuple[str, ...]:
    """The architectures that the installed NVRTC makes machine code for, such as "sm_90"."""
    return tuple(f"sm_{number}" for number in _ask(_nvrtc().nvrtcGetSupportedArchs()))


def check(arch: str) -> None:
    """BuildFailed unless machine code for `arch` can be made here."""
    known = architectures()
    if arch not in known:
        raise BuildFailed(f"NVRTC {version()} makes no machine code for {arch}; it knows {', '.join(known)}")


def compile_source(source: str, arch: str, *, fast_math: bool, headers: Path | None = None) -> bytes:
    """A cubin: machine code for `arch`, such as "sm_87", alone.

    `fast_math` rounds divisions and roots less exactly and flushes denormal numbers to zero. `headers`: what
    `precompile_headers` has left for the same arch and `fast_math`, in a process that has forked this one or was forked
    by the same; another's is not read. BuildFailed carries the compiler's first error.
    """
    if headers is not None:
        with suppress(BuildFailed):
            return _compile(_FIRST + source, arch, fast_math, f"--use-pch={headers}")
    return _compile(source, arch, fast_math)


def precompile_headers(path: Path, arch: str, *, fast_math: bool) -> None:
    """Leave in `path` the headers that all of TVM's kernels include, read: that takes three quarters of the time of
    compiling one. BuildFailed if NVRTC does not."""
    _compile(_FIRST, arch, fast_math, f"--create-pch={path}")


def _compile(source: str, arch: str, fast_math: bool, *more: str) -> bytes:
    check(arch)
    nvrtc = _nvrtc()
    program = _ask(nvrtc.nvrtcCreateProgram(source.encode(), b"kernels.cu", 0, None, None))
    try:
        options = [f"--gpu-architecture={arch}", "-default-device", "--device-int128", "--disable-warnings", *more]
        options += ["--use_fast_math"] if fast_math else []
        options += _include_options()
        [result] = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_ask(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            said = log.rstrip(b"\0").decode(errors="replace")
            errors = [line for line in said.splitlines() if "error" in line]
            raise BuildFailed(f"NVRTC could not compile for {arch}: {errors[0] if errors else last_line(said)}")
        cubin = bytearray(_ask(nvrtc.nvrtcGetCUBINSize(program)))
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library, which is a wheel of its own
    except (ImportError, RuntimeError) as error:
        raise NvrtcMissing(f"NVRTC is not installed ({last_line(str(error))}); {_INSTALL}") from error
    return nvrtc


def _ask(answer: tuple[Any, ...]) -> Any:
    """What comes after the status, alone or as a tuple. BuildFailed if the status is an error."""
    status, *rest = answer
    if status.value != 0:
        raise BuildFailed(f"NVRTC answered {status.name}")
    return rest[0] if len(rest) == 1 else tuple(rest)


@lru_cache(maxsize=1)
def _include_options() -> tuple[str, ...]:
    options = []
    for package, header in _HEADERS.items():
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            raise NvrtcMissing(f"{package} is not installed; {_INSTALL}") from None
        found = [str(file.locate()) for file in files if str(file).endswith(f"/{header}")]
        if not found:
            raise NvrtcMissing(f"{package} does not hold {header}; {_INSTALL}")
        options.append(f"-I{found[0].removesuffix(f'/{header}')}")
    return tuple(options)
