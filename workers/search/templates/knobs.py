"""What a schedule template may choose, how a choice is written into a trace, and how it is read back from one.

A template is a schedule function with named knobs (AutoTVM's idea: Chen et al., "Learning to Optimize Tensor Programs",
NeurIPS 2018). Every knob is sampled by `sample_categorical` at the head of the trace, so a template's candidate
replays, is stored and is compared like any other MetaSchedule trace; the primitives that follow are those that these
decisions led to. To change a knob the function is run again: a trace alone cannot know what another choice would do.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar

#: Sizes of a computation by name: all that a template needs to know to choose. Plain integers.
Geometry: TypeAlias = Mapping[str, int]
#: A value for each knob of a template.
Config: TypeAlias = Mapping[str, int]

#: Attributes of a PrimFunc: the template that it was written for, and its geometry as JSON.
TEMPLATE_ATTR: Final = "tunery.template"
GEOMETRY_ATTR: Final = "tunery.geometry"

#: How a CPU may add dot products of four bytes (`dot.py`).
VPDPBUSD: Final = "vpdpbusd"
USDOT: Final = "usdot"
SDOT: Final = "sdot"
PMADDWD: Final = "pmaddwd"
#: What `SDOT` wants taken off data of uint8, which makes it int8.
BELOW: Final = 128


@dataclass(frozen=True, slots=True)
class Cpu:
    """What a template must know of the CPU that it schedules for."""

    lanes: int  #: float32 numbers in a vector register
    registers: int  #: vector registers
    l1_bytes: int
    l2_bytes: int
    threads: int
    dot: str = ""  #: how it adds dot products of bytes to whole registers, "" if in none of these ways


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a template must know of the NVIDIA GPU that it schedules for: what one block of threads may have."""

    multiprocessors: int
    tensor_types: tuple[str, ...] = ()  #: what tensor cores multiply: "float16", summed in float32; "int8", in int32
    threads: int = 1024
    shared_bytes: int = 48 << 10  #: what every GPU grants without being asked
    registers: int = 64 << 10  #: of 32 bits
    warp: int = 32  #: threads


Machine = TypeVar("Machine", Cpu, Gpu)


class Template(ABC, Generic[Machine]):
    """One kind of computation's schedules on one kind of machine. Stateless; equal arguments give equal answers
    wherever it runs."""

    name: ClassVar[str]
    #: Counts up when the meaning of a knob or a feature changes: older experience is then not learnt from.
    version: ClassVar[int] = 1
    #: In the order in which they are sampled at the head of the trace.
    knobs: ClassVar[tuple[str, ...]]

    @abstractmethod
    def configs(self, geometry: Geometry, machine: Machine) -> list[Config]:
        """Every choice worth building, best guess first: what cannot fit registers or caches is not among them."""

    @abstractmethod
    def apply(self, schedule: Any, geometry: Geometry, config: Config, machine: Machine) -> None:
        """Schedule the function `main` of the schedule's module."""

    @abstractmethod
    def features(self, geometry: Geometry, config: Config, machine: Machine) -> list[float]:
        """The same number of features for each geometry and config: what makes this choice fast or slow."""

    def schedule(self, schedule: Any, geometry: Geometry, config: Config, machine: Machine) -> None:
        """Write the choice at the head of the trace, then apply it."""
        for knob in self.knobs:
            # One candidate is enough: the value is the decision, and what else it could be is the template's to say.
            schedule.sample_categorical(candidates=[config[knob]], probs=[1.0], decision=0)
        self.apply(schedule, geometry, config, machine)


def config_of(template: Template[Any], trace: str) -> Config:
    """The choice that a stored trace of this template was made with. ValueError if it is not one of this template's."""
    instructions, _ = json.loads(trace)
    values = []
    for instruction in instructions[: len(template.knobs)]:
        if instruction[0] != "SampleCategorical":
            break
        values.append(int(instruction[2][0][0]))
    if len(values) != len(template.knobs):
        raise ValueError(f"the trace does not begin with the {len(template.knobs)} knobs of {template.name!r}")
    return dict(zip(template.knobs, values, strict=True))


def template_of(function: Any) -> tuple[str, Geometry] | None:
    """The name of the template that a PrimFunc was written for, and its geometry; None if for none."""
    attributes = function.attrs
    if not attributes or TEMPLATE_ATTR not in attributes:
        return None
    return str(attributes[TEMPLATE_ATTR]), json.loads(str(attributes[GEOMETRY_ATTR]))


def divisors(number: int, limit: int | None = None) -> list[int]:
    """Ascending."""
    return [d for d in range(1, min(number, limit or number) + 1) if number % d == 0]


def spread(values: Sequence[int], count: int) -> list[int]:
    """At most `count` of the ascending values, evenly over their ranks, the ends included."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
