"""Domain values to start from in tests: a key, a job's spec, a workload, trials."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tuning_db.jobs import JobSpec, SearchConfig
from tuning_db.keys import ArtifactKey, BuildOptions, DeviceIdentity, QuantizationConfig, TensorSpec, Toolchain
from tuning_db.trials import Failed, Measured, Trial, Workload

DEVICE = DeviceIdentity(
    kind="cpu",
    vendor="GenuineIntel",
    model="Xeon Platinum 8488C",
    arch="x86_64",
    features=("avx2", "avx512f", "fma"),
    cores=2,
    cache_bytes=(49152, 2097152, 110100480),
)
TARGET = '{"kind":"llvm","mcpu":"sapphirerapids","num-cores":2}'
TOOLCHAIN = Toolchain(tvm="0.27.0.post1", tvm_ffi="0.1.14.post1", llvm="20.1.0", pipeline="tunery-cpu-1")
FAST = Measured((0.002, 0.001, 0.003))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_key(**changes: Any) -> ArtifactKey:
    """A key of a small image classifier on a CPU, with `changes` to its fields."""
    fields: dict[str, Any] = {
        "model": sha256("a model"),
        "inputs": (TensorSpec("x", "float32", (1, 3, 48, 192)),),
        "device": DEVICE,
        "target": TARGET,
        "toolchain": TOOLCHAIN,
        "quantization": QuantizationConfig(),
        "options": BuildOptions(),
    }
    return ArtifactKey(**{**fields, **changes})


def make_spec(model: str = "a model", *, search: SearchConfig | None = None, **changes: Any) -> JobSpec:
    """A job for `make_key`; specs of different `model` names have different keys."""
    return JobSpec(make_key(model=sha256(model), **changes), search or SearchConfig(trials=64, seconds=60))


def make_workload(name: str = "matmul") -> Workload:
    return Workload(structural_hash=f"-{abs(hash_of(name))}", module=json.dumps({"name": name, "body": "AAAA"}))


def hash_of(name: str) -> int:
    """A structural hash as TVM writes one: a signed 64-bit number."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)


def make_trial(workload: Workload, number: int, outcome: Measured | Failed = FAST) -> Trial:
    return Trial(workload.digest, json.dumps([[["SampleCategorical", number]], []]), outcome)
