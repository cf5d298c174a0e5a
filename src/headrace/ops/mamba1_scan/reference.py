"""The scan's specification is the recurrence itself."""

from __future__ import annotations

from headrace.ops.mamba1_step.reference import mamba1_reference

__all__ = ["mamba1_reference"]
