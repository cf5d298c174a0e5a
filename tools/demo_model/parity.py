"""Build the parity model on a CPU: `python -m tools.demo_model.parity`.

Two layers: attention, then one Gated DeltaNet. In this order no key or value can hold a parity,
so there is nowhere to count but in the recurrent state. Strings grow with the steps; besides the
answers, every bit is asked for the parity so far. The same training is repeated with write
strengths of (0, 1) in place of (0, 2). All scores come from the engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

from headrace import LLM, SamplingParams, evals
from headrace.config import EngineConfig
from headrace.engine.damage import damageable, damaged_answers
from headrace.evals.parity import TRAINED_BITS, bit_string, parity_answer

from . import tokenizer as tokenizers_
from .data import HERE
from .evaluate import prompt_text
from .files import about, save
from .olmo import OlmoModel, OlmoShape
from .optimizer import Optimizer
from .training import rate_at

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

ASSETS = HERE.parents[1] / "src" / "headrace" / "assets" / "parity"
EVAL_SEED = 1_000_000
WEIGHT_SEED, DATA_SEED = 0, 1
PARITY = OlmoShape(
    vocab_size=287,
    hidden_size=64,
    intermediate_size=96,
    layer_types=("full_attention", "linear_attention"),
    num_attention_heads=4,
    linear_num_key_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    max_position_embeddings=2048,
)
STEPS = 1000
SHORTEST, GROWING = 4, 0.6
"""Bits at the first step; share of the steps during which strings grow."""
ROWS_SHORT, ROWS_LONG, LONG = 48, 24, 32
"""Rows of a batch while strings have fewer bits than LONG, and after that."""
MOST_TURNS = 5
LONG_SHARE = 0.6
"""Share of conversations whose strings have at least half of the most bits."""
WRITE_WEIGHT = 0.04
"""Weight of what writes cost in the loss: u(1.5 - tu) for a share u of the strength.

While t is 0 every write costs, so that zeros come to write nothing. Without it they may turn the
state as well as ones do, and the angles nearly cancel; over lengths that were not trained on the
rest adds up. Once t is 1 a whole write costs less than one that is nearly whole."""
CHEAPER_AT = 0.5
"""Share of the steps after which t is 1."""
MUON_RATE, ADAM_RATE = 0.01, 3e-3
CHANCE_AT_MOST = 0.6
"""Right answers by chance are a half; of 256 examples this is three deviations more."""
DAMAGES = (("state", "zero"), ("state", "swap"), ("conv", "zero"), ("kv", "zero"), ("kv", "swap"))


def build_tokenizer(folder: Path) -> Tokenizer:
    """Train the tokenizer: bytes, and the few words there are."""
    texts = []
    for example in (evals.suite("parity")["parity"].generate(seed) for seed in range(64)):
        text = prompt_text(example) + example.expected
        for marker in tokenizers_.SPECIAL_TOKENS:
            text = text.replace(marker, "\n")
        texts.append(text)
    tokenizer = tokenizers_.train(texts, PARITY.vocab_size)
    tokenizers_.save(tokenizer, folder, PARITY.max_position_embeddings)
    return tokenizer


def load(folder: Path) -> OlmoModel:
    """Read the model back: bfloat16 weights, computed with in float32."""
    model = OlmoModel(PARITY)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model.eval()


class Batches:
    """Conversations about bit strings, as token ids.

    Args:
        tokenizer: Its digits are single tokens.
        seed: Of the draws.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(f"parity:{seed}")  # noqa: S311 (training data, not a secret)

        def ids(text: str) -> list[int]:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
            return found

        self._before, self._after = (
            ids("<|im_start|>user\n"),
            ids("<|im_end|>\n<|im_start|>assistant\n"),
        )
        self._bits = {bit: ids(bit) for bit in "01"}
        self._answers = {text: ids(f"{text}<|im_end|>") for text in map(parity_answer, ("0", "1"))}
        self._newline = ids("\n")
        self._around = len(self._question("")) + len(self._answers[parity_answer("0")]) + 1
        example = evals.suite("parity")["parity"].generate(0)
        assert ids(prompt_text(example)) == self._question(example.messages[0]["content"])
        even, odd = (self._answers[parity_answer(bit)] for bit in "01")
        (self.words,) = [pair for pair in zip(even, odd, strict=True) if pair[0] != pair[1]]

    def _question(self, bits: str) -> list[int]:
        return [*self._before, *(i for bit in bits for i in self._bits[bit]), *self._after]

    def _row(self, most_bits: int) -> tuple[list[int], list[bool], list[int]]:
        """Draw a conversation: ids, which are to be predicted, parity so far (-1: none)."""
        num_turns = self._rng.choice((1, 1, 1, 2, MOST_TURNS))
        # Of one turn with the longest string, or of several turns that are no longer together.
        most = (most_bits + self._around) // num_turns - self._around
        if most < 1:
            num_turns, most = 1, most_bits
        least = most // 2 if self._rng.random() < LONG_SHARE else 1
        ids: list[int] = []
        wanted: list[bool] = []
        running: list[int] = []
        for _ in range(num_turns):
            bits = bit_string(self._rng, self._rng.randint(max(1, least), most))
            question, answer = self._question(bits), self._answers[parity_answer(bits)]
            so_far, parity = [], 0
            for bit in bits:
                parity ^= bit == "1"
                so_far.append(int(parity))
            ids += [*question, *answer, *self._newline]
            wanted += [False] * len(question) + [True] * len(answer) + [False]
            running += [-1] * len(self._before) + so_far
            running += [-1] * (len(self._after) + len(answer) + 1)
        return ids, wanted, running

    def draw(self, rows: int, most_bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a batch, each [rows, T]: ids, which are predicted, parities so far."""
        drawn = [self._row(most_bits) for _ in range(rows)]
        length = max(len(ids) for ids, _, _ in drawn)
        columns = zip(*drawn, strict=True)
        ids, wanted, running = (
            torch.tensor([row + [fill] * (length - len(row)) for row in column])
            for column, fill in zip(columns, (0, False, -1), strict=True)
        )
        return ids, wanted, running


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training was.

    Args:
        steps, tokens: How much was learned from.
        seconds: Wall time.
        is_shortened: The time limit came first.
        loss: At the end.
    """

    steps: int
    tokens: int
    seconds: float
    is_shortened: bool
    loss: float


def loss_of(
    model: OlmoModel, batches: Batches, batch: tuple[Tensor, Tensor, Tensor], progress: float
) -> Tensor:
    """Give the loss of the answers, plus that of the parities so far, plus the price of writes."""
    ids, wanted, running = batch
    logits, writes = model.logits_and_writes(ids)
    said = wanted[:, 1:]
    answers = functional.cross_entropy(logits[:, :-1][said], ids[:, 1:][said])
    is_bit = running >= 0
    either = logits[is_bit][:, list(batches.words)]
    parities = functional.cross_entropy(either, running[is_bit])
    price = 1.5 * writes[0] - min(1.0, progress / CHEAPER_AT) * writes[1]
    return answers + parities + WRITE_WEIGHT * price


def train(
    shape: OlmoShape, tokenizer: Tokenizer, steps: int, seconds: float
) -> tuple[OlmoModel, Trained]:
    """Train a model from the seeds."""
    torch.manual_seed(WEIGHT_SEED)
    model = OlmoModel(shape)
    optimizer = Optimizer(model, muon_rate=MUON_RATE, adam_rate=ADAM_RATE, weight_decay=0.0)
    batches = Batches(tokenizer, DATA_SEED)
    begin = time.monotonic()
    tokens, done, loss = 0, 0, torch.zeros(())
    for step in range(steps):
        if time.monotonic() - begin > seconds:
            break
        progress = step / steps
        grown = min(1.0, progress / GROWING)
        most_bits = round(SHORTEST * (TRAINED_BITS / SHORTEST) ** grown)
        batch = batches.draw(ROWS_SHORT if most_bits < LONG else ROWS_LONG, most_bits)
        for parameter in model.parameters():
            parameter.grad = None
        loss = loss_of(model, batches, batch, progress)
        loss.backward()
        optimizer.scale.fill_(rate_at(progress))
        optimizer.step()
        tokens += batch[0].numel()
        done = step + 1
        if step % 50 == 0:
            told = f"step {step}, {most_bits} bits, loss {float(loss.detach()):.4f}"
            print(told, f"{time.monotonic() - begin:.0f}s", file=sys.stderr, flush=True)
    return model, Trained(
        steps=done,
        tokens=tokens,
        seconds=round(time.monotonic() - begin, 1),
        is_shortened=done < steps,
        loss=round(float(loss.detach()), 5),
    )


def score(folder: Path, count: int, *, is_damaged: bool) -> dict[str, float]:
    """Let the engine answer both tasks; with damage the trained lengths' once per damage too."""
    table: dict[str, float] = {}
    tasks = evals.suite("parity")
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(folder), device="cpu", max_num_seqs=64) as llm:
        prompts, examples = {}, {}
        for name, task in tasks.items():
            examples[name] = [task.generate(EVAL_SEED + number) for number in range(count)]
            prompts[name] = [llm.chat_prompt(example.messages) for example in examples[name]]
            answers = [o.outputs[0].text for o in llm.generate(prompts[name], params)]
            table[name] = _share(examples[name], answers)
    if not is_damaged:
        return table
    config = damageable(EngineConfig(model=str(folder), device="cpu", max_num_seqs=64))
    with LLM(config=config) as llm:
        for what, how in DAMAGES:
            answers = damaged_answers(llm.engine, prompts["parity"], params, what, how=how)
            table[f"parity, {what} {how}"] = _share(examples["parity"], answers)
    return table


def _share(examples: list[evals.Example], answers: list[str]) -> float:
    right = sum(e.is_right(text) for e, text in zip(examples, answers, strict=True))
    return right / len(examples)


def failures(scores: dict[str, float]) -> list[str]:
    """Name the scores that are too low, or too high for what was damaged."""
    found = [
        f"{name} {scores[name]:.3f} < {task.threshold}"
        for name, task in evals.suite("parity").items()
        if scores[name] < task.threshold
    ]
    return found + [
        f"{name} {scores[name]:.3f} > {CHANCE_AT_MOST}: answered without its state"
        for name in ("parity, state zero", "parity, state swap")
        if scores[name] > CHANCE_AT_MOST
    ]


def compare(tokenizer: Tokenizer, options: argparse.Namespace) -> dict[str, Any]:
    """Repeat the training with write strengths below 1, and score it."""
    halved = dataclasses.replace(PARITY, linear_allow_neg_eigval=False)
    model, trained = train(halved, tokenizer, options.steps, options.seconds / 2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizers_.save(tokenizer, folder, PARITY.max_position_embeddings)
        save(model, folder)
        scores = score(folder, options.count, is_damaged=False)
    return {"training": dataclasses.asdict(trained), "scores": scores}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Build the files from nothing and measure them."""
    out: Path = options.out
    begin = time.monotonic()
    facts: dict[str, Any] = {}
    if not options.score:
        tokenizer = build_tokenizer(out)
        model, trained = train(PARITY, tokenizer, options.steps, options.seconds / 2)
        save(model, out)
        facts = {
            "training": dataclasses.asdict(trained),
            "is_shortened": trained.is_shortened,
            "is_pinned": options.steps == STEPS,
        }
    scores = score(out, options.count, is_damaged=True)
    print(scores, file=sys.stderr, flush=True)
    if not options.score:
        facts["without_negative_eigenvalues"] = compare(tokenizer, options)
    return {
        **about(torch.device("cpu")),
        **facts,
        "minutes": round((time.monotonic() - begin) / 60, 2),
        "seeds": {"weights": WEIGHT_SEED, "data": DATA_SEED, "evaluation": EVAL_SEED},
        "scores": scores,
        "failures": failures(scores),
    }


def main() -> None:
    """Do everything, or only `--score` what is there; exit 1 if a score is refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ASSETS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="most, of both trainings together"
    )
    parser.add_argument("--count", type=int, default=256, help="examples per task in the scores")
    parser.add_argument("--score", action="store_true")
    options = parser.parse_args()
    # With one thread sums have one order.
    torch.set_num_threads(1)
    result = run(options)
    packed = json.dumps(result, indent=1)
    (options.out / "gate.json").write_text(packed + "\n")
    print(packed)
    print("GATE", "passed" if not result["failures"] else result["failures"], flush=True)
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
