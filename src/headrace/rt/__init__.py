"""The runtime in which a race cannot be written; see docs/races.md.

The only package that touches streams, events, pinned memory, device copies and kernel launches.
"""

from headrace.rt.buffers import Buffer, Bundle, Field, View
from headrace.rt.effects import Effect, Op, Read, ReadWrite, Write, op
from headrace.rt.errors import (
    DeadlockError,
    EffectError,
    RefusedError,
    RtError,
    StageClosedError,
)
from headrace.rt.frames import Frame, FrameRing, Stage
from headrace.rt.graphs import Graph
from headrace.rt.groups import GlooGroup, Group, LocalGroup, NcclGroup, local_groups
from headrace.rt.queues import Queue
from headrace.rt.reports import Access, Report
from headrace.rt.runtime import BACKENDS, Policy, Runtime, Thread
from headrace.rt.slots import SlotPool
from headrace.rt.streams import Event, Stats, Stream
from headrace.rt.tickets import Result, Ticket

__all__ = [
    "BACKENDS",
    "Access",
    "Buffer",
    "Bundle",
    "DeadlockError",
    "Effect",
    "EffectError",
    "Event",
    "Field",
    "Frame",
    "FrameRing",
    "GlooGroup",
    "Graph",
    "Group",
    "LocalGroup",
    "NcclGroup",
    "Op",
    "Policy",
    "Queue",
    "Read",
    "ReadWrite",
    "RefusedError",
    "Report",
    "Result",
    "RtError",
    "Runtime",
    "SlotPool",
    "Stage",
    "StageClosedError",
    "Stats",
    "Stream",
    "Thread",
    "Ticket",
    "View",
    "Write",
    "local_groups",
    "op",
]
