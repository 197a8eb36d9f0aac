"""What random operators are drawn from."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis import strategies as st

from tests.workers.graph.kernels import CPUS

CHANNELS = st.sampled_from((1, 2, 3, 5, 8, 16, 17, 24, 32, 34, 48, 60))
SIZES = st.sampled_from((1, 2, 3, 4, 5, 7, 8, 11, 13, 14, 17, 19, 28))
CPU = st.sampled_from(CPUS)
SEEDS = st.integers(0, 1 << 16)


def examples(count: int) -> settings:
    """The same examples each time, and not made smaller where one fails: each is small, and takes a second."""
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
    )  # fmt: skip


@st.composite
def pads(draw: st.DrawFn, kernel: tuple[int, int], dilation: tuple[int, int] = (1, 1)) -> list[int]:
    """None, what keeps the size, or something asymmetric, always less than the window."""
    reach = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    kind = draw(st.sampled_from(("none", "same", "any")))
    if kind == "none":
        return [0, 0, 0, 0]
    if kind == "same":
        return [reach[0] // 2, reach[1] // 2, reach[0] - reach[0] // 2, reach[1] - reach[1] // 2]
    return [draw(st.integers(0, reach[axis])) for axis in (0, 1, 0, 1)]


def assume_result(
    size: tuple[int, int],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    dilation: tuple[int, int],
    padding: list[int],
) -> None:
    """That the window fits the padded picture."""
    for axis in (0, 1):
        reach = padding[axis] + padding[axis + 2] - (kernel[axis] - 1) * dilation[axis]
        assume(size[axis] + reach > 0)
