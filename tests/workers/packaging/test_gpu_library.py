"""Libraries for GPUs, compiled where there is none: machine code for the architecture asked for, or a refusal."""

from __future__ import annotations

import json
import platform
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tvm
from onnx import numpy_helper
from tvm import relax

from tests.samples import make_key
from tests.workers.conftest import Host, lower
from tests.workers.devices.recordings import H100
from tests.workers.graph.nets import Net
from tuning_db.errors import BuildFailed, CacheMiss
from tuning_db.jobs import JobSpec, SearchConfig
from tuning_db.keys import ArtifactKey, DeviceIdentity
from tuning_db.store import TuningStore
from workers import toolchain
from workers.devices.identity import GpuFacts, gpu_identity_of
from workers.devices.targets import gpu_target_of
from workers.frontend.onnx_import import Imported
from workers.graph import gpu, pipeline
from workers.packaging import device_code, gpu_library, nvrtc
from workers.packaging.device_code import Cubin

ORIN = gpu_identity_of(GpuFacts("Orin (nvgpu)", (8, 7), 16, 62841 << 20, "580.65.06"))
HOPPER = gpu_identity_of(H100)


def target_of(device: DeviceIdentity, host: str) -> tvm.target.Target:
    return tvm.target.Target(json.loads(gpu_target_of(device, host)))


@pytest.fixture(scope="module")
def net(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """Convolutions, an exponential, the means over the image, a dense layer, softmax."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 20, 20), 3, 16, (3, 3), pads=[1, 1, 1, 1]))
    x = net("Add", net.conv(x, 16, 16), net("Exp", net.conv(x, 16, 16)))
    x = net("Flatten", net("GlobalAveragePool", net("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])))
    model = net.model(net("Softmax", net("Gemm", x, net.weights(10, 16), transB=1)))
    # As exporters call it, and C cannot.
    model.graph.input[0].name = model.graph.node[0].input[0] = "0/data:0"
    _, imported = lower(model, host, tmp_path_factory.mktemp("net"))
    return imported


@pytest.fixture(scope="module")
def libraries(net: Imported, host: Host, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The net in half precision for an Orin (beside its own CPU, if that can be linked for) and an H100, by arch."""
    pytest.importorskip("cuda.bindings.nvrtc", reason='NVRTC is not installed: pip install "tunery[cuda]"')
    folder = tmp_path_factory.mktemp("libraries")
    paths = {}
    orins_cpu = json.dumps({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a78ae"})
    for device, cpu in ((ORIN, orins_cpu if shutil.which("aarch64-linux-gnu-gcc") else None), (HOPPER, None)):
        target = target_of(device, cpu or host.target_json)
        paths[device.arch] = folder / f"{device.arch}.so"
        gpu_library.compile_library(gpu_library.lower(net.module, target, half=True), target, paths[device.arch])
    return paths


@pytest.mark.parametrize("arch", ["sm_87", "sm_90"])
def test_machine_code_for_one_arch(libraries: dict[str, Path], arch: str) -> None:
    """The library holds machine code for exactly its architecture, of every kernel, though nothing was tuned
    (mlc-ai/web-stable-diffusion#43), and no source."""
    [cubin] = device_code.check(libraries[arch], arch)
    assert cubin.arch == arch
    assert [name for name in cubin.kernels if "conv2d" in name]
    assert [name for name in cubin.kernels if "softmax" in name]
    file = libraries[arch].read_bytes()
    assert b"__global__" not in file
    assert b"__launch_bounds__" not in file
    other = {"sm_87": "sm_90", "sm_90": "sm_87"}[arch]
    with pytest.raises(BuildFailed, match=rf"machine code for {arch}; {other} was asked for"):
        device_code.check(libraries[arch], other)


def test_what_stays_in_single_precision(host: Host, tmp_path: Path, libraries: dict[str, Path]) -> None:
    """With fp16, a convolution whose weights were left float32 is compiled so, those whose weights were rounded in half
    precision, each in the one library."""
    net = Net()
    x = net("Relu", net.conv(net.input(1, 3, 12, 12), 3, 16, (3, 3)))
    model = net.model(net.conv(x, 16, 8, (3, 3)))
    tensor = model.graph.initializer[0]
    half = numpy_helper.to_array(tensor).astype("float16")
    tensor.CopyFrom(numpy_helper.from_array(half.astype("float32"), tensor.name))
    _, imported = lower(model, host, tmp_path)
    with host.target, gpu.pass_context():
        module = gpu.half_precision(keep_float32=True)(pipeline.simplify()(imported.module))
    kinds: list[list[str]] = []

    def visit(call: relax.Expr) -> None:
        if isinstance(call, relax.Call) and str(getattr(call.op, "name", "")) == "relax.nn.conv2d":
            kinds.append([str(tensor.ty.dtype) for tensor in (*call.args, call)])

    relax.analysis.post_order_visit(module["main"].body, visit)
    assert kinds == [["float16", "float16", "float32"], ["float32"] * 3]
    target = target_of(HOPPER, host.target_json)
    lowered = gpu_library.lower(imported.module, target, half=True, keep_float32=True)
    [cubin] = gpu_library.compile_library(lowered, target, tmp_path / "it.so")
    assert len([name for name in cubin.kernels if "conv2d" in name]) == 2


def test_another_arch_is_a_miss(libraries: dict[str, Path], host: Host, sqlite_store: TuningStore) -> None:
    """What is stored for an Orin is a miss for an H100, and the miss says what differs (mlc-ai/mlc-llm#1631); CPU's
    keys are others still."""

    def key_of(device: DeviceIdentity) -> ArtifactKey:
        target = gpu_target_of(device, host.target_json)
        return make_key(device=device, target=target, toolchain=toolchain.current_gpu())

    orin = key_of(ORIN)
    claimed = sqlite_store.claim(sqlite_store.submit(JobSpec(orin, SearchConfig(trials=0, seconds=1))).job.id, "worker")
    assert claimed is not None
    sqlite_store.publish(claimed[0], ("0" * 64, libraries["sm_87"].stat().st_size), 0.01, {})
    assert sqlite_store.find_artifact(orin).key == orin
    for wanted, fields in (
        (key_of(HOPPER), {"device.arch", "device.model", "target"}),
        (replace(orin, target=key_of(HOPPER).target), {"target"}),
        (replace(orin, toolchain=replace(orin.toolchain, cuda="13.0")), {"toolchain.cuda"}),
        (replace(orin, toolchain=toolchain.current()), {"toolchain.cuda", "toolchain.pipeline"}),
    ):
        with pytest.raises(CacheMiss) as caught:
            sqlite_store.find_artifact(wanted)
        assert fields <= {difference.field for difference in caught.value.nearest[0].differences}


def test_source_is_refused(net: Imported, host: Host, tmp_path: Path, libraries: dict[str, Path]) -> None:
    """A library as TVM exports it without a driver, which holds CUDA source, is told from one with machine code."""
    target = target_of(ORIN, host.target_json)
    module = gpu_library.lower(net.module, target, half=True)
    with gpu_library.source_only(), target, gpu.pass_context():
        lowering = pipeline.lower_to_vm(relax.transform.StaticPlanBlockMemory())
        executable = relax.build(module, target, relax_pipeline=lowering)
    path = tmp_path / "source.so"
    executable.export_library(str(path))
    with pytest.raises(BuildFailed, match="as 'cuda', not as machine code"):
        device_code.check(path, "sm_87")
    for_host = tmp_path / "host.so"
    for_host.write_bytes(
        libraries["sm_87"].read_bytes().replace(device_code.SYMBOL.encode(), b"x" * len(device_code.SYMBOL))
    )
    with pytest.raises(BuildFailed, match="no symbol"):
        device_code.check(for_host, "sm_87")


def test_what_is_no_machine_code() -> None:
    """Where a cubin says its architecture depends on its age; what is no cubin has none."""

    def header(machine: int, abi_version: int, flags: int) -> bytes:
        sections = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, 1, 0, 0, 0, 0)
        ident = b"\x7fELF\x02\x01\x01\x33" + bytes([abi_version]) + bytes(7)
        rest = struct.pack("<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, 72, flags, 64, 0, 0, 64, 1, 0)
        return ident + rest + bytes(8) + sections

    assert Cubin.read(header(190, 7, 0x570557)).arch == "sm_87"
    assert Cubin.read(header(190, 8, 0x6005A04)).arch == "sm_90"
    with pytest.raises(BuildFailed, match="ELF machine 62"):
        Cubin.read(header(62, 0, 0))
    for nothing in (b"", b"\x7fELF\x02\x01", b".version 9.0\n.target sm_87", header(190, 8, 0)[:100]):
        with pytest.raises(BuildFailed, match="no machine code"):
            Cubin.read(nothing)


def test_arch_that_nvrtc_does_not_know(net: Imported, host: Host, tmp_path: Path, libraries: dict[str, Path]) -> None:
    """An architecture without machine code is refused before anything is compiled; no file and no default is left."""
    target = target_of(replace(ORIN, arch="sm_72"), host.target_json)
    module = gpu_library.lower(net.module, target, half=False)
    with pytest.raises(BuildFailed, match=r"no machine code for sm_72; it knows sm_\d+, .*sm_87"):
        gpu_library.compile_library(module, target, tmp_path / "it.so")
    with pytest.raises(BuildFailed, match=r"kernels\.cu\(1\): error"):
        nvrtc.compile_source("no CUDA\n", "sm_87", fast_math=False)
    assert not list(tmp_path.iterdir())


def test_nvrtc_is_not_installed(net: Imported, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra nothing is compiled, and the message names it: never source alone."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    target = target_of(ORIN, host.target_json)
    module = gpu_library.lower(net.module, target, half=True)
    with pytest.raises(nvrtc.NvrtcMissing, match=r'pip install "tunery\[cuda\]"'):
        gpu_library.compile_library(module, target, tmp_path / "it.so")
    assert not list(tmp_path.iterdir())


def test_host_that_nothing_links_for(
    net: Imported, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU beside another CPU needs a linker for that one, and its name is in the message."""
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    target = target_of(ORIN, json.dumps({"kind": "llvm", "mtriple": f"{other}-linux-gnu"}))
    monkeypatch.setenv("PATH", "")
    module = gpu_library.lower(net.module, target, half=True)
    with pytest.raises(BuildFailed, match=rf"no linker for {other} is installed"):
        gpu_library.compile_library(module, target, tmp_path / "it.so")


def test_half_precision(net: Imported, host: Host) -> None:
    """In half precision the net agrees with ONNX Runtime to a hundredth, and its inputs and outputs stay as they are.

    Run on the CPU: the passes are the same, and so are the numbers but for the order of sums.
    """
    with host.target, gpu.pass_context():
        module = gpu.half_precision()(pipeline.simplify()(net.module))
        kinds: dict[str, set[tuple[str, str]]] = {}

        def visit(call: relax.Expr) -> None:
            if isinstance(call, relax.Call) and isinstance(call.op, tvm.ir.Op) and call.args:
                kinds.setdefault(str(call.op.name), set()).add((str(call.args[0].ty.dtype), str(call.ty.dtype)))

        relax.analysis.post_order_visit(module["main"].body, visit)
        executable = relax.build(module, host.target)
    assert kinds["relax.nn.conv2d"] == {("float16", "float32")}
    assert kinds["relax.nn.relu"] == {("float16", "float16")}
    assert kinds["relax.exp"] == kinds["relax.nn.softmax"] == {("float32", "float32")}
    x = np.random.default_rng(0).standard_normal((1, 3, 20, 20)).astype("float32")
    machine = relax.VirtualMachine(executable.jit(), tvm.cpu())
    got = machine["main"](tvm.runtime.tensor(x)).numpy()
    session = onnxruntime.InferenceSession(net.bound, providers=["CPUExecutionProvider"])
    [wanted] = session.run(None, {"0/data:0": x})
    assert got.dtype == wanted.dtype
    assert np.abs(got - wanted).max() <= 1e-2 * np.abs(wanted).max()
    assert np.abs(got - wanted).max() > 0
