"""Attention's inputs against their specification and against the operations that they replace."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from headrace.ops.attention_inputs import attention_inputs, reference
from headrace.ops.paged_attention import write_kv
from headrace.ops.rms_norm import rms_norm
from headrace.ops.rotary import inverse_frequencies, rotary_tables, rotate_
from headrace.rt import Effect
from headrace.rt.detector import RowBound, assert_effects

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.rt.detector import Detector

HEADS, KV_HEADS, PAGE, EPS = 3, 2, 4, 1e-6


@pytest.fixture(autouse=True)
def seeded() -> None:
    pytest.importorskip("triton")
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    torch.manual_seed(seed)


def case(slots: list[int], head_dim: int, rotary_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tokens at far positions; pools are full of NaN, but for the null block."""
    tokens = len(slots)
    heads, columns = HEADS + KV_HEADS, (2 * HEADS + 2 * KV_HEADS) * head_dim
    positions = torch.randint(0, 100_000, (tokens,))
    tables = rotary_tables(positions, inverse_frequencies(rotary_dim, 1e7, positions.device))
    k_pool, v_pool = (torch.full((4, PAGE, KV_HEADS, head_dim), float("nan")) for _ in "kv")
    k_pool[0] = v_pool[0] = 7.0
    return {
        "projected": torch.randn(tokens, columns + 3).to(dtype),
        "head_scale": 1 + torch.randn(heads, head_dim) / 8,
        "cos": tables[0],
        "signed_sin": tables[1],
        "slots": torch.tensor(slots),
        "k_pool": k_pool.to(dtype),
        "v_pool": v_pool.to(dtype),
        "eps": EPS,
    }


def results(given: dict[str, Any], query: Tensor) -> Tensor:
    """Everything that was made, for the tokens that have slots, [T, ..]."""
    slots = given["slots"][given["slots"] > 0]
    pools = [given[name].flatten(0, 1)[slots].flatten(1) for name in ("k_pool", "v_pool")]
    return torch.cat((query[given["slots"] > 0].flatten(1), *pools), 1)


def by_operations(given: dict[str, Any]) -> Tensor:
    """The PyTorch operations that the kernel stands for."""
    dim = given["k_pool"].shape[3]
    split = [(HEADS + KV_HEADS) * dim, KV_HEADS * dim]
    heads, value, _ = given["projected"].tensor_split((split[0], sum(split)), -1)
    normed = rms_norm(heads.reshape(-1, HEADS + KV_HEADS, dim), given["head_scale"], EPS)
    query, key = rotate_(normed, given["cos"], given["signed_sin"]).split([HEADS, KV_HEADS], 1)
    write_kv(
        given["k_pool"], given["v_pool"], key, value.reshape(-1, KV_HEADS, dim), given["slots"]
    )
    return results(given, query)


def copied(given: dict[str, Any], **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    own = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in given.items()}
    return own | changes


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 6), (64, 64), (256, 64)])
def test_it_errs_at_most_twice_as_much_as_pytorch(
    head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    given = case([9, 0, 6], head_dim, rotary_dim, dtype)
    exact = copied(given, **{name: given[name].double() for name in ("k_pool", "v_pool")})
    wide = given["projected"].double()
    heads = wide[:, : (HEADS + KV_HEADS) * head_dim].view(-1, HEADS + KV_HEADS, head_dim)
    normed = heads * torch.rsqrt((heads * heads).mean(-1, keepdim=True) + EPS) * given["head_scale"]
    half = rotary_dim // 2
    a, b, rest = normed.split((half, half, head_dim - rotary_dim), -1)
    c, s = given["cos"][..., :half].double(), given["signed_sin"][..., half:].double()
    rotated = torch.cat((a * c - b * s, b * c + a * s, rest), -1)
    value = wide[:, heads[0].numel() :][:, : KV_HEADS * head_dim]
    write_kv(
        exact["k_pool"],
        exact["v_pool"],
        rotated[:, HEADS:],
        value.reshape(-1, KV_HEADS, head_dim),
        given["slots"],
    )
    want = results(exact, rotated[:, :HEADS])

    def error(got: Tensor) -> float:
        return float((got.double() - want).norm() / want.norm())

    limit = 2 * max(error(by_operations(copied(given))), torch.finfo(dtype).eps / 2)
    own = copied(given)
    query = attention_inputs(**own)
    assert error(results(own, query)) <= limit
    specified, other = copied(given), torch.empty_like(query)
    reference.attention_inputs(**specified, query_factor=1.0, query=other)
    assert error(results(specified, other)) <= limit
    # Padding writes nowhere, and no one else's slot changes.
    for pools in (own, specified):
        for name in ("k_pool", "v_pool"):
            rows = pools[name].flatten(0, 1)
            assert (rows[:PAGE] == 7.0).all()
            assert int(rows.isnan().all(-1).all(-1).sum()) == 3 * PAGE - 2
    assert query.isfinite().all()


OTHER_FAMILIES = {
    "no norms": {"head_scale": None, "num_heads": HEADS},
    "no rotation": {"cos": None, "signed_sin": None, "query_factor": 0.3},
    "neither": {
        "head_scale": None, "cos": None, "signed_sin": None, "num_heads": HEADS,
        "query_factor": 1.5,
    },
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("changes", OTHER_FAMILIES.values(), ids=OTHER_FAMILIES)
def test_families_without_norms_or_rotation_leave_them_out(changes: dict[str, Any]) -> None:
    given = case([9, 0, 6], 16, 6, torch.float32) | changes
    specified, own = copied(given), copied(given)
    query = attention_inputs(**own)
    specified.pop("num_heads", None)
    factor = specified.pop("query_factor", 1.0)
    other = torch.empty_like(query)
    reference.attention_inputs(**specified, query_factor=factor, query=other)
    torch.testing.assert_close(results(own, query), results(specified, other))
    if "cos" in changes and "head_scale" in changes:
        heads = given["projected"][:, : HEADS * 16].view(-1, HEADS, 16)
        torch.testing.assert_close(query, factor * heads)
        keys = given["projected"][0, HEADS * 16 :][: KV_HEADS * 16]
        assert torch.equal(own["k_pool"].flatten(0, 1)[9].flatten(), keys)


@pytest.mark.interpreter
def test_a_token_has_the_same_bits_alone_and_among_others() -> None:
    given = case([5, 4, 13, 9], 16, 6, torch.float32)
    query = attention_inputs(**given)
    want = results(given, query)[2]
    per_token = ("projected", "cos", "signed_sin", "slots")
    alone = copied(given, **{name: given[name][2:3] for name in per_token})
    for name in ("k_pool", "v_pool"):
        alone[name][:] = float("nan")
    query = attention_inputs(**alone)
    assert torch.equal(results(alone, query)[0], want)


@pytest.mark.interpreter
def test_only_the_tokens_own_slots_are_written_and_pools_are_not_read(
    race_detector: Detector,
) -> None:
    given = case([6, 0, 13], 16, 6, torch.bfloat16)
    attention_inputs(**given)
    reads = ("projected", "head_scale", "cos", "signed_sin", "slots")
    pools = {name: given[name].flatten(0, 1) for name in ("k_pool", "v_pool")}
    assert_effects(
        race_detector.launches,
        dict.fromkeys(reads, Effect.READ) | dict.fromkeys(pools, Effect.WRITE),
        {name: given[name] for name in reads} | pools,
        rows=dict.fromkeys(pools, RowBound(writes={6, 13})),
    )


@pytest.mark.interpreter(detector=False)
def test_slots_beyond_two_to_the_31_elements_are_written() -> None:
    """The memory is reserved, not touched: pages come with the one write."""
    given = case([0], 16, 6, torch.bfloat16)
    blocks = (1 << 31) // (PAGE * KV_HEADS * 16) + 8
    given["slots"][0] = (blocks - 1) * PAGE + 1
    for name in ("k_pool", "v_pool"):
        given[name] = torch.empty(blocks, PAGE, KV_HEADS, 16, dtype=torch.bfloat16)
    assert given["k_pool"].numel() > 1 << 31
    attention_inputs(**given)
    value = given["projected"][0, (HEADS + KV_HEADS) * 16 :][: KV_HEADS * 16]
    assert torch.equal(given["v_pool"][-1, 1].flatten(), value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_pool": torch.zeros(4, PAGE, KV_HEADS, 8)}, "differ in layout"),
        ({"head_scale": torch.zeros(5, 8)}, r"head_scale \(5, 8\) does not fit keys"),
        ({"head_scale": None}, "0 query heads: give num_heads"),
        ({"cos": None}, "cosines and sines come together"),
        ({"projected": torch.zeros(2, 100)}, "100 columns.*3 and twice 2 heads of 16"),
        ({"cos": torch.zeros(2, 1, 4)}, r"signed_sin: shape \(2, 1, 6\)"),
        ({"slots": torch.zeros(3, dtype=torch.long)}, r"slots \(3,\) for 2 tokens"),
        (dict.fromkeys(("cos", "signed_sin"), torch.zeros(2, 1, 18)), "18 rotated dimensions"),
        (
            dict.fromkeys(("k_pool", "v_pool"), torch.zeros(4, 5, KV_HEADS, 16)[:, :4]),
            "slots must lie one after another",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_inputs(**{**case([4, 5], 16, 6, torch.float32), **changes})
