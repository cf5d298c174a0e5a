"""Every family against transformers, on random weights under which the state matters.

A family that transformers lacks is held against a reference in this folder (`REFERENCES`).
Both read the same files under published names: transformers through `from_pretrained`, we through
the engine's loader. At the end a line per family gives the largest error, in units of the standard
deviation of the logits, and what erasing the state changes at least.

The first case of a family runs on both kinds of weights. Further cases vary its config: by default
they run on those that show wiring ("B"), and on the others with `-m "parity and full"`.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import warnings
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from lfm2_reference import Lfm2Reference
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from headrace.config import EngineConfig
from headrace.engine.load import load_parts
from headrace.errors import ModelError
from headrace.models.config import ModelConfig
from headrace.models.config_keys import HARMLESS_VALUES, WITHOUT_EFFECT, ConfigObject
from headrace.models.reference_loop import (
    RUNNING,
    ReferenceRun,
    build_caches,
    prompt_batch,
    run_reference,
    token_batch,
)
from headrace.models.registry import family, model_class
from headrace.testing import TINY_DICTS, random_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from headrace.models.model import HybridModel

pytestmark = pytest.mark.parity

TOLERANCE = 2e-4
"""Largest difference in units of the standard deviation of the logits."""

FIGURES: dict[str, float] = json.loads(
    Path(__file__).with_name("figures.json").read_text(encoding="utf-8")
)
"""Largest difference by family that several runs gave, rounded up: what the README shows."""

FAR_OFF = 10.0
"""A difference of this many times the figure is no matter of the seed: something has changed."""

BLIND = {"A": 0.1, "B": 1e-2}
"""Erasing the state must change the logits by more than this."""

FURTHER_PROMPTS = 7
"""With the first prompt alone one seed in a hundred had a state that mattered too little."""

MARGIN = 1e-5
"""Least step between a chosen expert's score and the next one's: ties may go either way."""

PROMPT = 150

KEYS_FIRST = ("gated_delta_net", "kimi_delta", "lightning")
"""Kinds of states that transformers keeps as [heads, K, V], and we as [heads, V, K]."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5_tied": ("qwen3_5", {"tie_word_embeddings": True, "mtp_num_hidden_layers": 0}),
    "qwen3_5_moe": ("qwen3_5_moe", {}),
    "qwen3_next": (
        "qwen3_5",
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "num_experts": 0,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 8,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3_next_moe": (
        "qwen3_5_moe",
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "layer_types": None,
            "full_attention_interval": 3,
        },
    ),
    "granite": ("granite", {}),
    "granite_rope_untied": (
        "granite",
        {"position_embedding_type": "rope", "rope_theta": 5000.0, "tie_word_embeddings": False},
    ),
    "granite_dense_one_group": (
        "granite",
        {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_groups": 1,
            "mamba_d_head": "auto",
        },
    ),
    "granite_saved_by_5": (
        "granite",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_conv_bias": False,
            "time_step_limit": [0.0, {"__float__": "Infinity"}],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "bamba": ("bamba", {}),
    "bamba_tied_saved_by_5": (
        "bamba",
        {
            "tie_word_embeddings": True,
            "mamba_conv_bias": False,
            "mamba_d_head": "auto",
            # Without a bias B and C are small; more of them let the state be seen.
            "mamba_d_state": 64,
            "mamba_n_groups": 1,
            "time_step_limit": [0.0, {"__float__": "Infinity"}],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1_normed_after_gate": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "tie_word_embeddings": True,
            "mamba_conv_bias": False,
            # A norm of what almost cancels makes much of rounding errors: not three in a row.
            "num_hidden_layers": 2,
        },
    ),
    "falcon_h1_saved_by_5": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_d_head": "auto",
            "mamba_d_ssm": None,
            "time_step_limit": [0.0, {"__float__": "Infinity"}],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "ssm_multipliers": None,
            "mlp_multipliers": None,
        },
    ),
    "lfm2": ("lfm2", {}),
    "nemotron_h": ("nemotron_h", {}),
    "zamba2": ("zamba2", {}),
    "zamba2_without_adapters_and_rotary": (
        "zamba2",
        {
            "use_shared_attention_adapter": False,
            "use_mem_rope": False,
            "num_mem_blocks": 1,
            "tie_word_embeddings": False,
            "num_key_value_heads": 2,
        },
    ),
    "nemotron_h_dense": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M-M*-",
            "use_conv_bias": False,
            "ssm_state_size": 64,
            "n_groups": 1,
            "num_nextn_predict_layers": 0,
        },
    ),
    "nemotron_h_saved_by_5": (
        "nemotron_h",
        {
            "hybrid_override_pattern": ...,
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "num_hidden_layers": 3,
            "n_group": 1,
            "moe_latent_size": None,
            "norm_topk_prob": False,
            "mtp_hybrid_override_pattern": ...,
            "mtp_layers_block_type": ["full_attention", "moe"],
        },
    ),
    "lfm2_saved_by_5": (
        "lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
        },
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_moe_plain_router": (
        "lfm2_moe",
        {
            "use_expert_bias": False,
            "norm_topk_prob": False,
            "num_dense_layers": 0,
            "tie_embedding": False,
        },
    ),
    "jamba": ("jamba", {}),
    "jamba_dense_tied": (
        "jamba",
        {
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
            "mamba_conv_bias": False,
            "mamba_dt_rank": "auto",
            "num_hidden_layers": 3,
        },
    ),
    "mamba2": ("mamba2", {}),
    "mamba2_tied_one_group": (
        "mamba2",
        {
            "tie_word_embeddings": True,
            "n_groups": 1,
            "state_size": 48,
            "use_conv_bias": False,
            "time_step_limit": [0.0, {"__float__": "Infinity"}],
        },
    ),
    "mamba": ("mamba", {}),
    "mamba_untied_no_conv_bias": (
        "mamba",
        {
            "tie_word_embeddings": False,
            "use_conv_bias": False,
            "time_step_rank": "auto",
            "intermediate_size": 112,
        },
    ),
    "falcon_mamba": ("falcon_mamba", {}),
    "kimi_linear": ("kimi_linear", {}),
    "kimi_linear_in_groups": (
        "kimi_linear",
        {
            "num_hidden_layers": 3,
            "linear_attn_config": {
                "kda_layers": [1, 2],
                "full_attn_layers": [3],
                "head_dim": 16,
                "num_heads": 2,
                "short_conv_kernel_size": 3,
            },
            "num_experts": 8,
            "num_expert_group": 4,
            "topk_group": 2,
            "moe_renormalize": False,
            "num_shared_experts": 2,
        },
    ),
    "minimax": ("minimax", {}),
    "minimax_window_default_layers_tied": (
        "minimax",
        {
            "layer_types": None,
            "num_hidden_layers": 3,
            "linear_attn_beta_factor": 3.0,
            "sliding_window": 70,
            "tie_word_embeddings": True,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {}),
    "olmo_hybrid_rope_tied": (
        "olmo_hybrid",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "tie_word_embeddings": True,
            "linear_allow_neg_eigval": False,
            "linear_key_head_dim": 12,
            "linear_num_key_heads": 4,
        },
    ),
}  # fmt: skip


REFERENCES: dict[str, Callable[[Path], Any]] = {}
"""Makes the reference of a folder, by model type, for families that transformers lacks."""


def skip_where_transformers_lacks(model_type: str) -> None:
    if model_type in REFERENCES:
        pytest.skip(f"transformers lacks {model_type}")


def pairs() -> list[Any]:
    """Every case with every kind of weights."""
    first = {family: name for name, (family, _) in reversed(CASES.items())}
    return [
        pytest.param(
            (name, variant),
            id=f"{name}-{variant}",
            marks=() if variant == "B" or first[family] == name else pytest.mark.full,
        )
        for name, (family, _) in CASES.items()
        for variant in BLIND
    ]


@dataclass(frozen=True)
class Pair:
    """Our model, transformers' model of the same files, a prompt, and what we make of it."""

    name: str
    family: str
    variant: str
    model: HybridModel
    oracle: Any
    prompt: list[int]
    run: ReferenceRun


def write_checkpoint(folder: Path, raw: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write a checkpoint of two files, every second tensor in each."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    weight_map = {}
    for i in range(2):
        file, names = f"model-{i + 1:05}-of-00002.safetensors", sorted(weights)[i::2]
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Margins(TorchFunctionMode):
    """The smallest step between what a choice of the best takes and what it leaves out."""

    smallest = float("inf")

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.topk and out.values.shape[-1] < args[0].shape[-1]:
            k = out.values.shape[-1]
            around = torch.topk(args[0], k + 1).values[..., k - 1 :].nan_to_num()
            self.smallest = min(self.smallest, float(-around.diff().max()))
        return out


def draw_prompt(model: HybridModel, rng: random.Random) -> tuple[list[int], ReferenceRun]:
    """Draw a prompt on which no choice of experts hangs on a rounding error, and continue it."""
    for _ in range(20):
        prompt = [rng.randrange(model.config.vocab_size) for _ in range(PROMPT)]
        with Margins() as margins:
            run = run_reference(model, prompt, 20, states_at=(PROMPT,))
        if margins.smallest > MARGIN:
            return prompt, run
    raise AssertionError("20 prompts in a row are close to a tie: the router is degenerate")


def shared_block_copies(config: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: ANN401
    """Repeat Zamba2's shared blocks at every layer that uses them.

    transformers shares nothing where the head is not tied.
    """
    copies = {}
    for place, layer in enumerate(config.attention_layers):
        home = f".{config.block_homes[place % config.num_blocks]}.shared_transformer."
        copies |= {
            name.replace(home, f".{layer}.shared_transformer."): tensor.clone()
            for name, tensor in weights.items()
            if home in name
        }
    return copies


def load_ours(folder: Path) -> HybridModel:
    config = EngineConfig(
        model=str(folder), device="cpu", max_model_len=300, max_num_seqs=2, speculative="none"
    )
    model: HybridModel = load_parts(config).model
    return model


def load_oracle(folder: Path) -> Any:  # noqa: ANN401
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    if model_type in REFERENCES:
        return REFERENCES[model_type](folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers as hf  # noqa: PLC0415

        model, info = hf.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    # MiniMax's decay tables follow from the config and are not in its published files.
    missing = [n for n in info["missing_keys"] if not n.endswith(("_decay", "slope_rate"))]
    assert not missing, info
    assert not info["unexpected_keys"], info
    return model.eval()


@pytest.fixture(scope="module", params=pairs())
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, variant = request.param
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    family, changes = CASES[name]
    raw = TINY_DICTS[family](**changes)
    config = ModelConfig.from_dict(raw)
    weights = random_weights(config, seed, variant)
    if family == "zamba2" and not config.tie_word_embeddings:
        weights |= shared_block_copies(config, weights)
    folder = tmp_path_factory.mktemp(name)
    write_checkpoint(folder, raw, weights)
    model = load_ours(folder)
    prompt, run = draw_prompt(model, random.Random(seed))
    return Pair(name, family, variant, model, load_oracle(folder), prompt, run)


def full_logits(oracle: Any, tokens: list[int]) -> Tensor:  # noqa: ANN401
    with torch.no_grad():
        return oracle(torch.tensor([tokens]), use_cache=False).logits[0]


def test_a_reference_of_this_folder_is_read_in_the_place_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    raw = TINY_DICTS["lfm2"]()
    config = ModelConfig.from_dict(raw)
    write_checkpoint(tmp_path, raw, random_weights(config, seed, "B"))
    rng = random.Random(seed)
    tokens = [rng.randrange(config.vocab_size) for _ in range(12)]
    want = full_logits(load_oracle(tmp_path), tokens)
    monkeypatch.setitem(REFERENCES, "lfm2", Lfm2Reference)
    assert error(full_logits(load_oracle(tmp_path), tokens), want) < TOLERANCE
    with pytest.raises(pytest.skip.Exception, match="transformers lacks lfm2"):
        skip_where_transformers_lacks("lfm2")


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())


def chunked(model: HybridModel, prompt: list[int], ends: tuple[int, ...]) -> Tensor:
    caches = build_caches(model, max_tokens=PROMPT, state_blocks=2)
    parts, start = [], 0
    for end in ends:
        parts.append(model.forward(prompt_batch(model, prompt, start, end), caches)[: end - start])
        start = end
    return model.logits(torch.cat(parts))


def erasing_changes(model: HybridModel, prompt: list[int], run: ReferenceRun) -> list[float]:
    """Erase each state tensor after the prompt; returns what that does to the next few logits.

    How much a state matters depends on what was said: further prompts are tried, and the largest
    change counts.
    """
    rng = random.Random(run.tokens[0])
    runs = [(prompt, run)]
    for _ in range(FURTHER_PROMPTS):
        other = [rng.randrange(model.config.vocab_size) for _ in range(PROMPT)]
        runs.append((other, run_reference(model, other, 5)))
    changes = []
    for spec in model.state_groups(0)[0].state:
        change = 0.0
        for tokens, whole in runs:
            caches = build_caches(model, max_tokens=PROMPT + 4, state_blocks=2)
            model.forward(prompt_batch(model, tokens, 0, PROMPT), caches)
            caches.groups[0].state[spec.name][:, RUNNING] = 0.0
            for i, token in enumerate(whole.tokens[:4]):
                hidden = model.forward(token_batch(model, token, PROMPT + i), caches)
                logits = model.logits(hidden[:1])[0]
                change = max(change, float((logits - whole.logits[1 + i]).abs().max()))
        changes.append(change)
    return changes


def test_prefill_chunks_and_decode_agree_and_the_state_matters(
    pair: Pair, record_property: Callable[[str, object], None]
) -> None:
    model, prompt, run = pair.model, pair.prompt, pair.run
    want = full_logits(pair.oracle, prompt)
    prefill = error(chunked(model, prompt, (PROMPT,)), want)
    in_chunks = error(chunked(model, prompt, (64, 128, PROMPT)), want)
    further = full_logits(pair.oracle, prompt + run.tokens)[PROMPT - 1 : -1]
    decode = error(run.logits, further)
    changes = erasing_changes(model, prompt, run)
    record_property("parity", (pair.family, max(prefill, in_chunks, decode), min(changes)))
    assert min(changes) > BLIND[pair.variant], (
        "the state does not matter, the test is blind: is a decay or a gate drawn as a matrix? "
        "headrace.testing goes by names"
    )
    assert min(changes) > 100 * TOLERANCE * float(want.std())
    bound = min(TOLERANCE, FAR_OFF * FIGURES[pair.family])
    assert prefill < bound
    assert in_chunks < bound
    assert decode < bound


def test_the_stored_states_are_the_oracles(pair: Pair) -> None:
    skip_where_transformers_lacks(pair.model.config.model_type)
    model = pair.model
    state = pair.run.states[PROMPT][0]
    with torch.no_grad():
        cache = pair.oracle(torch.tensor([pair.prompt]), use_cache=True).cache
    kind = model.state_groups(0)[0].kind
    for i, layer in enumerate(model.config.linear_layers):
        if "window" in state:
            # transformers keeps W entries, channels first; the first of them is never read again.
            carried = state["window"].shape[1]
            window = cache.get_conv_state(layer, state_idx=0)[0].t()[-carried:]
            assert error(state["window"][i], window) < TOLERANCE
        if "recurrent" in state:
            if kind == "lightning":
                want = cache.get_linear_cache(layer)[0]
            else:
                want = cache.get_recurrent_state(layer, state_idx=0)[0]
            if kind in KEYS_FIRST:
                want = want.transpose(1, 2)
            assert error(state["recurrent"][i], want) < TOLERANCE


def test_what_save_pretrained_writes_is_read_too(pair: Pair, tmp_path: Path) -> None:
    skip_where_transformers_lacks(pair.model.config.model_type)
    if pair.name == "olmo_hybrid":
        pytest.skip("transformers saves convolutions in thirds where queries and values differ")
    pair.oracle.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    # transformers drops an MTP head but keeps its number of layers in the config.
    for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
        raw.pop(name, None)
    config = ModelConfig.from_dict(raw)
    tensors = load_file(tmp_path / "model.safetensors")
    again = model_class(config).from_weights(config, tensors, torch.float32)
    got = chunked(again, pair.prompt, (PROMPT,))
    assert torch.equal(got, chunked(pair.model, pair.prompt, (PROMPT,)))


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_small_time_steps_are_not_clamped(family: str, tmp_path: Path) -> None:
    """transformers clamps them at time_step_min in one of its two paths; no other engine does."""
    seed = random.SystemRandom().randrange(2**31)
    print(f"{seed=}")
    raw = TINY_DICTS[family]()
    config = ModelConfig.from_dict(raw)
    weights = random_weights(config, seed, "A")
    for name, tensor in weights.items():
        if name.endswith("dt_bias"):
            tensor.copy_(torch.linspace(-9.0, -7.0, tensor.shape[0]))
        if name.endswith("A_log"):
            tensor.fill_(3.0)  # so that a small step decays too
    write_checkpoint(tmp_path, raw, weights)
    model, clamping = load_ours(tmp_path), load_oracle(tmp_path)
    write_checkpoint(tmp_path, raw | {"time_step_min": 1e-12}, weights)
    oracle = load_oracle(tmp_path)
    prompt, run = draw_prompt(model, random.Random(seed))
    want = full_logits(oracle, prompt)
    assert error(full_logits(clamping, prompt), want) > 10 * TOLERANCE, "the steps do not matter"
    assert error(chunked(model, prompt, (64, PROMPT)), want) < TOLERANCE
    further = full_logits(oracle, prompt + run.tokens)[PROMPT - 1 : -1]
    assert error(run.logits, further) < TOLERANCE


def reference_keys(config: Any) -> set[str]:  # noqa: ANN401
    """Return the keys that the reference's config writes or takes, or that its model uses."""
    cls = type(config)
    of_class = inspect.getsource(cls)
    module = cls.__module__.replace("configuration_", "modeling_")
    of_model = inspect.getsource(import_module(module))
    taken = set(re.findall(r'kwargs(?:\.(?:pop|get|setdefault)\(|\[)"(\w+)"', of_class))
    used = set(re.findall(r"config\.([a-z]\w*)", of_model))
    used |= set(re.findall(r'getattr\((?:self\.)?config, "([a-z]\w*)"', of_model))
    # Not what a config computes from others, nor what the vision model beside it uses.
    used -= {name for name in used if isinstance(getattr(cls, name, None), property)}
    used -= {name for name in used if callable(getattr(cls, name, None))}
    if "vision_config" in used:
        used -= MULTIMODAL_KEYS
    return config.to_dict().keys() | cls.attribute_map.keys() | taken | used


MULTIMODAL_KEYS = {
    "depth", "in_channels", "num_heads", "num_position_embeddings", "out_hidden_size", "patch_size",
    "spatial_merge_size", "temporal_patch_size", "text_config",
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_key_of_the_reference_is_used_refused_or_known_to_be_without_effect(
    case: str, tmp_path: Path
) -> None:
    import transformers as hf  # noqa: PLC0415

    tiny, changes = CASES[case]
    raw = TINY_DICTS[tiny](**changes)
    skip_where_transformers_lacks(raw["model_type"])
    ours = ModelConfig.from_dict(raw)
    assert ours.ignored_keys == ()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = hf.AutoConfig.from_pretrained(tmp_path)
    read = ConfigObject(raw)
    family(read).parse(read)
    known = read.notes.asked | ours.WITHOUT_EFFECT | WITHOUT_EFFECT | HARMLESS_VALUES.keys()
    unknown = reference_keys(theirs) - known
    assert not unknown
    # All that it knows, defaults too, in its own spelling.
    theirs.to_json_file(tmp_path / "all.json", use_diff=False)
    again = ModelConfig.from_dict(json.loads((tmp_path / "all.json").read_text()))
    assert again.ignored_keys == ()
    # A first token that is not given is none here, and the reference's default there.
    assert replace(again, bos_token_id=ours.bos_token_id) == ours


@pytest.mark.parametrize("tiny", TINY_DICTS)
def test_a_key_that_is_left_out_means_what_it_means_to_the_reference(tiny: str) -> None:
    import transformers as hf  # noqa: PLC0415

    whole = TINY_DICTS[tiny]()
    skip_where_transformers_lacks(whole["model_type"])
    if whole.get("time_step_limit"):
        whole["time_step_limit"] = [0.0, float("inf")]
    for key in whole.keys() - {"model_type", "architectures"}:
        raw = {name: value for name, value in whole.items() if name != key}
        try:
            ours = ModelConfig.from_dict(raw)
        except ModelError:
            continue
        if (tiny, key) == ("mamba2", "head_dim"):
            continue  # The reference refuses any but the one that we make it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = hf.AutoConfig.for_model(**raw).to_dict()
        again = ModelConfig.from_dict({"dtype": ours.dtype} | theirs)
        # Where an answer begins and ends is in other files as well.
        ends = {name: getattr(ours, name) for name in ("bos_token_id", "eos_token_ids")}
        assert replace(again, **ends, architecture=ours.architecture) == ours, key


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_every_key_of_a_multimodal_reference_is_spoken_of(name: str) -> None:
    import transformers as hf  # noqa: PLC0415

    raw = json.loads(hf.AutoConfig.for_model(name).to_json_string(use_diff=False))
    assert raw["vision_config"]
    assert ModelConfig.from_dict(raw).ignored_keys == ()
