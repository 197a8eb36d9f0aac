"""Uploaded models."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.resolve import known_model
from service.schemas import ModelOut
from service.services import Services, ServicesDep
from service.uploads import Shelf, Upload, file_body, keep, receive
from tuning_db.catalog import ModelInfo

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


async def keep_model(services: Services, upload: Upload) -> tuple[ModelInfo, bool]:
    """Find out what the bytes are, then `keep` them; a file that cannot be read is not kept."""
    found = await services.inspector.inspect(*await upload.staged())

    def row(sha256: str, size_bytes: int) -> ModelInfo:
        return ModelInfo(found.digest, sha256, found.format, size_bytes, found.inputs, found.outputs)

    store = services.store
    shelf = Shelf(store.model, store.add_model, store.replace_model_blob)
    return await keep(upload, services.blobs, shelf, found.digest, row)
