"""From what a request says to what the store knows: which model, which device, which key, which library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from service.problems import LocatedNotFound, shorten
from service.schemas import DeviceIn
from tuning_db.blobs import BlobStore
from tuning_db.calibration import FIELD, CalibrationInfo
from tuning_db.catalog import Artifact, Device, ModelInfo
from tuning_db.errors import BlobCorrupt, CacheMiss, NotFound, UnknownDevice, UnsupportedOption
from tuning_db.keys import ArtifactKey, BuildOptions, QuantizationConfig, is_sha256
from tuning_db.store import TuningStore


def known_model(store: TuningStore, digest: str) -> ModelInfo:
    """LocatedNotFound if nobody uploaded it."""
    try:
        if not is_sha256(digest):
            raise NotFound("a model's digest is 64 lower-case hexadecimal digits")
        return store.model(digest)
    except NotFound:
        raise LocatedNotFound(
            f"no model {shorten(digest, 80)!r} is known; upload it with POST /v1/models", field="model"
        ) from None


def known_calibration(store: TuningStore, digest: str) -> CalibrationInfo:
    """LocatedNotFound if nobody uploaded it."""
    try:
        if not is_sha256(digest):
            raise NotFound("a digest is 64 lower-case hexadecimal digits")
        return store.calibration(digest)
    except NotFound:
        raise LocatedNotFound(
            f"no calibration data {shorten(digest, 80)!r} is known; upload it with POST /v1/calibrations", field=FIELD
        ) from None


def uploaded_model(blobs: BlobStore, model: ModelInfo) -> Path:
    """Where the model's file lies, verified just now. LocatedNotFound if its bytes are damaged or gone."""
    return _uploaded(blobs, model.blob, "model", "/v1/models", "model")


def uploaded_calibration(blobs: BlobStore, calibration: CalibrationInfo) -> Path:
    """As `uploaded_model`."""
    return _uploaded(blobs, calibration.blob, "calibration data", "/v1/calibrations", FIELD)


def _uploaded(blobs: BlobStore, blob: str, what: str, address: str, field: str) -> Path:
    try:
        return blobs.path_verified(blob)
    except (NotFound, BlobCorrupt):
        raise LocatedNotFound(
            f"the {what}'s stored bytes are damaged or gone; upload it again with POST {address}", field=field
        ) from None


def known_device(store: TuningStore, wanted: str | DeviceIn | None) -> Device:
    """The one device of that name or with those attributes; the only one, if nothing is said. UnknownDevice else."""
    devices = store.devices()
    names = [device.name for device in devices]
    if wanted is None:
        found, said = devices, "device is left out"
    elif isinstance(wanted, str):
        found, said = [d for d in devices if d.name == wanted], f"device {shorten(wanted, 80)!r}"
    else:
        found, said = [d for d in devices if wanted.matches(d)], "device given by its attributes"
    if len(found) == 1:
        return found[0]
    if not devices:
        message = f"{said}, and no device has reported itself yet; start a worker on it: tunery worker"
    elif found:
        names = [device.name for device in found]
        message = f"{said}, and {len(found)} devices fit; name one of: {', '.join(names)}"
    else:
        message = f"{said}: no such device has reported itself; known are: {', '.join(names)}"
    raise UnknownDevice(message, candidates=names)


def refuse_on(device: Device, quantization: QuantizationConfig, options: BuildOptions) -> None:
    """Raises UnsupportedOption for what is made for other devices, but not for this one or its kind."""
    identity = device.identity
    if identity.kind != "cuda":
        if quantization.scheme == "fp16" and identity.arch == "x86_64" and "f16c" not in identity.features:
            raise UnsupportedOption(
                f'quantization.scheme "fp16" needs a CPU with F16C, which {device.name} has not; use "int8" or "none"',
                field="quantization.scheme",
            )
        return
    if options.reassociation:
        raise UnsupportedOption(
            "options.reassociation has no meaning on GPUs, whose compiler does not know it; leave it out",
            field="options.reassociation",
        )


def refuse_range(key: ArtifactKey) -> None:
    """Raises UnsupportedOption for a range of what one library can be made for fixed shapes alone."""
    if key.range is None:
        return
    scheme = key.quantization.scheme
    what = scheme if scheme != "none" else "GPUs" if key.device.kind == "cuda" else None
    if what is not None:
        name = next(spec.name for spec, axis in zip(key.inputs, key.range.axes, strict=True) if axis is not None)
        raise UnsupportedOption(
            f"input {name!r}: a range of sizes is not available with {what} in this version; ask for `shapes`",
            field=f"inputs.{name}.shape",
        )


def key_for(
    model: ModelInfo,
    device: Device,
    inputs: Mapping[str, Mapping[str, Any]],
    quantization: QuantizationConfig,
    options: BuildOptions,
) -> ArtifactKey:
    """The key of the library that a worker of the device would make now. ShapeMismatch as `ModelInfo.bind_range`."""
    bound, dimension = model.bind_range(inputs)
    return ArtifactKey(
        model=model.digest,
        inputs=bound,
        device=device.identity,
        target=device.target,
        toolchain=device.toolchain,
        quantization=quantization,
        options=options,
        range=dimension,
    )


def artifact_of(store: TuningStore, key_digest: str) -> Artifact:
    """The artifact under that digest. CacheMiss if there is none, or if it is no digest at all."""
    try:
        if not is_sha256(key_digest):
            raise NotFound("a key is 64 lower-case hexadecimal digits")
        return store.artifact(key_digest)
    except NotFound:
        raise CacheMiss(
            f"no library is stored under key {shorten(key_digest, 80)!r}; ask for one with POST /v1/jobs"
        ) from None


def open_library(store: TuningStore, blobs: BlobStore, artifact: Artifact) -> BinaryIO:
    """The library's bytes, verified just now. If they are damaged or gone, the artifact is forgotten: CacheMiss."""
    try:
        return blobs.open_verified(artifact.library)
    except (NotFound, BlobCorrupt):
        store.drop_artifacts_of_blob(artifact.library)
        raise CacheMiss(
            "the stored library was damaged and has been removed; submit the job again: "
            "its records are still there, so it will be quick"
        ) from None


def check_library(store: TuningStore, blobs: BlobStore, artifact: Artifact) -> Artifact:
    """`artifact`, once its library's bytes have been verified. CacheMiss as `open_library`."""
    open_library(store, blobs, artifact).close()
    return artifact
