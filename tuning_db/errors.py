"""Every error that Tunery raises on purpose, in one tree.

    TuneryError
    ├── InvalidRequest            a field of the request is wrong; carries the field's name
    │   ├── InvalidModel          the uploaded bytes are not a model that can be read
    │   ├── InvalidCalibration    the uploaded bytes are not calibration data that can be read
    │   ├── UnsupportedFormat     they are a model of a format that this service does not take
    │   ├── UnsupportedOperator   the model holds an operator that cannot be compiled
    │   ├── ShapeMismatch         an input shape is missing, or contradicts the model
    │   ├── UnknownDevice         nobody has reported such a device
    │   └── UnsupportedOption     a legal word for something this version does not do
    ├── NotFound                  no job, model, device or artifact of that name
    │   └── CacheMiss             no artifact under that key; carries the nearest ones
    ├── Conflict                  the request contradicts what is stored
    │   ├── IllegalTransition     a job cannot go from this state to that one
    │   └── IdempotencyConflict   the same Idempotency-Key came with another body
    ├── StaleAttempt              somebody else holds the job now; stop, and write nothing
    ├── TooLarge                  more bytes than the service accepts
    ├── QueueFull                 as many jobs wait as the service accepts; ask again later
    ├── StorageFull               the disk or the database has no room
    ├── SchemaMismatch            the database's schema is older or newer than this code
    ├── DatabaseUnavailable       the database does not answer
    ├── BlobCorrupt               stored bytes are not what their name says
    ├── BrokerUnavailable         the job is stored, but no worker could be woken
    └── TuningFailed              one job ended without a library
        ├── QuantizationFailed    the model could not be quantized as asked
        ├── AccuracyTooLow        the quantized model keeps less than the request wants
        ├── ImportFailed          the model could not be turned into Relax
        ├── NoValidCandidate      every candidate failed to build or to run
        ├── BuildFailed           the final library did not compile
        ├── LoadFailed            the library does not load on its device
        ├── DeviceLost            the device went away in the middle of the job
        ├── CheckFailed           its outputs differ from the reference
        └── ProcessDied           the tuning process crashed or was killed

HTTP statuses and exit codes are given to these in `service/problems.py` and `service/cli.py`, not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuning_db.keys import NearestKey


class TuneryError(Exception):
    """Base of all. `str(error)` is a sentence for the user that says what to do next."""


class InvalidRequest(TuneryError):
    """A field of the request is wrong. `field` is its dotted path, such as ``inputs.x.shape``."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class InvalidModel(InvalidRequest):
    """The uploaded bytes are not a model that can be read."""

    def __init__(self, message: str, *, field: str = "model") -> None:
        super().__init__(message, field=field)


class InvalidCalibration(InvalidRequest):
    """The uploaded bytes are not calibration data that can be read; the message names the array."""

    def __init__(self, message: str, *, field: str = "calibration") -> None:
        super().__init__(message, field=field)


class UnsupportedFormat(InvalidRequest):
    """The uploaded bytes are a model of a known `format` that is not taken, or whose converter is not installed."""

    def __init__(self, message: str, *, format: str, field: str = "model") -> None:
        super().__init__(message, field=field)
        self.format = format


class UnsupportedOperator(InvalidRequest):
    """The model holds an operator that cannot be compiled, named with its node and opset."""

    def __init__(self, message: str, *, operator: str, node: str, opset: int, field: str = "model") -> None:
        super().__init__(message, field=field)
        self.operator = operator
        self.node = node
        self.opset = opset


class ShapeMismatch(InvalidRequest):
    """An input shape is missing, or contradicts the model; the message names input and dimension."""


class UnknownDevice(InvalidRequest):
    """Nobody has reported such a device. `candidates` are the names that are known."""

    def __init__(self, message: str, *, candidates: Sequence[str], field: str = "device") -> None:
        super().__init__(message, field=field)
        self.candidates = tuple(candidates)


class UnsupportedOption(InvalidRequest):
    """A legal word for something that this version does not do."""


class NotFound(TuneryError):
    """No job, model, device or artifact of that name."""


class CacheMiss(NotFound):
    """No artifact under that key. `nearest` are stored keys, closest first, with what differs."""

    def __init__(self, message: str, *, nearest: Sequence[NearestKey] = ()) -> None:
        super().__init__(message)
        self.nearest = tuple(nearest)


class Conflict(TuneryError):
    """The request contradicts what is stored."""


class IllegalTransition(Conflict):
    """A job cannot go from this state to that one."""


class IdempotencyConflict(Conflict):
    """The same Idempotency-Key came with another body."""


class StaleAttempt(TuneryError):
    """Somebody else holds the job now, or it has ended: stop, and write nothing."""


class TooLarge(TuneryError):
    """More bytes than the service accepts."""

    def __init__(self, message: str, *, limit_bytes: int) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes


class QueueFull(TuneryError):
    """As many jobs wait as the service accepts. Nothing was stored; ask again later."""


class StorageFull(TuneryError):
    """The disk or the database has no room."""


class SchemaMismatch(TuneryError):
    """The database's schema is older or newer than this code; the message says which command to run."""


class DatabaseUnavailable(TuneryError):
    """The database does not answer, or could not be reached."""


class BlobCorrupt(TuneryError):
    """Stored bytes are not what their name says; they have been moved to quarantine."""


class BrokerUnavailable(TuneryError):
    """The job is stored, but no worker could be woken. The sweep will send it again."""


class TuningFailed(TuneryError):
    """One job ended without a library. `kind` is stable and is what clients compare."""

    kind = "tuning-failed"


class QuantizationFailed(TuningFailed):
    """The model could not be quantized as asked. `kind` is that of the error which its process met, if it told one."""

    kind = "quantization-failed"

    def __init__(self, message: str, *, kind: str | None = None) -> None:
        super().__init__(message)
        if kind is not None:
            self.kind = kind


class AccuracyTooLow(TuningFailed):
    """An output of the quantized model keeps less on the calibration data than the request's `min_sqnr_db`."""

    kind = "accuracy-too-low"


class ImportFailed(TuningFailed):
    """The model could not be turned into Relax."""

    kind = "import-failed"


class NoValidCandidate(TuningFailed):
    """Every candidate failed to build or to run."""

    kind = "no-valid-candidate"


class BuildFailed(TuningFailed):
    """The final library did not compile."""

    kind = "build-failed"


class LoadFailed(TuningFailed):
    """The library does not load on its device."""

    kind = "load-failed"


class DeviceLost(TuningFailed):
    """The device went away in the middle of the job, and did not come back in time."""

    kind = "device-lost"


class CheckFailed(TuningFailed):
    """The library's outputs differ from the reference by more than the tolerance."""

    kind = "check-failed"


class ProcessDied(TuningFailed):
    """The tuning process crashed or was killed by something other than a cancel."""

    kind = "process-died"


def kind_of(error: InvalidRequest | TuningFailed) -> str:
    """What a job's error is called: `UnsupportedOperator` → ``unsupported-operator``."""
    if isinstance(error, TuningFailed):
        return error.kind
    name = type(error).__name__
    return "".join(f"-{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
