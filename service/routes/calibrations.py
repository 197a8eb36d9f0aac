"""Uploaded calibration data: samples of a model's inputs that int8 is calibrated and judged by."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.resolve import known_calibration
from service.schemas import CalibrationOut
from service.services import ServicesDep
from service.uploads import Shelf, file_body, keep, receive
from tuning_db.calibration import CalibrationInfo
from tuning_db.errors import InvalidCalibration

router = APIRouter(prefix="/v1/calibrations", tags=["calibrations"])

FILE_PARTS = ("calibration", "file")


@router.post("", status_code=201, openapi_extra=file_body(FILE_PARTS[0]))
async def upload_calibration(request: Request, response: Response, services: ServicesDep) -> CalibrationOut:
    """An .npz file, or a zip or tar of .npy files. 201 for samples that are new, 200 for those that are known."""
    async with receive(
        request,
        services.blobs,
        file_parts=FILE_PARTS,
        text_parts=(),
        max_bytes=services.settings.max_upload_bytes,
        invalid=InvalidCalibration,
    ) as upload:
        digest, arrays = await services.inspector.examine(*await upload.staged())

        def row(sha256: str, size_bytes: int) -> CalibrationInfo:
            return CalibrationInfo(digest, sha256, size_bytes, arrays)

        store = services.store
        shelf = Shelf(store.calibration, store.add_calibration, store.replace_calibration_blob)
        calibration, created = await keep(upload, services.blobs, shelf, digest, row)
    response.status_code = 201 if created else 200
    response.headers["location"] = f"/v1/calibrations/{digest}"
    return CalibrationOut.of(calibration)


@router.head("/{digest}", include_in_schema=False)
@router.get("/{digest}")
def get_calibration(digest: str, services: ServicesDep) -> CalibrationOut:
    return CalibrationOut.of(known_calibration(services.store, digest))
