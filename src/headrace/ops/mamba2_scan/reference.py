"""The chunked scan's specification is the recurrence itself."""

from __future__ import annotations

from headrace.ops.mamba2_step.reference import mamba2_reference

__all__ = ["mamba2_reference"]
