"""What the worker, the engine and the reference loop ask of a model of any family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from headrace.models.batch import Caches, Kernels, StateGroupSpec, StepBatch
    from headrace.models.config import ModelConfig
    from headrace.models.shard import Shard


class HybridModel(Protocol):
    """A text model of attention layers and layers with a state.

    Models with a multi-token-prediction head (`config.num_mtp_layers`) have a method `mtp` too.
    """

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""

    @property
    def shard(self) -> Shard:
        """Which part of the model this is: all of it, or a rank's."""

    @property
    def num_kv_layers(self) -> int:
        """Layers of the KV pools: attention layers, then the MTP layer if there is one."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype."""

    @property
    def logits_dtype(self) -> torch.dtype:
        """Dtype of `logits`: the head's own, or float32 where something is done to them."""

    @property
    def num_parameters(self) -> int:
        """Elements of the checkpoint's tensors."""

    @staticmethod
    def kernel_obstacle(config: Any) -> str | None:  # noqa: ANN401 - the family's config
        """Return why no fused kernels can run a model, or None if they can.

        Where they can, `forward` (and `mtp`) take batches whose `kernels` is "triton".
        """

    @staticmethod
    def fixed_obstacle(config: Any) -> str | None:  # noqa: ANN401 - the family's config
        """Return why kernels cannot make a token's bits its own, or None if they can.

        Where they can, and have no other obstacle, batches may have `kernels` "fixed".
        """

    @staticmethod
    def segments(config: Any, name: str) -> tuple[int, ...] | None:  # noqa: ANN401
        """Return the sizes of the matrices that a tensor of a checkpoint holds.

        They are along the axis in which ranks have parts of the tensor; see `weights.cuts`. None is
        for a tensor of one matrix, or whose rows are grouped so that a part is in one piece.
        """

    def state_groups(self, max_draft_tokens: int) -> tuple[StateGroupSpec, ...]:
        """Describe the state pools that this model needs.

        Args:
            max_draft_tokens: Most drafts in one step, s.
        """

    def forward(self, batch: StepBatch, caches: Caches) -> Tensor:
        """Run the decoder over a step's tokens; writes keys, values and states.

        Args:
            batch: The step.
            caches: The pools.

        Returns:
            Hidden states after the last norm, [T, C].
        """

    def logits(
        self, hidden_rows: Tensor, kernels: Kernels = "torch", *, out: Tensor | None = None
    ) -> Tensor:
        """Apply the head.

        Args:
            hidden_rows: Rows of `forward`, [R, C].
            kernels: What multiplies.
            out: Where they go, [R filled up to ROW_TILE or more, vocabulary], logits_dtype.

        Returns:
            [R, vocabulary], logits_dtype: the first rows of out, if that is given.
        """
