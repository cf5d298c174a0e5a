"""What generation_config.json says, and who wins."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from headrace.errors import ModelError, RequestError
from headrace.text import GenerationDefaults

if TYPE_CHECKING:
    from pathlib import Path


def read(folder: Path, **said: object) -> GenerationDefaults:
    (folder / "generation_config.json").write_text(json.dumps(said))
    return GenerationDefaults.from_folder(folder)


def test_the_request_wins_over_the_checkpoint_over_the_defaults(tmp_path: Path) -> None:
    defaults = read(tmp_path, temperature=0.6, top_k=20, max_new_tokens=7, eos_token_id=[5, 6, 5])
    params = defaults.sampling_params(temperature=0.0, seed=3, top_p=None)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, 20, 1.0, 3)
    assert params.max_tokens == 7
    assert defaults.eos_token_ids == (5, 6)


def test_a_folder_that_says_nothing_leaves_the_length_to_the_context(tmp_path: Path) -> None:
    assert GenerationDefaults.from_folder(tmp_path).sampling_params().max_tokens is None


def test_no_sampling_is_greedy(tmp_path: Path) -> None:
    assert read(tmp_path, do_sample=False, temperature=0.9).sampling_params().is_greedy
    assert not read(tmp_path, do_sample=True, temperature=0.9).sampling_params().is_greedy


def test_stop_ids_fall_back_to_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}}))
    assert GenerationDefaults.from_folder(tmp_path).eos_token_ids == (9,)


@pytest.mark.parametrize(
    "said", [{"temperature": -1}, {"top_p": "x"}, {"max_new_tokens": 0}, {"eos_token_id": "a"}]
)
def test_values_without_sense_name_the_file(tmp_path: Path, said: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        read(tmp_path, **said)


def test_a_request_out_of_range_is_the_requests_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="top_p"):
        read(tmp_path).sampling_params(top_p=2.0)
