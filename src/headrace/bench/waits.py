"""Steps in which the device waited for the host.

Looked at from the host, right after a step has been enqueued: if the step before it is done by
then, the device had nothing to do for part of that time. A step enqueued while the last one still
runs starts without a gap. The question is asked by polling, which the engine itself never does;
here nothing hangs on the answer but a figure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from headrace.engine.engine import Engine


class DeviceWaits:
    """Counts while it is entered.

    Attributes:
        num_waits: Steps before which the device had run dry; None where it cannot be told: on the
            CPU everything is done at once.
        num_steps: Steps looked at: those that follow another one directly.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._runtime = engine.parts.runtime
        self._last: Any = None
        self.num_steps = 0
        self.num_waits: int | None = 0 if self._runtime.backend == "cuda" else None

    def __enter__(self) -> DeviceWaits:
        """Begin to count."""
        if self.num_waits is not None:
            self._execute = self._engine.worker.execute
            vars(self._engine.worker)["execute"] = self._counted
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the worker as it was."""
        vars(self._engine.worker).pop("execute", None)

    def _counted(self, output: Any) -> Any:  # noqa: ANN401 - passed through
        handle = self._execute(output)
        event = getattr(getattr(handle, "_ticket", None), "event", None)
        last, self._last = self._last, event
        if last is not None and self.num_waits is not None:
            self.num_steps += 1
            self.num_waits += self._runtime.poll_native(last)  # lint-rt: a figure hangs on it
        return handle
