"""The TVM target of a device's identity, checked against what LLVM says that it would do with it.

LLVM assumes features of a CPU model that a virtual machine may hide: the target takes those away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tuning_db.keys import BuildOptions, DeviceIdentity, canonical_json
from workers.devices.identity import FEATURES, UnusableDevice
from workers.linker import arch_of, triple_of

#: LLVM's fast-math flags behind each option. Neither has `nnan` or `ninf`, with which a compiler takes NaN and
#: infinities to be impossible: models mask by infinities, and a NaN that becomes a number hides a fault.
_FLAGS: Final = {
    "fast_math": ("fast-math-arcp", "fast-math-contract", "fast-math-nsz"),
    "reassociation": ("fast-math-nsz", "fast-math-reassoc"),
}
#: How functions are called on Linux there, of which the architecture has several ways: numbers in their own registers.
_CALLS: Final[Mapping[str, Mapping[str, str]]] = {"armv7l": {"mfloat-abi": "hard"}, "riscv64": {"mabi": "lp64d"}}
#: What every GPU since compute capability 5.0 grants a block without being asked (CUDA C++ Programming Guide,
#: "Technical Specifications per Compute Capability"): MetaSchedule refuses a target that does not tell.
_CUDA_LIMITS: Final = {
    "max_threads_per_block": 1024, "max_shared_memory_per_block": 49152, "registers_per_block": 65536,
    "thread_warp_size": 32,
}  # fmt: skip


def target_of(identity: DeviceIdentity, mcpu: str) -> str:
    """Canonical JSON of the TVM target for this identity, with LLVM's model `mcpu`, corrected to the real features.

    Raises UnusableDevice when LLVM does not know `mcpu` or a feature. A wrong name would be a warning on stderr and a
    slower library otherwise.
    """
    import tvm
    from tvm.target import codegen

    triple = triple_of(identity.arch)
    base: dict[str, Any] = {"kind": "llvm", "mtriple": triple, "mcpu": mcpu, "num-cores": identity.cores}
    base |= _CALLS.get(identity.arch, {})
    probe = tvm.target.Target({"kind": "llvm", "mtriple": triple})
    if mcpu not in {str(name) for name in codegen.llvm_get_cpu_archlist(probe)}:
        raise UnusableDevice(f"LLVM {codegen.llvm_version_major()} does not know the CPU {mcpu!r} for {triple}")
    assumed = {str(name) for name in codegen.llvm_get_cpu_features(tvm.target.Target(base))}
    table = FEATURES[identity.arch]
    # A feature that LLVM cannot spell is not asked for, and one that it assumes of the model but is hidden is denied.
    present = set(identity.features)
    attributes = [f"+{name}" for name in sorted(present - assumed) if _is_known(base, name)]
    attributes += [f"-{name}" for name in sorted((assumed & set(table)) - present)]
    if attributes:
        base["mattr"] = attributes
    target = tvm.target.Target(base)
    settled = {str(name) for name in codegen.llvm_get_cpu_features(target)}
    hidden = settled & set(table) - present
    if hidden:
        raise UnusableDevice(f"LLVM would use {', '.join(sorted(hidden))}, which this CPU does not report")
    return canonical_json(base).decode()


def with_options(target_json: str, options: BuildOptions) -> str:
    """The target that everything of a job is compiled for, candidates and libraries alike: the device's, with the
    flags of what the options allow. That of a GPU stays as it is: LLVM does not compile its kernels."""
    target = json.loads(target_json)
    if target["kind"] != "llvm":
        return target_json
    flags = {flag: True for option, flags in _FLAGS.items() if getattr(options, option) for flag in flags}
    return canonical_json(target | flags).decode()


def beyond(target_json: str, identity: DeviceIdentity) -> tuple[str, ...]:
    """What code for this target may use, by LLVM's word, that the CPU does not report; its architecture, if that is
    another one. Empty for code that runs there."""
    import tvm
    from tvm.target import codegen

    arch = arch_of(target_json)
    if arch != identity.arch:
        return (arch,)
    table = FEATURES[arch]
    used = {str(name) for name in codegen.llvm_get_cpu_features(tvm.target.Target(json.loads(target_json)))}
    return tuple(sorted(used & set(table) - set(identity.features)))


def _is_known(base: Mapping[str, Any], feature: str) -> bool:
    import tvm
    from tvm.target import codegen

    with_feature = tvm.target.Target({**base, "mattr": [f"+{feature}"]})
    return feature in {str(name) for name in codegen.llvm_get_cpu_features(with_feature)}


def gpu_target_of(identity: DeviceIdentity, host: str) -> str:
    """Canonical JSON of the TVM target of a GPU. `host`: the target, as canonical JSON, of the CPU that it sits beside.

    Raises UnusableDevice when LLVM's NVPTX does not know the architecture, which TVM itself would take unseen.
    """
    import tvm
    from tvm.target import codegen

    known = codegen.llvm_get_cpu_archlist(tvm.target.Target({"kind": "llvm", "mtriple": "nvptx64-nvidia-cuda"}))
    if identity.arch not in {str(name) for name in known}:
        raise UnusableDevice(f"LLVM {codegen.llvm_version_major()} does not know the GPU architecture {identity.arch}")
    target = {"kind": "cuda", "arch": identity.arch, **_CUDA_LIMITS, "host": json.loads(host)}
    tvm.target.Target(target)
    return canonical_json(target).decode()
