"""Which keys of a config.json a family asked for, and which of the others mean nothing.

A family reads config.json through a `ConfigObject`, which notes every key that is asked for: those
are used, or refused unless they have a value that is supported. What is left over must be known to
change nothing: in every family (the tables below) or in this one (its `WITHOUT_EFFECT`). A key that
is neither is one that we do not understand. It may be harmless, as what training tools leave
behind, or it may mean other maths, so it is reported by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

WITHOUT_EFFECT = frozenset({
    # What the file is and what wrote it. The registry has read the first two.
    "architectures", "model_type", "auto_map", "transformers_version", "_name_or_path",
    "name_or_path", "_commit_hash",
    # How weights are stored, which their files say too; the default of `--dtype` on a GPU.
    "dtype", "torch_dtype",
    # What a call of transformers returns beside logits, and which of its codes computes them.
    "return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "use_cache",
    "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "experts_implementation", "chunk_size_feed_forward", "torchscript",
    # Tokens that no layer knows. Where an answer ends is read as eos_token_id.
    "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class", "prefix",
    # Heads of classifiers.
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params",
    # In a training run alone.
    "initializer_range", "attention_dropout", "hidden_dropout", "router_aux_loss_coef",
    "use_bfloat16", "tf_legacy_loss",
    # Which matrices are in FP8, their files say; how activations were rounded does not matter, as
    # they are not.
    "quantization_config.modules_to_not_convert", "quantization_config.ignored_layers",
    "quantization_config.scale_fmt",
})  # fmt: skip
"""Keys that change nothing in any family, whatever their value."""

HARMLESS_VALUES: dict[str, Any] = {
    # Encoders and decoders that attend to one.
    "is_encoder_decoder": False, "is_decoder": False, "add_cross_attention": False,
    "cross_attention_hidden_size": None, "tie_encoder_decoder": False, "pruned_heads": {},
    # How tokens are chosen; older files hold all of these. Other values belong into
    # generation_config.json, and are not read here.
    "max_length": 20, "min_length": 0, "do_sample": False, "early_stopping": False, "num_beams": 1,
    "num_beam_groups": 1, "diversity_penalty": 0.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0, "length_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "num_return_sequences": 1,
    "output_scores": False, "return_dict_in_generate": False, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "remove_invalid_values": False, "suppress_tokens": None,
    "exponential_decay_length_penalty": None, "begin_suppress_tokens": None,
}  # fmt: skip
"""Keys that change nothing in any family at this value."""

TEXT = "text_config."
"""Where multimodal files hold what others have at the top: every table holds inside it too."""


@dataclass(frozen=True, slots=True)
class Notes:
    """What was asked for: paths from the top of the file, those of absent keys too.

    Attributes:
        asked: Every key that was asked for.
        left_out: Those of them that count for nothing beside others, with all that is in them.
    """

    asked: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)


class ConfigObject(Mapping[str, Any]):  # noqa: PLW1641 - hashable as little as a dict
    """An object of config.json that notes which of its keys are asked for.

    It reads like the plain object. Objects in it are of this class too and share its notes. Copies
    are made by its own methods alone: `dict(it)` would ask for every key.

    Args:
        values: The plain object.
        prefix: What a path has before the names of its keys, such as "text_config.".
        paths: Where the value of a key stands in the file, if not under its own name.
        notes: Of the object that it is part of.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        prefix: str = "",
        paths: Mapping[str, tuple[str, ...]] | None = None,
        notes: Notes | None = None,
    ) -> None:
        self.plain = dict(values)
        self.notes = notes or Notes()
        self._prefix = prefix
        self._paths = dict(paths or {})

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - a JSON value
        self.notes.asked.update(self.paths(name))
        value = self.plain[name]
        if isinstance(value, Mapping):
            return ConfigObject(value, prefix=self.paths(name)[0] + ".", notes=self.notes)
        return value

    def __contains__(self, name: object) -> bool:
        self.notes.asked.update(self.paths(str(name)))
        return name in self.plain

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)

    def __len__(self) -> int:
        return len(self.plain)

    def __eq__(self, other: object) -> bool:
        value = other.plain if isinstance(other, ConfigObject) else other
        return self.plain == value

    def __repr__(self) -> str:
        return repr(self.plain)

    def paths(self, name: str) -> tuple[str, ...]:
        """Return where a key's value may stand, from the top of the file."""
        return self._paths.get(name) or (self._prefix + name,)

    def leave_out(self, *names: str) -> None:
        """Say that settings count for nothing here, because of what others say."""
        for name in names:
            self.notes.asked.update(self.paths(name))
            self.notes.left_out.update(self.paths(name))

    def with_defaults(self, **values: Any) -> ConfigObject:  # noqa: ANN401 - JSON values
        """Return a copy with these values for keys that are not there."""
        return self._copy(values | self.plain)

    def replaced(self, **values: Any) -> ConfigObject:  # noqa: ANN401 - JSON values
        """Return a copy with these values, whatever the file says."""
        return self._copy(self.plain | values)

    def with_outer(self, outer: ConfigObject, names: Collection[str]) -> ConfigObject:
        """Return a copy that takes some keys that it lacks from the object around it."""
        outer.leave_out(*(name for name in names if name in self.plain))
        taken = {name: outer.plain[name] for name in names if name in outer.plain}
        paths = {name: outer.paths(name) for name in taken if name not in self.plain}
        return self._copy(taken | self.plain, paths)

    def under_one_name(self, names: Mapping[str, str]) -> ConfigObject:
        """Give every setting that published files spell in two ways one name.

        Args:
            names: Our name by the other.

        Returns:
            The settings without the other names.

        Raises:
            ModelError: Two names of a setting have different values.
        """
        merged, paths = dict(self.plain), dict(self._paths)
        for other, name in names.items():
            paths[name] = (*(paths.get(name) or self.paths(name)), *self.paths(other))
            value = merged.pop(other, None)
            if value is None:
                continue
            if merged.get(name) is None:
                merged[name] = value
            if not are_equal(merged[name], value):
                raise ModelError(
                    f"config.json: {other} is {value!r} but {name} is {merged[name]!r}; they are "
                    "two names of one setting"
                )
        return self._copy(merged, paths)

    def _copy(
        self, values: Mapping[str, Any], paths: Mapping[str, tuple[str, ...]] | None = None
    ) -> ConfigObject:
        paths = self._paths | dict(paths or {})
        return ConfigObject(values, prefix=self._prefix, paths=paths, notes=self.notes)


def are_equal(value: object, other: object) -> bool:
    """Whether two JSON values are equal; Python takes true for 1 and false for 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def not_understood(
    raw: Mapping[str, Any], notes: Notes, without_effect: Collection[str]
) -> tuple[str, ...]:
    """Return the keys that nobody asked for and that are not known to change nothing.

    Args:
        raw: A config.json.
        notes: Made while it was read.
        without_effect: Paths of keys that change nothing in its family.

    Returns:
        Paths such as "rope_parameters.factor", in the order of the file.
    """
    return tuple(_left(raw, "", notes, without_effect))


def _left(
    values: Mapping[str, Any], prefix: str, notes: Notes, without_effect: Collection[str]
) -> Iterator[str]:
    for name, value in values.items():
        path = prefix + name
        short = path.removeprefix(TEXT)
        if path in notes.left_out or short in WITHOUT_EFFECT or short in without_effect:
            continue
        if short in HARMLESS_VALUES and value == HARMLESS_VALUES[short]:
            continue
        if path not in notes.asked:
            yield path
        elif isinstance(value, Mapping):
            yield from _left(value, path + ".", notes, without_effect)
