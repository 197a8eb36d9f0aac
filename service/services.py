"""What the routes work with: built once a process by `service.app`, found by each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from service.dispatch import Dispatcher
from service.inspector import Converter, Inspector
from service.settings import Settings
from tuning_db.blobs import BlobStore
from tuning_db.store import TuningStore


@dataclass(frozen=True, slots=True)
class Services:
    """The collaborators of one process."""

    settings: Settings
    store: TuningStore
    blobs: BlobStore
    dispatcher: Dispatcher
    inspector: Inspector
    converter: Converter


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


ServicesDep = Annotated[Services, Depends(services_of)]
