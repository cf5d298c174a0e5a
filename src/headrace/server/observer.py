"""What is measured of one request while its outputs pass by."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.outputs import RequestOutput
    from headrace.sampling_params import SamplingParams
    from headrace.server.metrics import Metrics
    from headrace.server.tracing import Tracing


class Observer:
    """Watches the prompts of one request.

    Args:
        params: Of each prompt.
        metrics: Told of all that ends, and when.
        tracing: Told of prompts that were answered.
        model: Its name.
    """

    def __init__(
        self, params: Sequence[SamplingParams], metrics: Metrics, tracing: Tracing, model: str
    ) -> None:
        self._params = params
        self._metrics = metrics
        self._tracing = tracing
        self._model = model
        self._generated = [[0] * one.n for one in params]
        self._num_open = sum(one.n for one in params)
        self._last_s: list[float | None] = [None] * len(params)

    def see(self, place: int, output: RequestOutput) -> None:
        """Take note of an output of the prompt in this place."""
        new = 0
        for choice in output.outputs:
            new += len(choice.token_ids)
            self._generated[place][choice.index] += len(choice.token_ids)
            if choice.finish_reason is not None:
                self._num_open -= 1
                self._metrics.ended(choice.finish_reason)
        if new:
            now, last_s = time.monotonic(), self._last_s[place]
            if last_s is None:
                self._metrics.began(output.metrics)
            else:
                self._metrics.between_tokens(now - last_s, new)
            self._last_s[place] = now
        if output.finished:
            generated, params = self._generated[place], self._params[place]
            self._metrics.finished(output, generated, params)
            self._tracing.finished(output, sum(generated), params, self._model)

    def give_up(self, reason: str) -> None:
        """Count what has no last output and will have none."""
        self._metrics.ended(reason, self._num_open)
        self._num_open = 0
