"""The JSON of the HTTP contract: what comes in is parsed into domain values here, what goes out is spelled here."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from tuning_db.calibration import CalibrationInfo
from tuning_db.catalog import Artifact, Device, ModelInfo, PortSpec, Roof
from tuning_db.errors import InvalidRequest
from tuning_db.jobs import TUNERS, Job, JobState, SearchConfig
from tuning_db.keys import CALIBRATION_METHODS, MODES, SCHEMES, BuildOptions, QuantizationConfig, to_json

#: Wide enough for every legal number; what is out of range gets the domain's own sentence, and no message holds
#: thousands of digits.
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Digest = Annotated[str, Field(max_length=256)]


class Inward(BaseModel):
    """Unknown fields are refused by name: a misspelled option must not quietly mean the default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class RangeIn(Inward):
    """In place of a size: one library serves every size of a range."""

    range: Annotated[list[Whole], Field(min_length=2, max_length=2)]
    points: Annotated[list[Whole], Field(min_length=1, max_length=64)] | None = Field(
        None, description="the sizes that are searched and have a function of their own; what lies between is cut"
    )


Dimension = Annotated[
    Annotated[Whole, Tag("a-size")] | Annotated[RangeIn, Tag("a-range")],
    Discriminator(lambda value: "a-range" if isinstance(value, dict | RangeIn) else "a-size"),
]


class InputIn(Inward):
    shape: Annotated[list[Dimension], Field(max_length=64)]
    dtype: Annotated[str, Field(max_length=32)] | None = None


def _choices(known: tuple[str, ...]) -> Any:
    return Field(max_length=32, description=f"one of {', '.join(known)}")


class QuantizationIn(Inward):
    """How numbers are represented inside the library. All but the scheme is for int8; what is left out of it has its
    default: static, calibrated by minmax, a scale for each channel, no node left out. fp16 takes `exclude`, and
    `calibration`, whose samples tell what it costs."""

    scheme: Annotated[str, _choices(SCHEMES)] = "none"
    mode: Annotated[str, _choices(MODES)] | None = None
    calibration: Digest | None = Field(None, description="the digest that POST /v1/calibrations answered")
    method: Annotated[str, _choices(CALIBRATION_METHODS)] | None = None
    percentile: float | None = Field(None, description="of values that the method percentile keeps in range")
    per_channel: bool | None = None
    exclude: Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=4096)] | None = (
        Field(None, description="names of nodes that stay in fp32")
    )
    min_sqnr_db: float | None = Field(
        None, description="what each output must keep at least on the calibration data for the library to be published"
    )

    def to_config(self) -> QuantizationConfig:
        return QuantizationConfig(
            scheme=self.scheme,
            calibration=self.calibration,
            method=self.method,
            exclude=tuple(self.exclude or ()),
            mode=self.mode,
            percentile=self.percentile,
            per_channel=self.per_channel,
        ).resolved()


class SearchIn(Inward):
    """How hard to look, and with what. With no trials nothing is measured, and seconds have no meaning."""

    tuner: Annotated[str, Field(max_length=32, description=f"one of {', '.join(TUNERS)}")] = "auto"
    trials: int = 200
    seconds: float = 900.0
    seed: int = 0

    def to_config(self) -> SearchConfig:
        return SearchConfig(self.tuner, self.trials, self.seconds, self.seed)


class OptionsIn(Inward):
    fast_math: bool = Field(
        False, description="quotients may be products with reciprocals, sums fused with products, zeros without sign"
    )
    winograd: bool = Field(
        True, description="convolutions may be computed by Winograd's algorithm where it measures faster"
    )
    reassociation: bool = Field(False, description="sums and products may be computed in any order")

    def to_options(self) -> BuildOptions:
        return BuildOptions(fast_math=self.fast_math, winograd=self.winograd, reassociation=self.reassociation)


class DeviceIn(Inward):
    """A device by what it is. Each attribute given must match; features given must all be among the device's."""

    kind: Name | None = None
    vendor: Name | None = None
    model: Name | None = None
    arch: Name | None = None
    features: Annotated[list[Name], Field(max_length=512)] | None = None
    cores: Whole | None = None
    cache_bytes: Annotated[list[Whole], Field(max_length=8)] | None = None
    board: Name | None = None
    memory_bytes: Whole | None = None
    driver: Name | None = None

    def matches(self, device: Device) -> bool:
        for name, wanted in self.model_dump(exclude_none=True).items():
            actual = getattr(device.identity, name)
            if name == "features":
                if not set(wanted) <= set(actual):
                    return False
            elif (tuple(wanted) if isinstance(wanted, list) else wanted) != actual:
                return False
        return True


DeviceChoice = Annotated[
    Annotated[Name, Tag("by-name")] | Annotated[DeviceIn, Tag("by-attributes")],
    # Without it, a misspelled attribute would be reported as "not a string".
    Discriminator(lambda value: "by-name" if isinstance(value, str) else "by-attributes"),
]
Inputs = Annotated[dict[Annotated[str, Field(max_length=1024)], InputIn], Field(max_length=256)]
Shapes = Annotated[list[Inputs], Field(min_length=1, max_length=32)]


class TargetSpecIn(Inward):
    """What a library is wanted for. The part `spec` of a one-request submission, whose model is another part."""

    device: DeviceChoice | None = None
    inputs: Inputs = {}
    shapes: Shapes | None = Field(
        None,
        description="several shapes of the model, a job each: of each the inputs that `inputs` does not name for all. "
        "The answer is then `jobs`, in this order",
    )
    quantization: QuantizationIn = QuantizationIn()
    search: SearchIn = SearchIn()
    options: OptionsIn = OptionsIn()

    def inputs_of_jobs(self) -> list[Mapping[str, Mapping[str, Any]]]:
        """What each job binds the model's inputs to: one, or one for each of `shapes`. InvalidRequest for an input that
        stands both in `shapes` and in `inputs`."""
        for position, shape in enumerate(self.shapes or ()):
            for name in shape:
                if name in self.inputs:
                    raise InvalidRequest(
                        f"input {name!r} is in `inputs`, which is for all shapes, and in one of `shapes`; "
                        "leave it out of one of the two",
                        field=f"shapes.{position}.{name}",
                    )
        return [
            {name: value.model_dump(exclude_none=True) for name, value in (self.inputs | shape).items()}
            for shape in ([{}] if self.shapes is None else self.shapes)
        ]


class JobIn(TargetSpecIn):
    """A submission of a model that has been uploaded before."""

    model: Digest


class JobsQuery(BaseModel):
    """Which jobs to list. `state` is repeated; `before` is the id of the last job of the page before."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state: list[JobState] = []
    device: Name | None = None
    limit: Annotated[int, Field(ge=1, le=500)] = 50
    before: str | None = None


class ArtifactQuery(BaseModel):
    """A key spelled as a query. `input` is repeated, one for each input: NAME:DTYPE[1,3,224,224], in which 1..32 is a
    range, and 1..32/1/8/32 one with its points."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Digest
    device: Name | None = None
    input: Annotated[list[Annotated[str, Field(max_length=2048)]], Field(max_length=256)] = []
    quantization: Annotated[
        str, Field(max_length=16384, description="a scheme, or the JSON of a submission's `quantization`")
    ] = "none"
    fast_math: bool = False
    winograd: bool = True
    reassociation: bool = False


class PortOut(BaseModel):
    """A dimension is a size, a symbol's name, or null: unknown."""

    name: str
    dtype: str
    shape: list[int | str | None]

    @classmethod
    def of(cls, port: PortSpec) -> Self:
        return cls(name=port.name, dtype=port.dtype, shape=list(port.shape))


class ModelOut(BaseModel):
    digest: str
    format: str
    bytes: int
    inputs: list[PortOut]
    outputs: list[PortOut]

    @classmethod
    def of(cls, model: ModelInfo) -> Self:
        return cls(
            digest=model.digest,
            format=model.format,
            bytes=model.size_bytes,
            inputs=[PortOut.of(port) for port in model.inputs],
            outputs=[PortOut.of(port) for port in model.outputs],
        )


class NodeOut(BaseModel):
    node: str
    operator: str


class NodesOut(BaseModel):
    """In the graph's order; `more` is how many are left out, of very many or with names that cannot be sent."""

    nodes: list[NodeOut]
    more: int


class ArrayOut(BaseModel):
    name: str
    dtype: str
    shape: list[int]


class CalibrationOut(BaseModel):
    digest: str
    bytes: int
    arrays: list[ArrayOut]

    @classmethod
    def of(cls, calibration: CalibrationInfo) -> Self:
        return cls(
            digest=calibration.digest,
            bytes=calibration.size_bytes,
            arrays=[ArrayOut(name=a.name, dtype=a.dtype, shape=list(a.shape)) for a in calibration.arrays],
        )


class JobErrorOut(BaseModel):
    kind: str
    message: str


class JobLinks(BaseModel):
    self: str
    events: str
    cancel: str
    artifact: str
    library: str


class JobOut(BaseModel):
    id: str
    state: Literal["QUEUED", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLED"]
    key: str
    spec: dict[str, Any]
    attempt: int
    trials_measured: int
    cancel_requested: bool
    created_at: dt.datetime
    updated_at: dt.datetime
    error: JobErrorOut | None = None
    cached: bool | None = None  #: in the answer to a submission: whether a finished job answered it
    links: JobLinks

    @classmethod
    def of(cls, job: Job, *, cached: bool | None = None) -> Self:
        key = job.spec.key
        digest = key.digest()
        return cls(
            id=job.id,
            state=job.state.value,
            key=digest,
            spec={
                "model": key.model,
                "device": key.device.name,
                "target": key.target,
                "inputs": key.asked_inputs(),
                "quantization": key.quantization.to_json()
                | ({} if job.spec.min_sqnr_db is None else {"min_sqnr_db": job.spec.min_sqnr_db}),
                "options": to_json(key.options),
                "toolchain": to_json(key.toolchain),
                "search": to_json(job.spec.search),
            },
            attempt=job.attempt,
            trials_measured=job.trials_measured,
            cancel_requested=job.cancel_requested,
            created_at=job.created_at,
            updated_at=job.updated_at,
            error=JobErrorOut(kind=job.error.kind, message=job.error.message) if job.error else None,
            cached=cached,
            links=JobLinks(
                self=f"/v1/jobs/{job.id}",
                events=f"/v1/jobs/{job.id}/events",
                cancel=f"/v1/jobs/{job.id}/cancel",
                artifact=f"/v1/artifacts/{digest}",
                library=f"/v1/artifacts/{digest}/library",
            ),
        )


class JobList(BaseModel):
    """The answer to a submission of several shapes: a job each, in the request's order."""

    jobs: list[JobOut]


class JobPage(JobList):
    next: str | None = None  #: the address of the next page, while there is one


class RoofOut(BaseModel):
    """What the device was seen to do at most, in float32, on all its cores."""

    flops_per_s: float
    bytes_per_s: float
    flops_per_s_one_thread: float
    measured_at: dt.datetime
    toolchain: dict[str, Any] | None

    @classmethod
    def of(cls, roof: Roof) -> Self:
        return cls(
            flops_per_s=roof.flops_per_s,
            bytes_per_s=roof.bytes_per_s,
            flops_per_s_one_thread=roof.flops_per_s_one_thread,
            measured_at=roof.measured_at,
            toolchain=asdict(roof.toolchain) if roof.toolchain else None,
        )


class HealthOut(BaseModel):
    """How one slot was when something was last measured on it; null is what its system does not tell."""

    slot: str
    drift: float  #: how much longer a fixed kernel takes than at best: 0.1 is a tenth
    temperature_c: float | None
    khz: int | None
    governor: str | None
    measured_at: dt.datetime


class DeviceOut(BaseModel):
    name: str
    identity: dict[str, Any]
    target: str
    toolchain: dict[str, Any]
    last_seen: dt.datetime
    workers: int
    busy: int
    queued: int
    roof: RoofOut | None  #: null while nobody has measured it
    drift: float | None  #: of the slowest slot; null while nothing was measured
    health: list[HealthOut]

    @classmethod
    def of(cls, device: Device) -> Self:
        identity, toolchain = to_json(device.identity), to_json(device.toolchain)
        assert isinstance(identity, dict)
        assert isinstance(toolchain, dict)
        return cls(
            name=device.name,
            identity=identity,
            target=device.target,
            toolchain=toolchain,
            last_seen=device.last_seen,
            workers=device.workers,
            busy=device.busy,
            queued=device.queued,
            roof=RoofOut.of(device.roof) if device.roof else None,
            drift=device.drift,
            health=[
                HealthOut(
                    slot=slot.slot,
                    drift=slot.drift,
                    temperature_c=slot.temperature_c,
                    khz=slot.khz,
                    governor=slot.governor,
                    measured_at=slot.measured_at,
                )
                for slot in device.health
            ],
        )


class DeviceList(BaseModel):
    devices: list[DeviceOut]


def manifest_of(artifact: Artifact) -> dict[str, Any]:
    """The worker's manifest, with what the store knows best: the key, the revision, and where the bytes are."""
    digest = artifact.key.digest()
    return {
        **artifact.manifest,
        "key": digest,
        "key_fields": artifact.key.to_json(),
        "revision": artifact.revision,
        "library": {"sha256": artifact.library, "bytes": artifact.size_bytes},
        "latency_s": artifact.latency_s,
        "job": artifact.job_id,
        "created_at": artifact.created_at.isoformat(),
        "links": {
            "self": f"/v1/artifacts/{digest}",
            "library": f"/v1/artifacts/{digest}/library",
            "blob": f"/v1/blobs/{artifact.library}",
            "job": f"/v1/jobs/{artifact.job_id}",
        },
    }
