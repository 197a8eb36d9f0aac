"""Uploaded models."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from service.inspector import Foreign, Inspection
from service.resolve import known_model, uploaded_model
from service.schemas import ModelOut, NodeOut, NodesOut
from service.services import Services, ServicesDep
from service.uploads import Shelf, Upload, file_body, keep, receive
from tuning_db.catalog import ModelInfo
from tuning_db.errors import BlobCorrupt, InvalidModel, NotFound

router = APIRouter(prefix="/v1/models", tags=["models"])

FILE_PARTS = ("model", "file")


@router.post("", status_code=201, openapi_extra=file_body(FILE_PARTS[0]))
async def upload_model(request: Request, response: Response, services: ServicesDep) -> ModelOut:
    """201 for a model that is new, 200 for one that is known."""
    async with receive(
        request, services.blobs, file_parts=FILE_PARTS, text_parts=(), max_bytes=services.settings.max_upload_bytes
    ) as upload:
        model, created = await keep_model(services, upload)
    response.status_code = 201 if created else 200
    response.headers["location"] = f"/v1/models/{model.digest}"
    return ModelOut.of(model)


@router.head("/{digest}", include_in_schema=False)
@router.get("/{digest}")
def get_model(digest: str, services: ServicesDep) -> ModelOut:
    return ModelOut.of(known_model(services.store, digest))


@router.get("/{digest}/nodes")
async def get_nodes(digest: str, services: ServicesDep) -> NodesOut:
    """The nodes that int8 can leave in fp32, by the names that `quantization.exclude` takes."""
    model = await run_in_threadpool(known_model, services.store, digest)
    path = await run_in_threadpool(uploaded_model, services.blobs, model)
    nodes, more = await services.inspector.nodes(path, model.blob)
    return NodesOut(nodes=[NodeOut(node=name, operator=operator) for name, operator in nodes], more=more)


async def keep_model(services: Services, upload: Upload) -> tuple[ModelInfo, bool]:
    """Find out what the bytes are, then `keep` them; a file that cannot be read is not kept."""
    path, file = await upload.staged()
    found = await services.inspector.inspect(path, file)
    if isinstance(found, Foreign):
        before = await run_in_threadpool(_converted_before, services, file)
        if before is not None:
            return before, False
        found = await _converted(services, upload, found.format)
        services.converter.remember(file, found.digest)
    what = found

    def row(sha256: str, size_bytes: int) -> ModelInfo:
        return ModelInfo(what.digest, sha256, what.format, size_bytes, what.inputs, what.outputs)

    store = services.store
    shelf = Shelf(store.model, store.add_model, store.replace_model_blob)
    return await keep(upload, services.blobs, shelf, what.digest, row)


def _converted_before(services: Services, sha256: str) -> ModelInfo | None:
    """The model that this file of another format was made into, if it is still there."""
    digest = services.converter.remembered(sha256)
    if digest is None:
        return None
    try:
        model = services.store.model(digest)
        services.blobs.path_verified(model.blob)
    except (NotFound, BlobCorrupt):
        return None
    return model


async def _converted(services: Services, upload: Upload, format: str) -> Inspection:
    """Let the ONNX model that a converter makes of it take the upload's place; what that turned out to be."""
    path, _ = await upload.staged()
    with tempfile.TemporaryDirectory(prefix="tunery-convert-", ignore_cleanup_errors=True) as folder:
        target = Path(folder) / "model.onnx"
        await services.converter.convert(path, format, target)
        await upload.replace(services.blobs, target)
    found = await services.inspector.inspect(*await upload.staged())
    if isinstance(found, Foreign):
        raise InvalidModel(f"what came of the model's conversion is no ONNX, but {found.format}")
    return replace(found, format=format)
