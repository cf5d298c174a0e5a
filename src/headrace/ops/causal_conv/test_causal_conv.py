"""Taps by index."""

from __future__ import annotations

import pytest
import torch

from headrace.ops.causal_conv import causal_conv
from headrace.ops.causal_conv.reference import causal_conv_reference

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 63])
def test_a_sequence_agrees_with_the_reference(width: int, tokens: int) -> None:
    x, window, weight = torch.randn(tokens, 20), torch.randn(width - 1, 20), torch.randn(width, 20)
    history = torch.arange(tokens, tokens + width - 1)
    taps = torch.cat([history, torch.arange(tokens)]).unfold(0, width, 1)
    got = causal_conv(torch.cat([x, window]), taps, weight)
    want, _ = causal_conv_reference(x, window, weight)
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("channels", [7, 40, 96])
def test_a_token_has_the_same_bits_among_any_others(channels: int) -> None:
    source, weight = torch.randn(80, channels), torch.randn(4, channels)
    taps = torch.randint(0, 80, (50, 4))
    whole = causal_conv(source, taps, weight)
    for size in (1, 3, 16):
        for i in range(0, 50, size):
            assert torch.equal(causal_conv(source, taps[i : i + size], weight), whole[i : i + size])
