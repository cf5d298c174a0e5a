"""What a checkpoint says about how it wants to be sampled: generation_config.json."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import ModelError, RequestError
from headrace.sampling_params import SamplingParams
from headrace.text.files import read_json_object_if_present

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling values that hold where a request leaves a field out; None is "not said".

    Args:
        temperature: 0 where the file says `do_sample: false`.
        top_p: Nucleus mass.
        top_k: Number of candidates.
        min_p: Least share of the likeliest token's probability.
        repetition_penalty: Divisor of seen tokens' logits.
        max_new_tokens: Most tokens to generate.
        eos_token_ids: Ids that end a sequence; from config.json where this file has none.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, path: str | Path) -> GenerationDefaults:
        """Read generation_config.json; a folder without one has no defaults.

        Raises:
            ModelError: The file is damaged or a value makes no sense.
        """
        folder = Path(path)
        file = folder / "generation_config.json"
        said = read_json_object_if_present(file)
        config = read_json_object_if_present(folder / "config.json")
        text_config = config.get("text_config")
        eos = said.get("eos_token_id")
        if eos is None:
            eos = config.get("eos_token_id")
        if eos is None and isinstance(text_config, dict):
            eos = text_config.get("eos_token_id")
        values = {name: said.get(name) for name in _SAMPLING}
        if said.get("do_sample") is False:
            values["temperature"] = 0.0
        try:
            SamplingParams(**{name: v for name, v in values.items() if v is not None})
        except RequestError as error:
            raise ModelError(f"{file}: {error}; correct the file") from error
        return cls(
            **values,
            max_new_tokens=_positive(file, said.get("max_new_tokens")),
            eos_token_ids=_ids(folder, eos),
        )

    def sampling_params(self, **overrides: object) -> SamplingParams:
        """Build sampling parameters: an override that is not None wins over the checkpoint.

        Raises:
            RequestError: A value is out of range.
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in _SAMPLING}
        values["max_tokens"] = self.max_new_tokens
        values.update((name, v) for name, v in overrides.items() if v is not None)
        max_tokens = values.pop("max_tokens")
        given = {name: value for name, value in values.items() if value is not None}
        # None is a value here: up to the context's end.
        return SamplingParams(max_tokens=max_tokens, **given)


def _positive(file: Path, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{file}: max_new_tokens must be a positive integer, got {value!r}")
    return value


def _ids(folder: Path, value: object) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelError(f"{folder}: eos_token_id must be token ids, got {value!r}")
    return tuple(dict.fromkeys(ids))
