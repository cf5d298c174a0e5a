"""The exceptions users meet.

    HeadraceError
    ├── ConfigError            a flag, file or keyword is wrong, or the machine cannot honour it
    ├── ModelError             the model folder cannot be used
    │   ├── UnsupportedModelError   unknown architecture, or a config value that changes the maths
    │   └── WeightsError            a tensor is missing, unexpected, truncated or of the wrong shape
    ├── RequestError           one request is wrong; others go on (HTTP 400)
    ├── QueueFullError         too many waiting requests (HTTP 429)
    ├── NotFoundError          unknown model or route (HTTP 404)
    └── EngineDeadError        the engine stopped; nothing more will be answered (HTTP 503)
        └── RankError              a process that runs a part of the model ended, or hangs

Every message gives what, the value, the limit and the remedy.
"""


class HeadraceError(Exception):
    """Base of all errors that headrace raises on purpose."""


class ConfigError(HeadraceError):
    """A setting is wrong or cannot be honoured on this machine."""


class ModelError(HeadraceError):
    """The model folder cannot be used."""


class UnsupportedModelError(ModelError):
    """The architecture, or a config value that changes its maths, is not supported."""


class WeightsError(ModelError):
    """A tensor is missing, unexpected, truncated or of the wrong shape."""


class RequestError(HeadraceError, ValueError):
    """One request cannot be served as asked.

    Attributes:
        param: Name of the offending parameter, or None where no single one is to blame.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(HeadraceError):
    """The waiting queue is at its limit.

    Attributes:
        retry_after_s: Seconds after which trying again is sensible.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotFoundError(HeadraceError):
    """The named model or route does not exist."""


class EngineDeadError(HeadraceError):
    """The engine loop has ended; pending and new requests cannot be answered."""


class RankError(EngineDeadError):
    """A process that runs a part of the model ended or hangs; the message names its rank."""
