"""Families beside Qwen3.5 through fused kernels give what PyTorch operations give."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest
from conformance import VOCAB
from kernel_engines import compare, scheme_options

from headrace.testing import KERNEL_FAMILIES, tiny_family

if TYPE_CHECKING:
    from headrace.rt.detector import Detector

FAMILIES = sorted(KERNEL_FAMILIES)


def model_of(family: str, seed: int, **changes: Any) -> Any:  # noqa: ANN401
    return tiny_family(family, seed, vocab_size=VOCAB, **(KERNEL_FAMILIES[family] | changes))


@pytest.mark.usefixtures("references_only")
@pytest.mark.thinned
@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize("scheme", ["columns", "replay"])
@pytest.mark.parametrize("drafts", ["none", "scripted:3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_kernels_are_told_fits_their_specification(
    family: str, drafts: str, scheme: str, graphs: str
) -> None:
    """The references in place of the kernels: everything but the kernels' own code, and cheap."""
    seed = secrets.randbits(32)
    print(f"{seed=}")
    engine = compare(
        model_of(family, seed), [5, 17, 33, 9], 9, seed, max_num_seqs=3,
        max_num_batched_tokens=32, graphs=graphs, **scheme_options(scheme, drafts),
    )
    assert engine.worker.fixed.kernels == "triton"


@pytest.mark.usefixtures("references_only")
@pytest.mark.parametrize("graphs", ["off", "on"])
def test_an_mtp_head_goes_through_the_kernels_too(graphs: str) -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    compare(
        model_of("nemotron_h", seed), [5, 17], 9, seed, graphs=graphs,
        **scheme_options("columns", "mtp:2"),
    )


EVERYWHERE = {"add_rms_norm_kernel", "convolve_kernel", "state_kernel", "gate_norm_kernel"}
ATTENTION = {"attention_inputs_kernel", "paged_decode_kernel", "combine_splits_kernel"}
EXPERTS = {"tiles_kernel", "expert_product_kernel", "add_experts_kernel"}
LAUNCHED = {
    "bamba": EVERYWHERE | ATTENTION | {"gated_product_kernel"},
    "falcon_h1": EVERYWHERE | ATTENTION,
    "granite": EVERYWHERE | ATTENTION | EXPERTS | {"gated_product_kernel", "route_kernel"},
    "mamba2": EVERYWHERE,
    # Its experts come from groups, which no kernel chooses.
    "nemotron_h": EVERYWHERE | ATTENTION | EXPERTS,
    "zamba2": EVERYWHERE | ATTENTION,
}


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("family", "scheme", "drafts"),
    [
        ("nemotron_h", "replay", "scripted:1"),
        *(
            pytest.param(family, scheme, drafts, marks=pytest.mark.full)
            for family in FAMILIES
            for scheme, drafts in (("columns", "scripted:2"), ("replay", "none"))
        ),
    ],
)
def test_kernels_give_what_pytorch_operations_give(
    family: str, scheme: str, drafts: str, race_detector: Detector
) -> None:
    seed = secrets.randbits(32)
    print(f"{seed=}")
    engine = compare(
        model_of(family, seed), [3, 2], 3, seed, rt_backend="sim", graphs="off",
        **scheme_options(scheme, drafts),
    )
    assert engine.parts.runtime.finish() == ()
    launched = {launch.kernel for launch in race_detector.launches}
    assert launched - {"choose_tokens_kernel"} >= LAUNCHED[family]


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"mamba_d_state": 12}, "the state size of Mamba-2 is 12"),
        ({"hidden_size": 48, "mamba_n_heads": 6}, "head_dim is 12"),
    ],
)
def test_sizes_that_the_kernels_cannot_run_are_named(
    changes: dict[str, Any], obstacle: str
) -> None:
    model = model_of("granite", 0, **changes)
    found = model.kernel_obstacle(model.config)
    assert found == f"{obstacle}, and the kernels need a power of 2"
