"""One step on the device: stage the inputs, launch, fetch what the host will need.

The worker is handed frozen `SchedulerOutput` values and returns a handle whose result is a
`SampledTokens` in that step's own row order. It knows nothing of requests, text or pools' owners.
Every buffer and its writers: see buffers.py. Every launch: see launches.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from headrace import rt
from headrace.models.layers.attention_plan import tiling_of
from headrace.models.layers.split_plan import lists_prompts
from headrace.worker import drafters, launches
from headrace.worker.buffers import (
    MAX_LOGPROBS,
    MAX_PROMPT_LOGITS,
    WorkerSizes,
    input_fields,
    make_pools,
    output_fields,
    prompt_fields,
    tile_fields,
)
from headrace.worker.graphs import StepGraphs
from headrace.worker.launches import Fixed, Kinds, StepShape
from headrace.worker.logit_rules import LogitRules, RuledRow, RulesShape, RulesStage
from headrace.worker.rows import COUNT_NAMES, CompactRows, ProducerMap
from headrace.worker.staging import StagedStep, Stager
from headrace.worker.state_scheme import Columns, Replay
from headrace.worker.step import PromptLogprobs, SampledTokens
from headrace.worker.token_masks import MasksShape, MasksStage
from headrace.worker.transfers import Transfers, make_layouts

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from headrace.models.batch import Kernels, StateGroupSpec
    from headrace.worker.step import KnownPlan, NewSequence, SchedulerOutput, VerifyPlan

_WHOLE, _PARTS = "whole", "parts"
"""Kinds of captured steps: in one piece, or with the choice of tokens between two."""

_SCORED_AT_ONCE = 128
"""Prompt positions whose logits are held together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Log-probabilities of one step's samples, by sample position.

    Attributes:
        first: Per row, its first sample position.
        values, ids: Likeliest tokens, [samples, n].
        own, rank: Of the chosen tokens, [samples].
        logits: All raw logits, [samples, V], if a request asked for everything.
    """

    first: tuple[int, ...]
    values: np.ndarray
    ids: np.ndarray
    own: np.ndarray
    rank: np.ndarray
    logits: np.ndarray | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PromptPart:
    """Scored tokens of a prompt on their way to the host."""

    seq_id: int
    start: int
    token_ids: np.ndarray
    scores: rt.Ticket
    logits: rt.Ticket | None

    def result(self) -> PromptLogprobs:
        scores = self.scores.result()
        return PromptLogprobs(
            seq_id=self.seq_id,
            start=self.start,
            token_ids=self.token_ids,
            own=scores["own"],
            rank=scores["rank"],
            values=scores["values"],
            ids=scores["ids"],
            logits=None if self.logits is None else self.logits.result()["logits"],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """Where the launches of one step read and write.

    Attributes:
        shape: The step as it is launched.
        inputs, outputs: The frame's, or static ones.
        counts, last_token, drafts: The carry arrays.
    """

    shape: StepShape
    inputs: dict[str, rt.Buffer]
    outputs: dict[str, rt.Buffer]
    counts: dict[str, Any]
    last_token: Any  # a Buffer or a View
    drafts: Any

    @property
    def carry(self) -> dict[str, Any]:
        """All carry arrays, by name."""
        return {**self.counts, "last_token": self.last_token, "drafts": self.drafts}


class StepHandle:
    """A step that has been enqueued.

    Attributes:
        step_id: Its step.
        produced: Its own row map.
        saved: Rows of the pieces that it saves, in the plan's order by kind; the state store's.
    """

    __slots__ = (
        "_first", "_logits", "_prompts", "_result", "_ticket", "has_drafts", "produced", "saved",
        "step_id",
    )

    def __init__(
        self,
        step_id: int,
        produced: ProducerMap,
        ticket: rt.Ticket,
        *,
        first: tuple[int, ...],
        has_drafts: bool,
        logits: rt.Ticket | None,
        prompts: tuple[_PromptPart, ...] = (),
        saved: rt.Ticket | None = None,
    ) -> None:
        self.step_id = step_id
        self.saved = saved
        self.produced = produced
        self.has_drafts = has_drafts
        self._ticket = ticket
        self._first = first
        self._logits = logits
        self._prompts = prompts
        self._result: SampledTokens | None = None

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens each landing row sampled, and its accepted count after the save; waits."""
        result = self._ticket.result()
        return result["num_sampled"], result["accepted"]

    def result(self) -> SampledTokens:
        """Wait for the step's tokens."""
        if self._result is None:
            landed = self._ticket.result()
            logprobs = None
            if "logprob" in landed.keys():  # noqa: SIM118 - a Result is no dict
                logprobs = LogprobRows(
                    first=self._first,
                    values=landed["top_values"],
                    ids=landed["top_ids"],
                    own=landed["logprob"],
                    rank=landed["rank"],
                    logits=self._logits.result()["logits"] if self._logits else None,
                )
            self._result = SampledTokens(
                step_id=self.step_id,
                drafts=self._drafts(landed),
                token_ids=landed["tokens"],
                num_sampled=landed["num_sampled"],
                logprobs=logprobs,
                prompt_logprobs=tuple(part.result() for part in self._prompts),
            )
        return self._result

    def _drafts(self, landed: rt.Result) -> np.ndarray | None:
        """Drafts in the order of the step's rows; known rows that go on have none."""
        if "drafts" not in landed.keys():  # noqa: SIM118 - a Result is no dict
            return None
        produced, values = self.produced, landed["drafts"]
        drafts = np.full((len(produced.seq_ids), values.shape[1]), -1, dtype=np.int64)
        ending = [at for at, end in enumerate(produced.known_ends, produced.num_verify) if end >= 0]
        drafts[: produced.num_verify] = values[: produced.num_verify]
        drafts[ending] = values[produced.num_verify :]
        return drafts


class Worker:
    """Owner of the device's memory.

    Args:
        model: A model class of `headrace.models`, its weights on the device.
        runtime: The only way to the device.
        sizes: What memory is allocated by.
        scheme: Where recurrent state sits.
        layout: slots or compact.
        depth: Steps that may be in flight.
        kv_dtype: Dtype of keys and values.
        grid: Tokens between scan points.
        kernels: What computes the generating rows, of the model and of the draft model.
        draft_model: The second model of the drafter "draft".
        graphs: Whether steps of generating rows alone are captured.
        store_step_bytes: Most bytes of KV, and of states, that a step brings to the state store or
            takes from it (one piece at least); None without a store.
        drafter: none, mtp, ngram, draft, or scripted (tests, through `scripts`).
    """

    def __init__(
        self,
        *,
        model: Any,  # noqa: ANN401 - any class of headrace.models
        runtime: rt.Runtime,
        sizes: WorkerSizes,
        scheme: Columns | Replay,
        layout: Literal["slots", "compact"],
        depth: int,
        kv_dtype: torch.dtype,
        grid: int,
        kernels: tuple[Kernels, Kernels] = ("torch", "torch"),
        drafter: str = "none",
        draft_model: Any = None,  # noqa: ANN401
        graphs: bool = False,
        store_step_bytes: int | None = None,
    ) -> None:
        self.runtime = runtime
        self.sizes = sizes
        self.layout = layout
        self.drafter = drafter
        groups = model.state_groups(sizes.max_drafts)
        self._draft_model = draft_model
        draft_groups = () if draft_model is None else draft_model.state_groups(sizes.max_drafts)
        # The draft model's groups use the served model's tables; the first serves any surplus.
        self._draft_tables = tuple(min(g, len(groups) - 1) for g in range(len(draft_groups)))
        is_replay = isinstance(scheme, Replay)
        interval = scheme.interval if isinstance(scheme, Replay) else scheme.unit
        self.fixed = Fixed(
            model=model,
            scheme=scheme.name,
            unit=scheme.unit,
            interval=interval,
            max_pending=scheme.max_pending if isinstance(scheme, Replay) else 0,
            max_drafts=0 if is_replay else sizes.max_drafts,
            block_size=sizes.block_size,
            grid=grid,
            kinds=_kinds(groups) + _kinds(draft_groups),
            table_of=(*range(len(groups)), *self._draft_tables),
            num_tables=len(groups),
            draft_kinds=_kinds(draft_groups),
            kernels=kernels[0],
            draft_kernels=kernels[1],
        )
        self._compute = runtime.stream("compute")
        self._fetch = runtime.stream("d2h")
        ring_size = scheme.ring_size if isinstance(scheme, Replay) else 0
        self.pools = make_pools(
            runtime,
            sizes,
            kv_shape=_kv_shape(model),
            kv_dtype=kv_dtype,
            groups=groups,
            ring_size=ring_size,
        )
        self.draft_pools = None
        if draft_model is not None:
            self.draft_pools = make_pools(
                runtime,
                sizes,
                kv_shape=_kv_shape(draft_model),
                kv_dtype=kv_dtype,
                groups=draft_groups,
                ring_size=ring_size,
                prefix="draft.",
                num_scratch=sizes.max_num_seqs,
            )
        tilings = {"tiles": tiling_of(model, kernels[0])}
        has_list = lists_prompts(model, kernels[0])
        if draft_model is not None:
            tilings["draft_tiles"] = tiling_of(draft_model, kernels[1])
            has_list |= lists_prompts(draft_model, kernels[1])
        fields = input_fields(sizes, len(groups)) | tile_fields(sizes, tilings)
        if has_list:
            fields |= prompt_fields(sizes, len(groups), grid)
        self._frames = runtime.frames(
            "step",
            depth=depth,
            inputs=fields,
            outputs=output_fields(sizes),
        )
        self._make_carry()
        self._make_work(len(groups), model)
        slots = sizes.max_num_seqs
        self._stager = Stager(
            sizes,
            num_tables=len(groups),
            drafter=drafter,
            tilings=tilings,
            prompt_grid=grid if has_list else None,
        )
        self._slot_of: dict[int, int] = {}
        self._inputs_of: dict[int, rt.Bundle] = {}
        self._rules: dict[int, LogitRules] = {}  # by slot, where there are any
        self._rules_stage = RulesStage(
            runtime, depth=depth, max_samples=sizes.max_samples, vocab_size=sizes.vocab_size
        )
        self._masks_stage = MasksStage(runtime, depth=depth, vocab_size=sizes.vocab_size)
        self._scored: dict[int, NewSequence] = {}  # by slot, where prompt_logprobs are wanted
        self._scores: dict[str, rt.Buffer] = {}
        self._prompt_logits: rt.Buffer | None = None
        # With the row that is nobody's.
        self._compact = CompactRows(slots + 1, scheme.unit, interval)
        self._unapplied: StepHandle | None = None
        self.graphs = None
        if graphs:
            self.graphs = StepGraphs(
                runtime, sizes, self._compute, num_tables=len(groups), dtype=model.dtype
            )
        self.transfers = None
        if store_step_bytes is not None:
            self.transfers = self._make_transfers(store_step_bytes, depth)
        self.num_forward_tokens = 0
        self.num_steps = 0

    def _make_transfers(self, step_bytes: int, depth: int) -> Transfers:
        """Make the way to and from the state store: everything that a prefix has in the pools."""
        fixed, (states, _) = self.fixed, self._all_states()
        kv = {buffer.name: buffer for buffer in (self._tokens, *self._all_kv())}
        # Values that are the beginnings of keys have a pool without elements.
        kv = {name: buffer for name, buffer in kv.items() if math.prod(buffer.shape)}
        models = [fixed.model] if self._draft_model is None else [fixed.model, self._draft_model]
        per_column = fixed.unit // fixed.block_size
        layouts = make_layouts(
            kv,
            states,
            [
                {spec.name: spec.shape for spec in group.state}
                for model in models for group in model.state_groups(0)
            ],
            blocks_per_column=per_column,
        )
        most = (-(-self.sizes.max_model_len // fixed.unit), self.sizes.max_num_seqs)
        rows = (layouts.kv.row_bytes, layouts.state.row_bytes)
        return Transfers(
            self.runtime,
            kv=rt.Bundle(kv),
            states=tuple(rt.Bundle(group) for group in states),
            table_of=fixed.table_of,
            layouts=layouts,
            depth=depth,
            max_pieces=(
                max(1, min(most[0], step_bytes // rows[0])),
                max(1, min(most[1], step_bytes // rows[1])),
            ),
        )

    def _make_carry(self) -> None:
        n, s = self.sizes.max_num_seqs + 1, max(1, self.sizes.max_drafts)
        alloc, i64 = self.runtime.alloc, torch.int64
        kinds = {"computed": "lengths", "accepted": "accepted_counts"}
        self._counts = rt.Bundle({
            name: alloc(f"carry.{name}", (n,), i64, kind=kinds.get(name, "carry"), fill=0)
            for name in COUNT_NAMES
        })
        copies = 1 if self.layout == "slots" else 2
        self._last_token = [
            alloc(f"carry.last_token.{i}", (n,), i64, kind="sampled_tokens", fill=0)
            for i in range(copies)
        ]
        self._drafts = [
            alloc(f"carry.drafts.{i}", (n, s), i64, kind="sampled_tokens", fill=-1)
            for i in range(copies)
        ]
        self._turn = 0
        shape = (self.sizes.num_kv_blocks, self.sizes.block_size)
        self._tokens = alloc("kv.tokens", shape, i64, kind="kv_block", fill=0)
        if self.drafter == "scripted":
            width = self.sizes.max_model_len + s + 2
            self._script = tuple(
                alloc(f"carry.{name}", (n - 1, width), i64, kind="script", fill=-1)
                for name in ("script", "keep")
            )
        self.scripts: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def _make_work(self, num_groups: int, model: Any) -> None:  # noqa: ANN401
        sizes = self.sizes
        t, n, s = sizes.padded_tokens, sizes.max_num_seqs, sizes.max_drafts
        i64 = torch.int64
        alloc = self.runtime.alloc
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "token_ids": ((t,), i64),
            "positions": ((t,), i64),
            "kv_slots": ((t,), i64),
            "computed": ((n,), i64),
            "accepted": ((n,), i64),
            "kept": ((n,), i64),
            "base_len": ((n,), i64),
            "write_len": ((n,), i64),
            "window_blocks": ((max(1, num_groups), n, 1 + s), torch.int32),
            "chosen": ((sizes.max_samples,), i64),
            "draft_last": ((n,), i64),
        }
        self._work = rt.Bundle({
            name: alloc(f"work.{name}", shape, dtype, kind="work", fill=0)
            for name, (shape, dtype) in shapes.items()
        })
        group = model.shard.group
        self._exchange = None if group is None else group.attach(self.runtime)
        self._hidden = alloc("work.hidden", (t, sizes.hidden_size), model.dtype, kind="work")
        self._logits = alloc(
            "work.logits", (sizes.max_samples, sizes.vocab_size), model.logits_dtype, kind="work"
        )

    # A step --------------------------------------------------------------------------------

    def execute(self, output: SchedulerOutput) -> StepHandle:
        """Enqueue one step. Returns at once, except in the compact layout after drafts."""
        for seq_id in output.left:
            self._leave(seq_id)
        for new in output.admitted:
            self._admit(new)
        transfers = self.transfers
        loads = saved = None
        if output.loads:
            assert transfers is not None, "a plan with loads needs a state store"
            loads = transfers.stage(output.loads)
        frame = self._frames.next()
        rows = self._carry_rows(output)
        padding = kind = None
        if self.graphs is not None and output.verify is not None and _repeats(output):
            kind = self._kind(output, output.verify)
            padding = self.graphs.fill(output.verify, kind)
        staged = self._stager.stage(
            frame, self._compute, output, rows, scored=self._scored.keys(), padding=padding
        )
        shape, first, stream = staged.shape, staged.first, self._compute
        logits: rt.Ticket | None
        prompts: tuple[_PromptPart, ...] = ()
        if staged.padded is not None and kind is not None:
            logits = self._repeatable_step(frame, output, rows, staged, staged.padded, kind)
        else:
            place = self._place(shape, frame, rows)
            if output.copies:
                self._copy(place, stream, output, rows)
            self._compute_logits(place, stream)
            logits = self._choose(place, stream, output, first, shape.num_samples)
            prompts = self._score_prompts(frame, output, shape) if self._scored else ()
            self._propose(place, stream, output)
        done = stream.record()
        produced = ProducerMap.of(output)
        ticket = self.runtime.fetch(
            _wanted(frame.outputs, shape, has_drafts=output.lands_drafts), on=self._fetch,
            after=done, rows=produced,
        )
        # Behind everything that the step's tokens wait for.
        if output.saves:
            assert transfers is not None, "a plan with saves needs a state store"
            saved = transfers.save(output.saves, stream)
        if loads is not None and transfers is not None:
            transfers.unpack(loads, stream)
        handle = StepHandle(
            output.step_id, produced, ticket, first=first, logits=logits, prompts=prompts,
            saved=saved,
            has_drafts=output.verify is not None and bool(output.verify.num_drafts.any()),
        )
        if self.layout == "compact":
            self._unapplied = handle
        self.num_forward_tokens += shape.num_tokens
        self.num_steps += 1
        return handle

    def _repeatable_step(
        self,
        frame: rt.Frame,
        output: SchedulerOutput,
        rows: CompactRows | None,
        staged: StagedStep,
        shape: StepShape,
        kind: tuple[Hashable, ...],
    ) -> rt.Ticket | None:
        """Enqueue a step of generating rows alone, captured if it is not its first of the kind.

        Args:
            frame: The step's.
            output: The plan.
            rows: Batch rows of the compact layout.
            staged: What was staged.
            shape: Its shape, padding included.
            kind: Everything else that its launches depend on.

        Returns:
            All logits, if a request asked for them.
        """
        graphs = self.graphs
        assert graphs is not None
        place = self._place(shape, frame, rows, graphs)
        graphs.load(frame, staged.rows)
        size = shape.num_verify, shape.max_query_len, shape.kv_width
        logits = None
        if kind[0] == _WHOLE:
            def enqueue(stream: rt.Stream) -> None:
                self._compute_logits(place, stream)
                self._verify(place, stream)
                self._propose(place, stream, output)

            graphs.run("step", size, kind, enqueue)
        else:
            graphs.run("logits", size, kind, lambda stream: self._compute_logits(place, stream))
            logits = self._choose(
                place, self._compute, output, staged.first, staged.shape.num_samples
            )
            if self._needs_save(shape) or self._has_drafter(shape) or output.lands_drafts:
                graphs.run(
                    "drafts", size, kind, lambda stream: self._propose(place, stream, output)
                )
        # As much as the host reads: padding stays behind.
        graphs.store(_wanted(frame.outputs, staged.shape, has_drafts=output.lands_drafts))
        return logits

    def _kind(self, output: SchedulerOutput, verify: VerifyPlan) -> tuple[Hashable, ...]:
        """What the launches of a step of generating rows depend on beside its size and values."""
        slots = verify.slots
        is_whole = (
            output.masks is None
            and self._stager.is_plain(slots)
            and not (self._rules and any(slot in self._rules for slot in slots.tolist()))
        )
        return (
            _WHOLE if is_whole else _PARTS, output.num_draft_tokens, output.lands_drafts,
            self._turn, self.fixed,
        )

    def _needs_save(self, shape: StepShape) -> bool:
        """Whether states may have to move to the columns that they complete."""
        has_columns = self.fixed.scheme == "columns" and bool(self.fixed.kinds)
        return has_columns and shape.may_cross and shape.num_verify > 0

    def _all_states(self) -> tuple[tuple[dict[str, rt.Buffer], ...], ...]:
        """States and rings of the model, then of the draft model."""
        pools = [self.pools] if self.draft_pools is None else [self.pools, self.draft_pools]
        states = tuple(group for each in pools for group in each.states)
        return states, tuple(group for each in pools for group in each.rings)

    def _copy(
        self, place: _Place, stream: rt.Stream, output: SchedulerOutput, rows: CompactRows | None
    ) -> None:
        """Copy blocks and carry values for forks of generating sequences."""
        states, rings = self._all_states()
        self.runtime.launch(
            launches.copy_blocks, stream, kv=self._all_kv(), tokens=self._tokens, states=states,
            rings=rings, table_of=self.fixed.table_of,
            # Compact rows have inherited theirs already, by row.
            carry=place.carry if rows is None else {},
            kv_pairs=output.copies.kv, state_pairs=output.copies.states,
            slot_pairs=output.copies.slots,
        )

    def _all_kv(self) -> tuple[rt.Buffer, ...]:
        """Keys and values of the model, then of the draft model."""
        pools = [self.pools] if self.draft_pools is None else [self.pools, self.draft_pools]
        return tuple(buffer for each in pools for buffer in (each.k, each.v))

    def _compute_logits(self, place: _Place, stream: rt.Stream) -> None:
        """Launch everything up to the logits."""
        states, _ = self._all_states()
        self.runtime.launch(
            launches.advance, stream, inputs=place.inputs, counts=place.counts,
            last_token=place.last_token, drafts=place.drafts, states=states, tokens=self._tokens,
            work=self._work, shape=place.shape, fixed=self.fixed,
        )
        # A step may have copies alone: its only row was a fork, which has left.
        if place.shape.num_tokens:
            self.runtime.launch(
                launches.forward, stream, inputs=place.inputs, work=self._work, k=self.pools.k,
                v=self.pools.v, states=self.pools.states, rings=self.pools.rings,
                hidden=self._hidden, logits=self._logits, exchange=self._exchange,
                shape=place.shape, fixed=self.fixed,
            )

    def _choose(
        self,
        place: _Place,
        stream: rt.Stream,
        output: SchedulerOutput,
        first: tuple[int, ...],
        num_samples: int,
    ) -> rt.Ticket | None:
        """Launch the choice of tokens with the rules and masks of this step.

        Returns:
            All logits of its `num_samples` positions, if a request asked for them.
        """
        rules, rules_shape = self._stage_rules(output, place.shape, first)
        masks, masks_shape = self._stage_masks(output, first)
        self._verify(
            place, stream, rules=rules, rules_shape=rules_shape, masks=masks,
            masks_shape=masks_shape,
        )
        if place.shape.num_logprobs < 0 or not self._stager.wants_all(output):
            return None
        return self.runtime.fetch(
            {"logits": self._logits[:num_samples]}, on=stream, rows=output.step_id
        )

    def _verify(
        self,
        place: _Place,
        stream: rt.Stream,
        *,
        rules: dict[str, rt.Buffer] | None = None,
        rules_shape: RulesShape | None = None,
        masks: dict[str, rt.Buffer] | None = None,
        masks_shape: MasksShape | None = None,
    ) -> None:
        self.runtime.launch(
            launches.verify, stream, inputs=place.inputs, work=self._work, logits=self._logits,
            counts=place.counts, last_token=place.last_token, drafts=place.drafts,
            tokens=self._tokens, rules=rules, masks=masks, outputs=place.outputs,
            shape=place.shape, rules_shape=rules_shape, masks_shape=masks_shape, fixed=self.fixed,
        )

    def _propose(self, place: _Place, stream: rt.Stream, output: SchedulerOutput) -> None:
        """Launch what comes after the choice: saves, drafts, and forks of prompts that end."""
        launch, shape = self.runtime.launch, place.shape
        states, _ = self._all_states()
        if self._needs_save(shape):
            launch(
                launches.save, stream, inputs=place.inputs, work=self._work, counts=place.counts,
                states=states, outputs=place.outputs, shape=shape, fixed=self.fixed,
            )
        self._draft(place, stream, is_fork=False)
        if shape.num_forked:
            # After the drafter too: its caches lie in the same blocks.
            launch(
                launches.copy_blocks, stream, kv=self._all_kv(), tokens=self._tokens,
                states=states, rings=(), table_of=self.fixed.table_of, carry={}, slot_pairs=(),
                **_fork_copies(output, self.fixed.num_tables),
            )
            self._draft(place, stream, is_fork=True)
        if output.lands_drafts:
            launch(
                launches.land_drafts, stream, inputs=place.inputs, drafts=place.drafts,
                outputs=place.outputs, shape=shape,
            )

    def _has_drafter(self, shape: StepShape) -> bool:
        """Whether a drafter has work: those with caches of their own also where nothing is drafted.

        The others would launch nothing, and nothing is no graph.
        """
        return self.drafter in ("mtp", "draft") or (self.drafter != "none" and shape.num_drafts > 0)

    def _draft(self, place: _Place, stream: rt.Stream, *, is_fork: bool) -> None:
        shape, inputs, launch = place.shape, place.inputs, self.runtime.launch
        if not shape.num_tokens or not self._has_drafter(shape):
            return
        if self.drafter == "mtp":
            launch(
                drafters.draft_mtp, stream, inputs=inputs, work=self._work, hidden=self._hidden,
                last_token=place.last_token, k=self.pools.k, v=self.pools.v, drafts=place.drafts,
                exchange=self._exchange, shape=shape, fixed=self.fixed, is_fork=is_fork,
            )
        elif self.drafter == "ngram":
            launch(
                drafters.draft_ngram, stream, inputs=inputs, tokens=self._tokens,
                counts=place.counts, last_token=place.last_token, drafts=place.drafts,
                shape=shape, fixed=self.fixed, is_fork=is_fork,
            )
        elif self.drafter == "draft":
            assert self.draft_pools is not None
            launch(
                drafters.draft_model, stream, inputs=inputs, work=self._work,
                counts=place.counts, last_token=place.last_token, k=self.draft_pools.k,
                v=self.draft_pools.v, states=self.draft_pools.states, rings=self.draft_pools.rings,
                drafts=place.drafts, shape=shape, fixed=self.fixed, model=self._draft_model,
                tables=self._draft_tables, num_state_blocks=self.sizes.num_state_blocks,
                is_fork=is_fork,
            )
        elif self.drafter == "scripted":
            launch(
                drafters.draft_scripted, stream, inputs=inputs, counts=place.counts,
                script=self._script[0], keep=self._script[1], drafts=place.drafts, shape=shape,
                vocab_size=self.sizes.vocab_size, is_fork=is_fork,
            )

    def _stage_masks(
        self, output: SchedulerOutput, first: tuple[int, ...]
    ) -> tuple[dict[str, rt.Buffer] | None, MasksShape | None]:
        """Stage what grammars allow in this step; nothing if none of its rows has one."""
        if output.masks is None:
            return None, None
        return self._masks_stage.stage(output.masks, first, self._compute)

    def _stage_rules(
        self, output: SchedulerOutput, shape: StepShape, first: tuple[int, ...]
    ) -> tuple[dict[str, rt.Buffer] | None, RulesShape | None]:
        """Stage the rules of this step's sampling rows; nothing if none of them has any."""
        if not self._rules:
            return None, None
        rows = [
            RuledRow(
                rules=self._rules[slot], first_sample=first[row], num_samples=num_samples,
                table_start=table[0], table_width=table[1],
            )
            for slot, row, num_samples, table in _sampling_rows(output, shape)
            if slot in self._rules
        ]
        if not rows:
            return None, None
        return self._rules_stage.stage(rows, self._compute)

    def _score_prompts(
        self, frame: rt.Frame, output: SchedulerOutput, shape: StepShape
    ) -> tuple[_PromptPart, ...]:
        """Score the prompt tokens after those of this step's chunks, a few positions at a time."""
        parts = []
        offset = shape.num_verify_tokens
        for row in output.known:
            new = self._scored.get(row.slot)
            if new is not None:
                # The prompt's last position is followed by output.
                count = min(row.end, new.num_prompt_tokens - 1) - row.start
                if count > 0:
                    parts.append(self._score(frame, row, new, offset, count))
            offset += len(row.token_ids)
        return tuple(parts)

    def _score(
        self, frame: rt.Frame, row: KnownPlan, new: NewSequence, offset: int, count: int
    ) -> _PromptPart:
        self._allocate_scores()
        logits = None
        if new.prompt_logprobs == -1:
            if self._prompt_logits is None:
                lines = max(1, MAX_PROMPT_LOGITS // self.sizes.vocab_size)
                self._prompt_logits = self.runtime.alloc(
                    "prompt.logits", (lines, self.sizes.vocab_size), torch.float32, kind="work"
                )
            logits = self._prompt_logits
        for at in range(0, count, _SCORED_AT_ONCE):
            self.runtime.launch(
                launches.score_prompt, self._compute, inputs=self._inputs(frame),
                hidden=self._hidden, scores=self._scores, logits=logits,
                exchange=self._exchange, start=offset + at,
                count=min(_SCORED_AT_ONCE, count - at), at=at, fixed=self.fixed,
            )
        scores = {name: buffer[offset : offset + count] for name, buffer in self._scores.items()}
        fetch, where = self.runtime.fetch, self._compute
        return _PromptPart(
            seq_id=row.seq_id,
            start=row.start + 1,
            token_ids=new.token_ids[row.start + 1 : row.start + 1 + count],
            scores=fetch(scores, on=where, rows=row.seq_id),
            logits=(
                None if logits is None
                else fetch({"logits": logits[:count]}, on=where, rows=row.seq_id)
            ),
        )

    def _allocate_scores(self) -> None:
        if self._scores:
            return
        tokens, width = self.sizes.padded_tokens, min(MAX_LOGPROBS, self.sizes.vocab_size)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "own": ((tokens,), torch.float32),
            "rank": ((tokens,), torch.int64),
            "values": ((tokens, width), torch.float32),
            "ids": ((tokens, width), torch.int64),
        }
        self._scores = {
            name: self.runtime.alloc(f"prompt.{name}", shape, dtype, kind="work")
            for name, (shape, dtype) in shapes.items()
        }

    def _leave(self, seq_id: int) -> None:
        """Forget what only some sequences have: the slot's next one may have none."""
        slot = self._slot_of.pop(seq_id, None)
        if slot is not None:
            self._rules.pop(slot, None)
            self._scored.pop(slot, None)

    def _inputs(self, frame: rt.Frame) -> rt.Bundle:
        """A frame's inputs that launches only read; `counts` is handed over as carry instead."""
        inputs = self._inputs_of.get(frame.index)
        if inputs is None:
            own = ("counts", "row_map")
            inputs = rt.Bundle({n: view for n, view in frame.inputs.items() if n not in own})
            self._inputs_of[frame.index] = inputs
        return inputs

    def _admit(self, new: NewSequence) -> None:
        self._slot_of[new.seq_id] = new.slot  # For `_leave`.
        rules = LogitRules.of(new)
        if rules is not None:
            self._rules[new.slot] = rules
        if new.prompt_logprobs is not None:
            self._scored[new.slot] = new
        self._stager.admit(new)
        if self.drafter == "scripted" and new.seq_id in self.scripts:
            for buffer, values in zip(self._script, self.scripts[new.seq_id], strict=True):
                line = torch.full((1, buffer.shape[1]), -1, dtype=torch.int64)
                line[0, : len(values)] = torch.from_numpy(values)
                self.runtime.write(buffer[new.slot : new.slot + 1], line)

    def _carry_rows(self, output: SchedulerOutput) -> CompactRows | None:
        """Compact: apply the last step's results through its own map, then move rows."""
        if self.layout == "slots":
            return None
        rows = self._compact
        previous, self._unapplied = self._unapplied, None
        admitted = tuple(new.seq_id for new in output.admitted)
        forks = output.copies.sequences
        if forks and previous is not None:
            # Children inherit their parents' counts, and a parent may leave in this very step.
            # No step of a parent is in flight, so this waits for nothing that a fork needs not.
            self._apply(previous)
            previous = None
        rows.begin_step(output.left, admitted, forks)
        if previous is not None:
            self._apply(previous)
        return rows

    def _apply(self, previous: StepHandle) -> None:
        """Compact: take in a step's counts through its own map."""
        if previous.has_drafts:
            num_sampled, accepted = previous.counts()
            self._compact.apply(previous.produced, num_sampled, accepted)
        else:
            self._compact.apply(previous.produced, None, None)

    def _place(
        self,
        shape: StepShape,
        frame: rt.Frame,
        rows: CompactRows | None,
        graphs: StepGraphs | None = None,
    ) -> _Place:
        """Where a step reads and writes; the compact layout brings tokens and drafts to its rows.

        Args:
            shape: The step as it is launched.
            frame: Where it was staged.
            rows: Batch rows of the compact layout, None for slots.
            graphs: Whose static memory it uses instead of the frame's.
        """
        counts: dict[str, Any] = self._counts
        if rows is not None:
            staged = frame.inputs["counts"] if graphs is None else graphs.counts
            count = self.sizes.max_num_seqs + 1
            counts = {
                name: staged[index * count : (index + 1) * count]
                for index, name in enumerate(COUNT_NAMES)
            }
            old, new = self._turn, 1 - self._turn
            self._turn = new
            self.runtime.launch(
                launches.gather_carry, self._compute, row_map=frame.inputs["row_map"],
                source_token=self._last_token[old], source_drafts=self._drafts[old],
                last_token=self._last_token[new], drafts=self._drafts[new],
                num_rows=len(rows.seq_ids),
            )
        return _Place(
            shape=shape,
            inputs=self._inputs(frame) if graphs is None else graphs.inputs,
            outputs=frame.outputs if graphs is None else graphs.outputs,
            counts=counts,
            last_token=self._last_token[self._turn],
            drafts=self._drafts[self._turn],
        )


def _repeats(output: SchedulerOutput) -> bool:
    """Whether a step with generating rows has nothing but them."""
    return not output.known and not output.copies


def _wanted(
    outputs: dict[str, rt.Buffer], shape: StepShape, *, has_drafts: bool
) -> dict[str, rt.View]:
    """What of a step's outputs the host reads."""
    num_rows = shape.num_verify + len(shape.known) + shape.num_forked
    num_drafting = shape.num_verify + shape.num_ending
    wanted = {name: outputs[name][:num_rows] for name in ("tokens", "num_sampled", "accepted")}
    if has_drafts and num_drafting:
        wanted["drafts"] = outputs["drafts"][:num_drafting]
    if shape.num_logprobs >= 0:
        for name in ("logprob", "rank", "top_values", "top_ids"):
            wanted[name] = outputs[name][: shape.num_samples]
    return wanted


def _sampling_rows(
    output: SchedulerOutput, shape: StepShape
) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Slot, row, samples and KV table (offset, width) of every row that samples."""
    if output.verify is not None:
        width = shape.kv_width
        counts = (output.verify.num_drafts + 1).tolist()
        for row, slot in enumerate(output.verify.slots.tolist()):
            yield slot, row, counts[row], (row * width, width)
    for row, plan in enumerate(output.known, start=shape.num_verify):
        if plan.samples:
            yield plan.slot, row, 1, shape.known[row - shape.num_verify].table
    row = shape.num_verify + len(output.known)
    for plan, known in zip(output.known, shape.known, strict=True):
        for fork in plan.forks:
            # What precedes its first token is the prompt, which is the row's.
            yield fork.slot, row, 1, known.table
            row += 1


def _fork_copies(output: SchedulerOutput, num_tables: int) -> dict[str, Any]:
    """What the forks of this step's known rows copy."""
    forks = output.forks
    return {
        "kv_pairs": tuple(pair for _, fork in forks for pair in fork.kv_copies),
        "state_pairs": tuple(
            tuple((row.states[t].target_block, fork.state_blocks[t]) for row, fork in forks)
            for t in range(num_tables)
        ),
    }


def _kv_shape(model: Any) -> tuple[int, int, int, int]:  # noqa: ANN401
    config = model.config
    return model.num_kv_layers, config.num_kv_heads, config.head_dim, config.kv_value_dim


def _kinds(groups: tuple[StateGroupSpec, ...]) -> tuple[Kinds, ...]:
    return tuple(tuple((spec.name, spec.kind) for spec in group.state) for group in groups)
