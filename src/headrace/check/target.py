"""What `headrace check` runs: an engine that can be put on the simulated device.

The toy engine is one target. The real engine becomes another by the same three steps: make it on a
runtime it is given, serve a workload made from a seed, compare with an independent reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace.check.toy.engine import ToyEngine, wrong_requests
from headrace.check.toy.workload import generate

if TYPE_CHECKING:
    from headrace import rt


class Target(Protocol):
    """An engine under check.

    Attributes:
        name: In the output.
        kinds: State kinds that its buffers have.
        overlaps: Overlaps that are looked for on each of them.
        min_accesses_per_step: Checked effects that a step has at the least. Fewer mean that a part
            of the engine has left the checker's sight, which fails the check.
        num_steady_steps: Of the last run: steps right after another one, with asynchronous
            scheduling on.
        num_early_steps: Those enqueued before the results of the step before were read.
    """

    name: str
    kinds: tuple[str, ...]
    overlaps: tuple[str, ...]
    min_accesses_per_step: float
    num_steady_steps: int
    num_early_steps: int

    def run(self, runtime: rt.Runtime, seed: int) -> list[str]:
        """Serve the workload of a seed on a runtime and end with `Runtime.finish`.

        Args:
            runtime: A simulated device; its schedule has a seed of its own.
            seed: Seed of the workload and of the engine's settings.

        Returns:
            One sentence for each request whose tokens differ from the reference; empty if none do.
        """
        ...


class ToyTarget:
    """The toy engine with 1 to 3 steps in flight, by seed."""

    name = "toy"
    kinds: tuple[str, ...] = (
        "kv_block",
        "recurrent_state",
        "conv_window",
        "accepted_counts",
        "sampled_tokens",
        "staging_slot",
        "landing_slot",
        "checkpoint",
    )
    overlaps: tuple[str, ...] = (
        "forward with forward",
        "forward with input copy",
        "forward with read-back",
        "forward with zero or restore",
        "forward with checkpoint",
        "forward with slot reuse",
        "forward with row compaction",
    )
    min_accesses_per_step = 60.0
    num_steady_steps = 0
    num_early_steps = 0

    def run(self, runtime: rt.Runtime, seed: int) -> list[str]:
        """See `Target.run`."""
        workload = generate(seed)
        answers = ToyEngine(runtime, workload, depth=1 + seed % 3).run()
        return [
            f"request {index} of workload {seed} got {answers[index]} instead of "
            f"{workload.requests[index].reference()}"
            for index in wrong_requests(workload, answers)
        ]
