"""The devices that workers have reported."""

from __future__ import annotations

from fastapi import APIRouter

from service.problems import shorten
from service.schemas import DeviceList, DeviceOut
from service.services import ServicesDep
from tuning_db.errors import NotFound

router = APIRouter(prefix="/v1/devices", tags=["devices"])


@router.head("", include_in_schema=False)
@router.get("")
def list_devices(services: ServicesDep) -> DeviceList:
    return DeviceList(devices=[DeviceOut.of(device) for device in services.store.devices()])


@router.head("/{name}", include_in_schema=False)
@router.get("/{name}")
def get_device(name: str, services: ServicesDep) -> DeviceOut:
    for device in services.store.devices():
        if device.name == name:
            return DeviceOut.of(device)
    raise NotFound(f"no device {shorten(name, 80)!r} has reported itself; GET /v1/devices lists those that have")
