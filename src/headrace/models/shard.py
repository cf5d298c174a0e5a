"""A rank's part of a model that several devices share.

Each rank runs a model of its own: fewer heads, narrower blocks, a part of the vocabulary. Its
config says how many (`ModelConfig.part`) and its weights are cut accordingly (`weights.cuts`), so
layers know nothing of it. Only where a part becomes a whole again do ranks exchange something:

    behind a mixer's or a feed-forward block's last projection   outputs are added
    behind the embedding, of which a rank has some rows          rows are added: all but one are 0
    behind the head, of which a rank has some rows               columns are put side by side

Everything between those is the same on all ranks, and so are the tokens that they choose.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from headrace.errors import ConfigError
from headrace.ops.fixed_linear import fixed_linear
from headrace.ops.linear import linear, pad_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from headrace import rt
    from headrace.models.batch import Kernels
    from headrace.models.config import ModelConfig

_MOST_RANKS = 64
Config = TypeVar("Config", bound="ModelConfig")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """Which part of a model a rank has, and how it meets the others.

    Attributes:
        rank: 0 .. size - 1.
        size: Ranks.
        group: Of all ranks; None for a whole model, and where a part is only described.
    """

    rank: int = 0
    size: int = 1
    group: rt.Group | None = None

    @classmethod
    def of(cls, group: rt.Group) -> Shard:
        """The part of a group's rank."""
        return cls(rank=group.rank, size=group.size, group=group)

    def sum(self, part: Tensor) -> Tensor:
        """Add what each rank has of a sum, [..]; the part may be overwritten."""
        if self.size == 1:
            return part
        assert self.group is not None, "a part without a group cannot be run"
        return self.group.all_reduce(part)

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Look tokens up.

        Args:
            table: This rank's rows of the embedding, [ceil(V / size), C].
            token_ids: [T] i64.

        Returns:
            [T, C].
        """
        if self.size == 1:
            return table.index_select(0, token_ids)
        own = token_ids - self.rank * table.shape[0]
        is_elsewhere = (own < 0) | (own >= table.shape[0])
        rows = table.index_select(0, own.masked_fill(is_elsewhere, 0))
        return self.sum(rows.masked_fill(is_elsewhere[:, None], 0.0))

    def head(
        self,
        table: Tensor,
        hidden_rows: Tensor,
        vocab_size: int,
        kernels: Kernels = "torch",
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Make logits.

        Args:
            table: This rank's rows of the head, [ceil(V / size), C].
            hidden_rows: [R, C].
            vocab_size: V.
            kernels: What multiplies.
            out: Where they go, [R filled up to ROW_TILE or more, V], the table's dtype.

        Returns:
            Those of the whole vocabulary, [R, V], in the table's dtype.
        """
        rows = hidden_rows.shape[0]
        # A library has the head's few rows too: nothing else is measured for so large a weight.
        multiply = fixed_linear if kernels == "fixed" else linear
        if self.size == 1:
            return multiply(pad_rows(hidden_rows), table, out=out)[:rows]
        assert self.group is not None, "a part without a group cannot be run"
        own = multiply(pad_rows(hidden_rows), table)[:rows]
        parts = self.group.all_gather(own.contiguous())
        logits = hidden_rows.new_empty(rows, vocab_size) if out is None else out[:rows]
        for rank, part in enumerate(parts):
            place = logits[:, rank * table.shape[0] :][:, : table.shape[0]]
            place.copy_(part[:, : place.shape[1]])
        return logits


WHOLE = Shard()
"""All of a model, on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What of a model ranks have parts of, by the names of config.json.

    Attributes:
        divided: Numbers that each rank has an equal part of.
        copied: The same, but where there are fewer than ranks, neighbours have a copy each.
    """

    divided: Mapping[str, int]
    copied: Mapping[str, int] = field(default_factory=dict)

    def with_divided(self, **more: int) -> Counts:
        """These, and more that each rank has an equal part of."""
        return Counts(divided={**self.divided, **more}, copied=self.copied)

    def obstacle(self, size: int) -> tuple[str, int] | None:
        """Return a number that so many ranks cannot share, or None."""
        for name, count in self.divided.items():
            if count % size:
                return name, count
        for name, count in self.copied.items():
            if count % size and size % count:
                return name, count
        return None

    def check(self, size: int) -> None:
        """Refuse a number of ranks that cannot share the model.

        Raises:
            ConfigError: With the numbers that can.
        """
        found = self.obstacle(size)
        if found is None:
            return
        fit = [str(n) for n in range(1, _MOST_RANKS + 1) if self.obstacle(n) is None]
        raise ConfigError(
            f"tensor_parallel_size is {size} but the model's {found[0]} is {found[1]}, which so "
            f"many devices cannot share; sizes that work are {', '.join(fit)}"
        )


def attention_counts(config: ModelConfig) -> Counts:
    """Heads of attention layers, which most families spell alike."""
    if not config.num_attention_heads:
        return Counts(divided={})
    return Counts(
        divided={"num_attention_heads": config.num_attention_heads},
        copied={"num_key_value_heads": config.num_kv_heads},
    )


def attention_part(config: Config, size: int) -> Config:
    """Give a rank its part of the heads that `attention_counts` names."""
    has_attention = config.num_attention_heads > 0
    return replace(
        config,
        num_shards=size,
        num_attention_heads=config.num_attention_heads // size,
        num_kv_heads=copied_part(config.num_kv_heads, size) if has_attention else 0,
    )


def copied_part(count: int, size: int) -> int:
    """A rank's part of something that neighbours may have copies of."""
    return max(1, count // size)
