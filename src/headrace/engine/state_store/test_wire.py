"""A piece as bytes: what comes out is what went in, or the reason why not."""

import random

import numpy as np
import pytest
import torch

from headrace.engine.state_store.wire import ARCHIVE_MAGIC, BadPieceError, Wire, join, split
from headrace.worker.transfers import PieceLayout, PieceLayouts, PieceTensor

KEY = bytes(range(16))


def layouts(heads: int = 2) -> PieceLayouts:
    tokens = PieceTensor(name="kv.tokens", dtype=torch.int64, shape=(4,), offset=0)
    keys = PieceTensor(name="kv.k", dtype=torch.bfloat16, shape=(3, 4, heads, 5), offset=32)
    state = PieceTensor(name="state.0.s", dtype=torch.float32, shape=(2, 7), offset=0)
    return PieceLayouts(
        kv=PieceLayout(tensors=(tokens, keys)), state=PieceLayout(tensors=(state,)),
        blocks_per_column=1, groups=((state,),),
    )


def piece(wire: Wire, kind: str = "kv", key: bytes = KEY) -> bytes:
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, wire.num_bytes(kind), dtype=np.uint8)  # type: ignore[arg-type]
    head, same = wire.encode(kind, key, data)  # type: ignore[arg-type]
    assert same is data
    assert len(head) % 64 == 0
    return head + data.tobytes()


def fault(wire: Wire, raw: bytes, kind: str = "kv", key: bytes = KEY) -> str:
    with pytest.raises(BadPieceError) as caught:
        wire.decode(kind, key, raw)  # type: ignore[arg-type]
    return caught.value.fault


@pytest.mark.parametrize("kind", ["kv", "state"])
def test_a_piece_comes_back(kind: str) -> None:
    wire = Wire("c", layouts())
    raw = piece(wire, kind)
    assert wire.name_of(raw) == (kind, KEY)
    assert wire.decode(kind, KEY, raw).tobytes() == raw[-wire.num_bytes(kind) :]  # type: ignore[arg-type]


def test_behind_its_digest_a_piece_is_a_safetensors_file() -> None:
    load = pytest.importorskip("safetensors.torch").load
    wire = Wire("c", layouts())
    raw = piece(wire)
    tensors = load(raw[40:])
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "kv.tokens": (4,), "kv.k": (3, 4, 2, 5),
    }
    assert tensors["kv.k"].dtype == torch.bfloat16
    data = wire.decode("kv", KEY, raw)
    assert (tensors["kv.tokens"].numpy() == data[:32].view(np.int64)).all()


def test_every_single_byte_counts() -> None:
    wire = Wire("c", layouts())
    raw = piece(wire)
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 1 << random.randrange(8)
        assert fault(wire, bytes(bad)) in ("damaged", "version"), at


def test_every_length_but_its_own_is_a_fault() -> None:
    wire = Wire("c", layouts())
    raw = piece(wire)
    for length in range(len(raw)):
        assert fault(wire, raw[:length]) in ("truncated", "damaged"), length
    assert fault(wire, raw + b"0") == "damaged"


def test_other_versions_contexts_keys_kinds_and_layouts_are_told_apart() -> None:
    wire = Wire("c", layouts())
    raw = piece(wire)
    assert fault(wire, b"HRPIECE2" + raw[8:]) == "version"
    assert fault(Wire("d", layouts()), raw) == "foreign"
    assert fault(wire, raw, key=KEY[::-1]) == "foreign"
    assert fault(wire, raw, kind="state") == "foreign"
    assert fault(Wire("c", layouts(heads=3)), raw) == "foreign"


def test_an_archive_is_its_pieces() -> None:
    wire = Wire("c", layouts())
    pieces = [piece(wire), piece(wire, "state")]
    archive = join((raw[:64], np.frombuffer(raw[64:], dtype=np.uint8)) for raw in pieces)
    assert [bytes(one) for one in split(archive)] == pieces
    assert [bytes(one) for one in split(archive[:-3])] == [pieces[0], pieces[1][:-3]]
    assert list(split(ARCHIVE_MAGIC)) == []
    with pytest.raises(BadPieceError):
        list(split(b"zip"))
