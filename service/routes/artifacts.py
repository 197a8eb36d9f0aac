"""Published libraries: found by key, or by what the key is made of."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import ValidationError

from service.byteserving import serve
from service.problems import invalid_request_of, shorten
from service.resolve import artifact_of, check_library, key_for, known_device, known_model, open_library
from service.schemas import ArtifactQuery, QuantizationIn, manifest_of
from service.services import ServicesDep
from tuning_db.errors import BlobCorrupt, CacheMiss, InvalidRequest, NotFound
from tuning_db.keys import BuildOptions, QuantizationConfig, parse_input

router = APIRouter(tags=["artifacts"])

#: A key's library may be replaced by a faster one, so it is asked for again each time; a blob is what its name says.
_REVALIDATE = "no-cache"
_FOR_EVER = "public, max-age=31536000, immutable"


@router.head("/v1/artifacts", include_in_schema=False)
@router.get("/v1/artifacts")
def find_artifact(query: Annotated[ArtifactQuery, Query()], services: ServicesDep) -> dict[str, Any]:
    """The manifest under the key that these fields make, or a problem that names the nearest stored keys."""
    model = known_model(services.store, query.model)
    device = known_device(services.store, query.device)
    inputs: dict[str, dict[str, Any]] = {}
    for text in query.input:
        name, value = parse_input(text)
        if name in inputs:
            raise InvalidRequest(f"input {shorten(name, 80)!r} is given twice", field="input")
        inputs[name] = value
    quantization = _quantization_of(query.quantization)
    options = BuildOptions(fast_math=query.fast_math, winograd=query.winograd, reassociation=query.reassociation)
    key = key_for(model, device, inputs, quantization, options)
    artifact = services.store.find_artifact(key)
    try:
        return manifest_of(check_library(services.store, services.blobs, artifact))
    except CacheMiss:
        # Forgotten just now: the store can say what is nearest.
        return manifest_of(check_library(services.store, services.blobs, services.store.find_artifact(key)))


def _quantization_of(text: str) -> QuantizationConfig:
    """A scheme's name alone, or the object that a submission has."""
    if not text.lstrip().startswith("{"):
        return QuantizationIn(scheme=text[:32]).to_config()
    try:
        wanted = QuantizationIn.model_validate_json(text)
    except ValidationError as error:
        raise invalid_request_of(error, within="quantization") from None
    if wanted.min_sqnr_db is not None:
        field = "quantization.min_sqnr_db"
        raise InvalidRequest(f"{field} is no part of a key; the manifest's quantization.report tells it", field=field)
    return wanted.to_config()


@router.head("/v1/artifacts/{key}", include_in_schema=False)
@router.get("/v1/artifacts/{key}")
def get_artifact(key: str, services: ServicesDep) -> dict[str, Any]:
    return manifest_of(check_library(services.store, services.blobs, artifact_of(services.store, key)))


@router.head("/v1/artifacts/{key}/library", include_in_schema=False)
@router.get("/v1/artifacts/{key}/library", response_class=Response)
def get_library(key: str, request: Request, services: ServicesDep) -> Response:
    artifact = artifact_of(services.store, key)
    handle = open_library(services.store, services.blobs, artifact)
    return serve(request, handle, artifact.library, filename=f"tunery-{key[:16]}.so", cache_control=_REVALIDATE)


@router.head("/v1/blobs/{sha256}", include_in_schema=False)
@router.get("/v1/blobs/{sha256}", response_class=Response)
def get_blob(sha256: str, request: Request, services: ServicesDep) -> Response:
    """The bytes of a library or of a model by their SHA-256."""
    try:
        handle = services.blobs.open_verified(sha256)
    except (NotFound, BlobCorrupt):
        raise NotFound(f"no blob {shorten(sha256, 80)!r} is stored") from None
    return serve(request, handle, sha256, filename=f"tunery-{sha256[:16]}.bin", cache_control=_FOR_EVER)
