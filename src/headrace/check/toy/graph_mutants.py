"""Faults around captured graphs."""

# ruff: noqa: D102  the engine documents the methods that detours override

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from headrace.check.toy import model
from headrace.check.toy.engine import (
    INPUTS,
    OUTPUTS,
    RESULTS,
    ToyEngine,
)
from headrace.check.toy.faults import UNORDERED, fault

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from headrace import rt

    Counts = npt.NDArray[np.int64]


class Graphs(ToyEngine):
    """Attention and step are one graph on static buffers."""

    def set_up(self) -> None:
        super().set_up()
        alloc = self.runtime.alloc
        self.static_in = {
            name: alloc(f"static.in.{name}", field.shape, torch.int64)
            for name, field in INPUTS.items()
        }
        self.static_prev = {
            name: alloc(f"static.prev.{name}", OUTPUTS[name].shape, torch.int64) for name in RESULTS
        }
        self.static_out = {
            name: alloc(f"static.out.{name}", OUTPUTS[name].shape, torch.int64) for name in RESULTS
        }
        self.static_drafts = alloc("static.drafts", OUTPUTS["drafts"].shape, torch.int64)
        self.captures = 0

    def graph_inputs(self, frame: rt.Frame) -> dict[str, rt.Buffer]:
        """What the captured ops read."""
        del frame
        return self.static_in

    def launch_forward(self, frame: rt.Frame, plan: list[dict[str, Any]]) -> None:
        launch = self.runtime.launch
        self.copy_inputs(frame)
        launch(model.copy_all, self.compute, source=self.prev_outputs, target=self.static_prev)
        launch(
            model.copy_all,
            self.compute,
            source={"drafts": frame.outputs["drafts"]},
            target={"drafts": self.static_drafts},
        )
        read, write = self.block_rows(plan)
        slots = [one["slot"] for one in plan]
        inputs = self.graph_inputs(frame)

        def capture(stream: rt.Stream) -> None:
            launch(
                model.attend,
                stream,
                inputs=inputs,
                prev=self.static_prev,
                kv=self.kv.rows(read=()),
                scratch=self.scratch,
            )
            launch(
                model.forward,
                stream,
                inputs=inputs,
                prev=self.static_prev,
                drafts=self.static_drafts,
                scratch=self.scratch,
                kv=self.kv.rows(read=(), write=()),
                state=self.state.rows(),
                window=self.window.rows(),
                out=self.static_out,
            )

        graph = self.runtime.graph(("step", self.captures), capture)
        self.replay(graph, {"kv": (read, write), "state": (slots, slots), "window": (slots, slots)})
        outputs = {name: frame.outputs[name] for name in RESULTS}
        launch(model.copy_all, self.compute, source=self.static_out, target=outputs)

    def copy_inputs(self, frame: rt.Frame) -> None:
        """Frame to static inputs, in the replay's order."""
        self.runtime.launch(
            model.copy_all, self.compute, source=frame.inputs, target=self.static_in
        )

    def replay(self, graph: rt.Graph, rows: dict[str, Any]) -> None:
        """Replay with this step's rows."""
        graph.replay(self.compute, rows=rows)


@fault("static-input-updated-elsewhere", "H", UNORDERED, "static.in.")
class StaticInputElsewhere(Graphs):
    """A static graph input is updated outside the replay's stream."""

    def copy_inputs(self, frame: rt.Frame) -> None:
        self.runtime.launch(
            model.copy_all,
            self.h2d if self.is_faulty else self.compute,
            source=frame.inputs,
            target=self.static_in,
        )


@fault("graph-replayed-after-a-resize", "R", ("STALE-GENERATION",), "static.in.table")
class GraphAfterResize(Graphs):
    """A graph is replayed with memory that a resize has replaced."""

    def launch_step(self) -> None:
        if self.step == 5:  # noqa: PLR2004  in the middle of the run
            self.runtime.resize(self.static_in["table"], self.static_in["table"].shape)
            if not self.is_faulty:
                self.captures += 1
        super().launch_step()


@fault("rotating-frame-in-a-graph", "R", ("ROTATING-IN-GRAPH",), ".in.")
class RotatingInGraph(Graphs):
    """A graph captured the inputs of one frame of the ring."""

    def graph_inputs(self, frame: rt.Frame) -> dict[str, rt.Buffer]:
        return dict(frame.inputs) if self.is_faulty else self.static_in
