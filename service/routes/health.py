"""Whether the process lives, and whether it can do its work."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from fastapi import APIRouter, Response

from service.services import ServicesDep
from tuning_db.errors import TuneryError

log = structlog.get_logger()
router = APIRouter(tags=["health"])


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers. Looks at nothing else, so that a database that is away does not get the API restarted."""
    return {"status": "ok"}


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
def readyz(services: ServicesDep, response: Response) -> dict[str, str]:
    """503 while a part is missing. Each part is "ok" or a sentence that says what is wrong."""
    checks: dict[str, Callable[[], None]] = {
        "database": services.store.ping,
        "blobs": services.blobs.ping,
        "broker": services.dispatcher.ping,
    }
    answer = {}
    for part, check in checks.items():
        try:
            check()
            answer[part] = "ok"
        except TuneryError as error:
            answer[part] = str(error)
        except Exception:
            log.exception("readiness_check_failed", part=part)
            answer[part] = "failed; the service's log says why"
    if any(value != "ok" for value in answer.values()):
        response.status_code = 503
    return answer
