"""Which TVM, TVM-FFI and XGBoost this worker runs, and whether that combination has been tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import Final

from tuning_db.keys import Toolchain

#: Combinations that the test suite has passed with, newest first. TVM-FFI 0.1.15 crashes TVM 0.27's databases.
TESTED: Final[tuple[Mapping[str, str], ...]] = (
    {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1", "xgboost": "3.2"},
)


class UntestedToolchain(Exception):
    """The installed versions are not a tested combination. The message says what to install."""


def installed() -> dict[str, str | None]:
    """The versions of the packages that matter; None for one that is missing. Imports none of them."""

    def version(*names: str) -> str | None:
        for name in names:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    return {
        "apache-tvm": version("apache-tvm"),
        "apache-tvm-ffi": version("apache-tvm-ffi"),
        "xgboost": version("xgboost-cpu", "xgboost"),
    }


def check(versions: Mapping[str, str | None]) -> None:
    """UntestedToolchain unless `versions` is a tested combination. Call it before TVM is imported."""
    for tested in TESTED:
        if all(_matches(versions.get(name), wanted) for name, wanted in tested.items()):
            return
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    best = TESTED[0]
    raise UntestedToolchain(
        f"this worker has {found}, which is not a tested combination and may crash or mistune; install "
        f'"apache-tvm=={best["apache-tvm"]}" "apache-tvm-ffi=={best["apache-tvm-ffi"]}" '
        f'"xgboost-cpu~={best["xgboost"]}.0"'
    )


def current() -> Toolchain:
    """The toolchain for keys. Imports TVM."""
    import tvm
    from tvm.target import codegen

    from workers.graph.pipeline import PIPELINE

    versions = installed()
    return Toolchain(
        tvm=str(versions["apache-tvm"] or tvm.__version__),
        tvm_ffi=str(versions["apache-tvm-ffi"]),
        llvm=str(codegen.llvm_version_major()),
        pipeline=PIPELINE,
    )


def current_gpu() -> Toolchain:
    """The toolchain for keys of GPUs. Imports TVM. NvrtcMissing without the extra `cuda`."""
    from workers.graph.gpu import PIPELINE
    from workers.packaging import nvrtc

    return replace(current(), pipeline=PIPELINE, cuda=nvrtc.version())


def _matches(version: str | None, wanted: str) -> bool:
    """Whether `version` is `wanted` or, where that is a release series such as 3.2, belongs to it."""
    return version is not None and (version == wanted or version.startswith(wanted + "."))
