"""The chunked scan's specification is the recurrence itself."""

from __future__ import annotations

from headrace.ops.gated_delta_step.reference import gated_delta_reference

__all__ = ["gated_delta_reference"]
