"""Race detector for Triton kernels in Triton's interpreter.

The programs of a launch are unordered. The detector notes, for each byte, which programs loaded it,
stored to it or did an atomic on it. If no byte is touched by two programs with a plain store among
the touches, every load returned either the value at launch or the program's own store, so every
other order of the programs gives the same results: one clean run decides all orders
(docs/races.md).

Verdicts, one report for each contiguous region:

* ``WRITE-WRITE``: two programs stored to it. Same-value or different-value.
* ``READ-WRITE``: one program loaded what another stored. A silent store or value-changing.
* ``ATOMIC-PLAIN``: an atomic of one program meets a plain access of another.
* ``ATOMIC-ORDER``: atomics of several programs that do not commute (float add, exchange,
  compare-and-swap, different operations) or whose result is used. No race, but an order.
* ``LANE-RAW``, ``-WAR``, ``-WAW``, ``LANE-DUP-STORE``: inside one program, different lanes touch
  one byte without a ``tl.debug_barrier`` between, or one store hits an address twice with different
  values. Warnings: the map from lanes to threads is unknown, and one warp is harmless.

Memory is reached in the interpreter through four functions of its native module alone, and these
are what the detector wraps; a function of that module which it does not know is refused, and so is
an access outside the tensors that the launch was given.

A byte needs no set of programs: the first one and any other one decide every question above. So the
shadow has constant size and misses nothing.
"""

from __future__ import annotations

from headrace.rt.detector.effects import RowBound, assert_effects
from headrace.rt.detector.report import Difference, LaunchRecord, Order, Report
from headrace.rt.detector.watch import ALL_ORDERS, Detector, active, explore

__all__ = [
    "ALL_ORDERS",
    "Detector",
    "Difference",
    "LaunchRecord",
    "Order",
    "Report",
    "RowBound",
    "active",
    "assert_effects",
    "explore",
]
