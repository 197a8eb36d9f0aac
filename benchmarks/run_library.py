"""Runs a fetched library in this process and compares it with ONNX Runtime: `run_library.py FOLDER MODEL.onnx [SIZE]`.

Needs TVM's runtime, NumPy and ONNX Runtime, as a user's own program does. A CPU's library for one shape needs nothing
of Tunery; a GPU's is run by `service.loading`, and so is one for a range, of which SIZE is run, the largest point if
there is none. Prints JSON.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

folder, model = Path(sys.argv[1]), Path(sys.argv[2])
manifest = json.loads((folder / "manifest.json").read_text())
# Before TVM is loaded: as many threads as the library was timed with (it takes half the cores by itself), none of them
# tied to a core that others use.
ON_CPU = manifest["key_fields"]["device"]["kind"] == "cpu"
if ON_CPU:
    os.environ["TVM_NUM_THREADS"] = str(manifest["key_fields"]["device"]["cores"])
    os.environ["TVM_BIND_THREADS"] = "0"

loaded = None
if not ON_CPU or manifest.get("range") is not None:
    from service.loading import load

    # Before TVM is imported, which would not find CUDA.
    loaded = load(folder)

import numpy as np
import onnxruntime
import tvm
from tvm import relax


def main() -> dict[str, float]:
    ranged = manifest.get("range")
    shapes = {spec["name"]: list(spec["shape"]) for spec in manifest["inputs"]}
    if ranged is not None and len(sys.argv) > 3:
        for shape, axis in zip(shapes.values(), ranged["axes"], strict=True):
            if axis is not None:
                shape[axis] = int(sys.argv[3])
    generator = np.random.default_rng(7)
    arrays = {
        spec["name"]: np.asarray(generator.standard_normal(shapes[spec["name"]])).astype(spec["dtype"])
        for spec in manifest["inputs"]
    }
    run: Callable[[], Any]
    if loaded is not None:
        run = partial(loaded, arrays)
        outputs = run()
    else:
        machine = relax.VirtualMachine(tvm.runtime.load_module(str(folder / "library.so")), tvm.cpu())
        run = partial(machine["main"], *(tvm.runtime.tensor(arrays[spec["name"]]) for spec in manifest["inputs"]))
        result = run()
        outputs = [output.numpy() for output in ([result] if hasattr(result, "numpy") else result)]

    options = onnxruntime.SessionOptions()
    # A GPU is compared with all of the CPU.
    options.intra_op_num_threads = int(os.environ["TVM_NUM_THREADS"]) if ON_CPU else 0
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    reference = session.run(None, arrays)

    samples: dict[str, list[float]] = {"tuned_s": [], "onnxruntime_s": []}
    for _ in range(30):  # in turns, so that a busy machine is busy for both
        for name, call in (
            ("tuned_s", run),
            ("onnxruntime_s", lambda: session.run(None, arrays)),
        ):
            start_s = time.perf_counter()
            for _ in range(10):
                call()
            samples[name].append((time.perf_counter() - start_s) / 10)
    return {
        "max_abs_diff": max(float(np.abs(a - b).max()) for a, b in zip(outputs, reference, strict=True)),
        **{name: statistics.median(taken) for name, taken in samples.items()},
    }


if __name__ == "__main__":
    print(json.dumps(main()))
