"""The roof's kernels: that they are what they are called, on every kind of target, and what a failure says."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import pytest
import tvm

from tests.workers.conftest import Host
from workers.devices.roof import (
    Registers,
    RoofMeasurement,
    RoofNotMeasured,
    compile_kernel,
    fma_kernel,
    measure,
    resident_kernel,
    triad_kernel,
)

TARGETS = {
    "avx512": ({"mtriple": "x86_64-linux-gnu", "mcpu": "znver4"}, Registers(16, 32), r"\s+vfmadd\d+ps\s+%zmm.*"),
    "avx2": ({"mtriple": "x86_64-linux-gnu", "mcpu": "haswell"}, Registers(8, 16), r"\s+vfmadd\d+ps\s+%ymm.*"),
    "neon": ({"mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}, Registers(4, 32), r"\s+fmla\s+v\d+\.4s.*"),
}


def tensor(array: Any) -> Any:
    return tvm.runtime.tensor(np.asarray(array, dtype=np.float32))


@pytest.mark.parametrize("name", TARGETS)
def test_the_peak_kernel_is_nothing_but_multiply_adds_on_the_widest_registers(name: str) -> None:
    """The assembly of the loop holds eight multiply-adds for each accumulator, each accumulator in a register of its
    own, no access to memory, and besides them only the loop's counter."""
    attributes, registers, pattern = TARGETS[name]
    target = tvm.target.Target({"kind": "llvm", "num-cores": 2, **attributes})
    assert Registers.of(target) == registers
    assembly = compile_kernel(fma_kernel(registers, 2), target).mod.inspect_source("asm").splitlines()
    found = [number for number, line in enumerate(assembly) if re.fullmatch(pattern, line)]
    assert len(found) == 8 * registers.accumulators
    loop = assembly[found[0] : found[-1] + 1]
    others = [line.strip() for line in loop if not re.fullmatch(pattern, line)]
    assert len(others) <= 2, others
    text = "\n".join(loop)
    assert "(" not in text, "an operand lies in memory"
    assert "[" not in text, "an operand lies in memory"
    written = {re.findall(r"%[xyz]mm\d+|v\d+", assembly[n])[0 if name == "neon" else -1] for n in found}
    assert len(written) == registers.accumulators


def test_the_peak_kernel_multiplies_and_adds_in_every_accumulator_of_every_thread(host: Host) -> None:
    """Sixteen times 0.5 * 3, from 0, is 24, everywhere."""
    registers = Registers.of(host.target)
    kernel = compile_kernel(fma_kernel(registers, 2), host.target)["main"]
    out = tensor(np.zeros((2, registers.accumulators, registers.lanes)))
    kernel(tensor([0.5] * registers.lanes), tensor([3.0] * registers.lanes), out, 2)
    assert np.array_equal(out.numpy(), np.full(out.shape, 24, dtype=np.float32))


def test_the_kernels_of_bandwidth_touch_every_element(host: Host) -> None:
    """Triad writes a + b / 2 everywhere; the one that stays in the cache does so as often as it is told."""
    registers = Registers.of(host.target)
    shape = (2, 37, registers.lanes)
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(shape).astype(np.float32) for _ in range(2))
    c = tensor(np.zeros(shape))
    compile_kernel(triad_kernel(registers, 2, 37), host.target)["main"](tensor(a), tensor(b), c)
    np.testing.assert_allclose(c.numpy(), a + b / 2, rtol=1e-5, atol=1e-6)
    again = tensor(b)
    compile_kernel(resident_kernel(registers, 2, 37), host.target)["main"](tensor(a), again, 3)
    np.testing.assert_allclose(again.numpy(), a * 1.75 + b / 8, rtol=1e-5, atol=1e-6)


def test_the_roof_of_this_machine_has_plausible_units(host: Host) -> None:
    """Operations and bytes a second lie where those of processors do: billions, not thousands and not quintillions."""
    roof = measure(host.target_json, host.identity.cache_bytes, len(os.sched_getaffinity(0)), deadline_s=300)
    assert 1e8 < roof.flops_per_s_one_thread <= roof.flops_per_s < 1e15
    assert 1e7 < roof.bytes_per_s < 1e13
    assert 1e7 < roof.l2_bytes_per_s < 1e14


def test_of_two_measurements_the_higher_figures_are_kept() -> None:
    """Each figure by itself: neither machine has to have been idle all the time."""
    assert RoofMeasurement(9, 4, 1, 6).best(RoofMeasurement(7, 5, 2, 3)) == RoofMeasurement(9, 5, 2, 6)


def test_a_measurement_that_takes_too_long_is_ended(host: Host) -> None:
    """Past its deadline the process is killed, and the error says so."""
    with pytest.raises(RoofNotMeasured, match=r"not measured within 0 s"):
        measure(host.target_json, (), 1, deadline_s=0.2)


def test_a_target_that_cannot_be_compiled_for_is_an_error(host: Host) -> None:
    """What the process says when it dies is in the error."""
    with pytest.raises(RoofNotMeasured, match=r"status 1: .*no-such-kind"):
        measure('{"kind": "no-such-kind"}', (), 1, deadline_s=300)
