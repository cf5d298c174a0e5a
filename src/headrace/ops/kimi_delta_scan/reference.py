"""The chunked scan's specification is the recurrence itself."""

from __future__ import annotations

from headrace.ops.kimi_delta_step.reference import kimi_delta_reference

__all__ = ["kimi_delta_reference"]
