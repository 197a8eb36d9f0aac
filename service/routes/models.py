"""Uploaded models."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from service.resolve import known_model
from service.schemas import ModelOut
from service.services import Services, ServicesDep
from service.uploads import Upload, receive
from tuning_db.catalog import ModelInfo
from tuning_db.errors import BlobCorrupt, NotFound

router = APIRouter(prefix="/v1/models", tags=["models"])

FILE_PARTS = ("model", "file")

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"model": {"type": "string", "format": "binary"}},
                    "required": ["model"],
                }
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


@router.post("", status_code=201, openapi_extra=_BODY)
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


async def keep_model(services: Services, upload: Upload) -> tuple[ModelInfo, bool]:
    """Find out what the bytes are, then keep them and remember the model; whether it was new.

    A file that cannot be read is not kept, nor is a second file of a known model, the same graph and weights, unless
    the first one's bytes were lost.
    """
    path, sha256 = await upload.staged()
    found = await services.inspector.inspect(path, sha256)
    try:
        known = await run_in_threadpool(services.store.model, found.digest)
    except NotFound:
        known = None
    if known is not None:
        if known.blob == sha256:
            await upload.commit()  # the stored bytes may have been damaged since
            return known, False
        try:
            await run_in_threadpool(services.blobs.path_verified, known.blob)
        except (NotFound, BlobCorrupt):
            size_bytes = await upload.commit()
            await run_in_threadpool(services.store.replace_model_blob, known.digest, known.blob, (sha256, size_bytes))
            return await run_in_threadpool(services.store.model, known.digest), False
        return known, False
    size_bytes = await upload.commit()
    model = ModelInfo(found.digest, sha256, found.format, size_bytes, found.inputs, found.outputs)
    if await run_in_threadpool(services.store.add_model, model):
        return model, True
    return await run_in_threadpool(services.store.model, model.digest), False
