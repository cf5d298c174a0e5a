"""A model's sizes and constants, parsed once from the `config.json` beside its weights.

Every value that changes the maths is read or refused: a setting that the model classes do not
implement raises `UnsupportedModelError` with its name and value, so that no checkpoint is ever run
as something that it is not. A key that neither a family nor `config_keys` knows is reported. What
all families share is here; each family adds its own fields.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from headrace.errors import ModelError, UnsupportedModelError
from headrace.models.config_keys import ConfigObject, are_equal, not_understood
from headrace.weights import quantization_of

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Self

    from headrace.models.shard import Counts

_LOG = logging.getLogger(__name__)
_MOST_NAMED = 20
"""Keys that a warning names; a damaged file may have any number."""

_LARGEST = 1e30
_MOST = {"num_hidden_layers": 10_000, "num_experts": 100_000, "num_local_experts": 100_000}
"""Far above any model, and so small that listing so many tensors ends soon."""

LINEAR = "linear_attention"
FULL = "full_attention"
MAMBA1 = "mamba1"
MAMBA2 = "mamba2"
CONV = "short_conv"
LIGHTNING = "lightning_attention"
KIMI_DELTA = "kimi_delta_attention"
MAMBA2_AND_ATTENTION = "mamba2_and_attention"
MLP = "mlp"
MOE = "moe"

ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Keys about the rotary embedding, which say nothing of a model without."""

UNBOUNDED_LENGTH = 8192
"""Longest sequence by default of models that have no longest sequence: those without attention."""

_WITH_ATTENTION = frozenset({FULL, MAMBA2_AND_ATTENTION})
_WITHOUT_STATE = frozenset({FULL, MLP, MOE})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine needs to know of any hybrid text model.

    Attributes:
        architecture: Class name from config.json, the key of the registry.
        model_type: The text model's type, such as qwen3_5_text.
        vocab_size: Rows of the embedding.
        hidden_size: Model width, C.
        layer_types: Kind of each decoder layer: "full_attention", the kind of its state, of both,
            or "mlp" and "moe" where a feed-forward block is a layer by itself.
        num_attention_heads: Query heads, H; 0 without attention.
        num_kv_heads: Key and value heads, G; 0 without attention.
        head_dim: Size of an attention head, D; 0 without attention.
        rotary_dim: Leading dimensions of a head that are rotated, 0 without rotary embedding.
        rope_theta: Base of the rotary frequencies.
        rms_norm_eps: Added to the mean square in every norm.
        tie_word_embeddings: The head is the embedding.
        num_mtp_layers: Layers of the multi-token-prediction head, 0 or 1.
        max_position_embeddings: Longest sequence that the model was made for.
        bos_token_id: First token, if the model has one.
        eos_token_ids: Tokens that end an answer, from config.json.
        dtype: The checkpoint's own dtype name.
        num_shards: Ranks that share the model; with more than one, heads and widths are a rank's.
        ignored_keys: Paths of the keys of config.json that nothing here understands.
        WITHOUT_EFFECT: Paths of keys that the family knows to change nothing, besides those of
            `config_keys`. A path ends with a key or with an object and all that is in it.
    """

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    num_mtp_layers: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_shards: int = 1
    ignored_keys: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Parse the contents of a Hugging Face `config.json`.

        Args:
            raw: The parsed JSON object.

        Returns:
            The validated config of the family that `model_type` names. A warning names the keys
            that are not understood.

        Raises:
            UnsupportedModelError: The model type is unknown, a value asks for maths that is not
                implemented, or the weights are quantised in a way that is not supported.
            ModelError: A field is missing or has an impossible value.
        """
        from headrace.models.registry import family  # noqa: PLC0415 - families import this module

        read = ConfigObject(raw)
        quantization_of(read)
        try:
            config = family(read).parse(read)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # Each family checks what it knows can be wrong; this is for files that are damaged.
            raise ModelError(
                "config.json holds a value of a wrong type or range "
                f"({type(error).__name__}: {error}); fetch the file again"
            ) from error
        ignored = not_understood(raw, read.notes, config.WITHOUT_EFFECT)
        if ignored:
            more = len(ignored) - _MOST_NAMED
            _LOG.warning(
                "config.json: not understood and ignored: %s%s; a key that changes the maths would "
                "make this model compute something else than it was made for",
                ", ".join(repr(path) for path in ignored[:_MOST_NAMED]),
                f" and {more} more" if more > 0 else "",
            )
        return replace(config, ignored_keys=ignored)

    @property
    def num_layers(self) -> int:
        """Decoder layers, MTP layers not counted."""
        return len(self.layer_types)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, and of the head, that a rank has; its last ones may be padding."""
        return -(-self.vocab_size // self.num_shards)

    @property
    def counts(self) -> Counts | None:
        """What ranks have parts of; None where layers are not divided yet."""
        return None

    def part(self, size: int) -> Self:
        """Return the sizes of the model that one of `size` ranks runs.

        Args:
            size: A number that `counts` can be shared by.
        """
        raise NotImplementedError(f"{self.architecture} is not divided among {size} devices")

    @property
    def kv_value_dim(self) -> int:
        """Size of what the pool of values keeps of a token and head; 0 where there is none."""
        return self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers that an attention layer keeps of a token."""
        return self.num_kv_heads * (self.head_dim + self.kv_value_dim)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with attention, MTP layers not counted."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind in _WITH_ATTENTION)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a recurrent state or a convolution window."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind not in _WITHOUT_STATE)


def common_fields(
    text: Mapping[str, Any],
    layer_types: tuple[str, ...],
    *,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
) -> dict[str, Any]:
    """Read the fields that every family with attention spells alike.

    Args:
        text: The text model's part of config.json.
        layer_types: Kind of each layer.
        eps: Name and default of what every norm adds to the mean square.

    Returns:
        Arguments of `ModelConfig`, those of the architecture and of the rotary embedding excepted.

    Raises:
        ModelError: A field is missing or has an impossible value.
        UnsupportedModelError: There is no attention layer or no other layer.
    """
    if not any(kind in _WITH_ATTENTION for kind in layer_types):
        refuse("layer_types", list(layer_types), "at least one attention layer")
    if all(kind in _WITHOUT_STATE for kind in layer_types):
        refuse("layer_types", list(layer_types), "at least one layer with a state")
    heads = positive(text, "num_attention_heads")
    kv_heads = heads
    if text.get("num_key_value_heads") is not None:
        kv_heads = positive(text, "num_key_value_heads")
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is no multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return _basic_fields(text, layer_types, eps) | {
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim(text),
        "max_position_embeddings": positive(text, "max_position_embeddings"),
    }


def attention_free_fields(
    text: Mapping[str, Any], layer_types: tuple[str, ...], *, eps: tuple[str, float]
) -> dict[str, Any]:
    """Read the fields of a model without attention; see `common_fields`.

    Such a model has no longest sequence: `UNBOUNDED_LENGTH` where the config gives none.

    Args:
        text: Contents of config.json.
        layer_types: Kind of each layer.
        eps: Name and default of what every norm adds to the mean square.

    Returns:
        Arguments of `ModelConfig`, the architecture excepted.

    Raises:
        ModelError: A field is missing or has an impossible value.
    """
    return _basic_fields(text, layer_types, eps) | {
        "num_attention_heads": 0,
        "num_kv_heads": 0,
        "head_dim": 0,
        "rotary_dim": 0,
        "rope_theta": 1e4,
        "max_position_embeddings": positive(text, "max_position_embeddings", UNBOUNDED_LENGTH),
    }


def _basic_fields(
    text: Mapping[str, Any], layer_types: tuple[str, ...], eps: tuple[str, float]
) -> dict[str, Any]:
    # How transformers lets layers of one kind differ.
    require(text, "per_layer_config", [None, {}])
    return {
        "vocab_size": positive(text, "vocab_size"),
        "hidden_size": positive(text, "hidden_size"),
        "layer_types": layer_types,
        "rms_norm_eps": number(text, *eps),
        "tie_word_embeddings": boolean(text, "tie_word_embeddings"),
        "num_mtp_layers": 0,
        "bos_token_id": next(iter(token_ids(text.get("bos_token_id"), "bos_token_id")), None),
        "eos_token_ids": token_ids(text.get("eos_token_id")),
        "dtype": _dtype(text),
    }


def refuse(name: str, value: object, supported: str) -> None:
    """Raise for a setting that is not implemented."""
    raise UnsupportedModelError(f"config.json: {name} is {value!r}; supported is {supported}")


def require(text: Mapping[str, Any], name: str, supported: Collection[Any]) -> None:
    """Refuse a setting whose value is given and is none of the supported ones."""
    if name in text and not any(are_equal(text[name], value) for value in supported):
        refuse(name, text[name], " or ".join(repr(value) for value in supported))


def require_free_time_steps(text: Mapping[str, Any]) -> None:
    """Refuse bounds on the time steps of Mamba-2 layers that clamp anything."""
    limit = text.get("time_step_limit")
    if limit is None:
        return
    # An infinite number is saved as an object in JSON.
    low, high = (float(v["__float__"]) if isinstance(v, Mapping) else float(v) for v in limit)
    if low > 0.0 or high != float("inf"):
        refuse("time_step_limit", limit, "[0, infinity]")


def conv_taps(text: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Read the number of taps of a convolution with a window, at least 2."""
    taps = positive(text, name, default)
    if taps < 2:  # noqa: PLR2004
        refuse(name, taps, "2 or more")
    return taps


def positive(text: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Read an integer of at least 1."""
    value = text.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r}, it must be an integer of at least 1")
    most = _MOST.get(name, 2**31 - 1)
    if value > most:
        raise ModelError(f"config.json: {name} is {value}, it must be at most {most}")
    return value


def count(text: Mapping[str, Any], name: str, default: int) -> int:
    """Read an integer of at least 0."""
    value = text.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"config.json: {name} is {value!r}, it must be an integer of at least 0")
    return value


def number(text: Mapping[str, Any], name: str, default: float) -> float:
    """Read a number above 0."""
    value = text.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < _LARGEST:
        raise ModelError(f"config.json: {name} is {value!r}, it must be a finite number above 0")
    return float(value)


def boolean(text: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Read true or false.

    Null is false where that is the default, and an error elsewhere: some readers take it for the
    default, some for false.
    """
    value = text.get(name, default)
    if value is None and not default:
        return False
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {name} is {value!r}, it must be true or false")
    return value


def json_object(text: ConfigObject, name: str) -> ConfigObject:
    """Read an object; null counts as an empty one."""
    value = text.get(name)
    if value is None:
        return ConfigObject({})
    if not isinstance(value, ConfigObject):
        raise ModelError(f"config.json: {name} is {value!r}, it must be an object")
    return value


def _dtype(text: Mapping[str, Any]) -> str:
    for name in ("dtype", "torch_dtype"):
        value = text.get(name)
        if isinstance(value, str) and value:
            return value
        if value is not None:
            raise ModelError(
                f"config.json: {name} is {value!r}, it must be a name such as 'bfloat16'"
            )
    return "float32"


def head_dim(text: Mapping[str, Any]) -> int:
    """Size of an attention head, derived from the width where it is not given."""
    if text.get("head_dim") is None:
        return positive(text, "hidden_size") // positive(text, "num_attention_heads")
    return positive(text, "head_dim")


def token_ids(value: object, name: str = "eos_token_id") -> tuple[int, ...]:
    """Read `eos_token_id` and its like: nothing, an id or a list of ids."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(type(token) is not int or not 0 <= token < 2**31 for token in ids):
        raise ModelError(f"config.json: {name} is {value!r}, it must be an id or a list of ids")
    return tuple(ids)


def listed_layers(
    text: Mapping[str, Any], name: str, kinds: Mapping[Any, str]
) -> tuple[str, ...] | None:
    """Read a list of layer kinds.

    Args:
        text: The text model's part of config.json.
        name: The list's name.
        kinds: Our kind by the config's word.

    Returns:
        A kind for each layer, or None if there is no list.
    """
    given = text.get(name)
    if given is None:
        return None
    if not isinstance(given, list):
        raise ModelError(f"config.json: {name} is {given!r}, it must be a list")
    for kind in given:
        if kind not in kinds:
            refuse(name, kind, " and ".join(repr(word) for word in kinds))
    num_layers = positive(text, "num_hidden_layers")
    if len(given) != num_layers:
        raise ModelError(
            f"config.json: {name} has {len(given)} entries, num_hidden_layers is {num_layers}"
        )
    return tuple(kinds[kind] for kind in given)


def experts(text: ConfigObject, name: str, default: tuple[int, int]) -> tuple[int, int]:
    """Read the number of experts of a layer and how many of them a token goes through.

    Args:
        text: The text model's part of config.json.
        name: Of the number of experts.
        default: Both numbers where they are not given.

    Returns:
        (experts, experts per token), both 0 for a model without.
    """
    if text.get(name, default[0]) is None or not count(text, name, default[0]):
        text.leave_out("num_experts_per_tok")
        return 0, 0
    num_experts = positive(text, name, default[0])
    chosen = positive(text, "num_experts_per_tok", default[1])
    if chosen > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {chosen} but there are {num_experts} experts"
        )
    return num_experts, chosen


def rope_whole_heads(text: ConfigObject, default_theta: float = 1e4) -> tuple[int, float]:
    """Return what `rope` does, for a family whose reference rotates whole heads."""
    for where in (rope_parameters(text), text):
        require(where, "partial_rotary_factor", [1, 1.0])
    return rope(text, default_theta=default_theta)


def rope_parameters(text: ConfigObject) -> Mapping[str, Any]:
    """Return the object about the rotary embedding, under today's name or the older one.

    Raises:
        UnsupportedModelError: The frequencies are scaled, or each kind of layer has its own.
        ModelError: Both names are there, with different contents.
    """
    names = [name for name in ("rope_scaling", "rope_parameters") if json_object(text, name)]
    for name in names:
        for key in ("rope_type", "type"):
            if text[name].get(key, "default") != "default":
                refuse(f"{name}.{key}", text[name][key], "'default'")
        if FULL in text[name]:
            refuse(f"{name}.{FULL}", text[name][FULL], "one object for all layers")
    if len(names) > 1:
        older, today = (text[name] for name in names)
        if older != today:
            raise ModelError(
                f"config.json: rope_scaling is {older!r} but rope_parameters is {today!r}; they "
                "are two names of one setting"
            )
        text.leave_out("rope_scaling")
    return text[names[-1]] if names else {}


def rope(
    text: ConfigObject, *, default_factor: float = 1.0, default_theta: float = 1e4
) -> tuple[int, float]:
    """Return the number of rotated dimensions and the base of the frequencies."""
    parameters = rope_parameters(text)
    values = []
    for name, default in (("rope_theta", default_theta), ("partial_rotary_factor", default_factor)):
        if name in parameters:
            text.leave_out(name)
        values.append(number(parameters if name in parameters else text, name, default))
    theta, factor = values
    size = head_dim(text)
    rotary_dim = int(size * factor)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > size:  # noqa: PLR2004
        raise ModelError(
            f"config.json: partial_rotary_factor {factor} of head_dim {size} rotates "
            f"{rotary_dim} dimensions; it must be an even number from 2 to head_dim"
        )
    return rotary_dim, theta
