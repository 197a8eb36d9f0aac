"""Options that let LLVM compute in another way: what they change in the code, and what they must not change."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm
from numpy.typing import NDArray
from onnx import helper

from tests.workers.conftest import Compiled, Host, compile_model
from tests.workers.models import make_model, normal, port
from tuning_db.keys import BuildOptions
from workers.devices.targets import with_options
from workers.graph import elementary
from workers.packaging.reference import Comparison, compare, run
from workers.packaging.running import load_library, outputs_of

OPTIONS = {
    "strict": BuildOptions(),
    "fast": BuildOptions(fast_math=True),
    "reordered": BuildOptions(reassociation=True),
    "both": BuildOptions(fast_math=True, reassociation=True),
}
#: LLVM's flags on the arithmetic of each.
FLAGS = {
    "strict": set[str](),
    "fast": {"nsz", "arcp", "contract"},
    "reordered": {"reassoc", "nsz"},
    "both": {"reassoc", "nsz", "arcp", "contract"},
}


@dataclass(frozen=True)
class Libraries:
    """One model compiled with each set of options, without schedules."""

    compiled: Mapping[str, Compiled]
    targets: Mapping[str, tvm.target.Target]


@pytest.fixture(scope="module")
def libraries(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    """Sums, quotients and the exponential function."""
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "w"], ["product"]),
            helper.make_node("ReduceSumSquare", ["product"], ["energy"], axes=[1]),
            helper.make_node("Div", ["product", "energy"], ["quotient"]),
            helper.make_node("Softmax", ["quotient"], ["soft"]),
            helper.make_node("Sigmoid", ["quotient"], ["y"]),
        ],
        [port("x", 4, 64)],
        [port("y", 4, 96), port("soft", 4, 96)],
        {"w": normal(64, 96)},
    )
    compiled, targets = {}, {}
    for label, options in OPTIONS.items():
        of_options = replace(host, target_json=with_options(host.target_json, options))
        folder = tmp_path_factory.mktemp(label)
        compiled[label], targets[label] = compile_model(model, of_options, folder), of_options.target
    return Libraries(compiled, targets)


def code_of(module: tvm.ir.IRModule, target: tvm.target.Target) -> tuple[str, str]:
    """LLVM's IR and the assembly of a lowered module's kernels, compiled as a search compiles its candidates."""
    kernels = {
        variable: function.with_attr("global_symbol", variable.name_hint)
        for variable, function in module.functions.items()
        if isinstance(function, tvm.tirx.PrimFunc)
    }
    built = tvm.compile(elementary.lower_module(tvm.IRModule(kernels)), target=target).mod
    found = [built, *built.imports]
    [code] = [part for part in found if part.kind == "llvm"]
    return code.inspect_source("ll"), code.inspect_source("asm")


def test_flags_of_the_code(host: Host, libraries: Libraries) -> None:
    """Each option puts its own flags of LLVM on the arithmetic, none takes NaN or infinities to be impossible, and the
    machine code is another one; without options the target is the device's."""
    assert with_options(host.target_json, BuildOptions()) == host.target_json
    code = {label: code_of(c.module, libraries.targets[label]) for label, c in libraries.compiled.items()}
    for label, (ir, _) in code.items():
        written = re.findall(r"= f(?:add|sub|mul|div|cmp) ((?:[a-z]+ )*)(?:float|<|o|u)", ir)
        assert written, "there is arithmetic"
        found = {flag for flags in written for flag in flags.split()} - {"oeq", "olt", "ogt", "ole", "oge", "une"}
        assert found == FLAGS[label], label
    assert len({assembly for _, assembly in code.values()}) == len(OPTIONS)


def test_numbers(libraries: Libraries) -> None:
    """With every option the outputs are ONNX Runtime's within the tolerance of libraries without options."""
    strict = libraries.compiled["strict"]
    paths = {label: str(compiled.untuned) for label, compiled in libraries.compiled.items()}
    comparison = Comparison(str(strict.reference), paths, strict.inputs, threads=1, rounds=1, min_sample_s=1e-4)
    checks = run(comparison)["checks"]
    assert isinstance(checks, dict)
    problems = {label: check["problem"] for label, check in checks.items() if isinstance(check, dict)}
    assert problems == dict.fromkeys(OPTIONS)


def test_not_numbers(libraries: Libraries) -> None:
    """NaN and infinities in the inputs come out where ONNX Runtime has them, with every option."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype("float32")
    x[0, 3], x[1, 5], x[2, 7] = np.nan, np.inf, -np.inf
    strict = libraries.compiled["strict"]
    session = onnxruntime.InferenceSession(str(strict.reference), providers=["CPUExecutionProvider"])
    wanted = session.run(None, {"x": x})
    assert np.isnan(wanted[0][:3]).any()
    assert np.isfinite(wanted[0][3]).all()
    for label, compiled in libraries.compiled.items():
        got = outputs_of(load_library(str(compiled.untuned))(tvm.runtime.tensor(x)))
        assert [entry.get("problem") for entry in compare(wanted, got, ["y", "soft"])] == [None, None], label


@pytest.mark.parametrize("name", ["exp", "sigmoid", "tanh", "erf", "log"])
def test_elementary_functions(host: Host, name: str) -> None:
    """Our arithmetic for these functions holds where LLVM may reorder it: what rounds by adding a large number and
    taking it away again would round nothing."""
    x = tvm.te.placeholder((256,), "float32", "x")
    y = tvm.te.compute((256,), lambda i: getattr(tvm.tirx, name)(x[i]), name="y")
    module = elementary.lower_module(tvm.IRModule({"main": tvm.te.create_prim_func([x, y])}))
    values = np.linspace(0.01 if name == "log" else -40, 40, 256, dtype="float32")
    values[:2] = np.nan, np.inf
    results: list[NDArray[Any]] = []
    for options in (OPTIONS["strict"], OPTIONS["both"]):
        target = replace(host, target_json=with_options(host.target_json, options)).target
        out = tvm.runtime.tensor(np.zeros(256, "float32"))
        tvm.compile(module, target=target)["main"](tvm.runtime.tensor(values), out)
        results.append(out.numpy())
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=0)


_LOADING = """
import ctypes, sys
import numpy as np, tvm
from workers.packaging.denormals import denormal_mode
from workers.packaging.running import load_library

def keeps() -> bool:
    tiny = np.full(8, 1e-45, np.float32)
    product = ctypes.CDLL("libm.so.6").fmaf
    product.restype, product.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return bool((tiny * np.float32(1) != 0).all()) and product(1e-45, 1.0, 0.0) != 0

assert keeps() and denormal_mode() == 0
function = load_library(sys.argv[1])
assert keeps() and denormal_mode() == 0, "loading"
function(tvm.runtime.tensor(np.full((4, 64), 1e-42, np.float32)))
assert keeps() and denormal_mode() == 0, "running"
if len(sys.argv) > 2:
    ctypes.CDLL(sys.argv[2])
    assert not keeps() and denormal_mode() != 0, "what flushes is seen to"
"""


def test_denormals_of_the_process(libraries: Libraries, tmp_path: Path) -> None:
    """A process that loads and runs a library, fast or not, goes on computing with denormal numbers; one that loads
    what GCC links for -ffast-math does not, and is seen not to."""
    gcc = shutil.which("gcc")
    assert gcc is not None
    found = subprocess.run([gcc, "-print-file-name=crtfastmath.o"], check=True, capture_output=True, text=True).stdout
    flushing = tmp_path / "flushing.so"
    subprocess.run([gcc, "-shared", "-o", str(flushing), found.strip()], check=True)
    for label, others in (("strict", []), ("both", [str(flushing)])):
        library = str(libraries.compiled[label].untuned)
        done = subprocess.run(
            [sys.executable, "-c", _LOADING, library, *others], check=False, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
