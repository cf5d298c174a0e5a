"""The rule by which `thinned` tests leave variants to `-m full` (conftest.py)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest


@pytest.fixture
def chosen_variants(request: pytest.FixtureRequest) -> Any:  # noqa: ANN401
    root = str(request.config.rootpath / "conftest.py")
    return request.config.pluginmanager.get_plugin(root).chosen_variants


def test_every_value_is_among_the_chosen_and_they_are_few(chosen_variants: Any) -> None:  # noqa: ANN401
    product = [
        {"scheme": scheme, "layout": layout, "drafts": drafts}
        for scheme, layout, drafts in itertools.product("ab", "cd", [0, 1, [2]])
    ]
    chosen = [product[at] for at in chosen_variants(product)]
    assert len(chosen) == 3
    for name, count in (("scheme", 2), ("layout", 2), ("drafts", 3)):
        assert len({str(variant[name]) for variant in chosen}) == count


def test_a_variant_that_alone_has_a_value_is_chosen(chosen_variants: Any) -> None:  # noqa: ANN401
    variants = [{"x": 0, "y": 0}, {"x": 0, "y": 0}, {"x": 0, "y": 1}]
    assert 2 in chosen_variants(variants)
    assert len(chosen_variants(variants)) == 1 + (0 in chosen_variants(variants))


@pytest.mark.thinned
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("second", [0, 1])
def test_the_others_are_full(request: pytest.FixtureRequest, first: int, second: int) -> None:
    is_full = request.node.get_closest_marker("full") is not None
    assert is_full == (first != second)
