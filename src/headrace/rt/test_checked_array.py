"""Each way to the memory is recorded or refused."""

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.rt.checked_array import PLAIN_ATTRIBUTES, READING_METHODS, CheckedArray
from headrace.rt.errors import RefusedError


class Log:
    def __init__(self) -> None:
        self.reads: list[list[int]] = []
        self.writes: list[list[int]] = []

    def host_read(self, rows: slice | npt.NDArray[np.int64]) -> None:
        self.reads.append(np.arange(4)[rows].tolist())

    def host_write(self, rows: slice | npt.NDArray[np.int64]) -> None:
        self.writes.append(np.arange(4)[rows].tolist())


def make() -> tuple[CheckedArray, npt.NDArray[np.int64], Log]:
    log = Log()
    memory = np.arange(12, dtype=np.int64).reshape(4, 3)
    return CheckedArray(log, memory), memory, log


READS: dict[str, tuple[Callable[[Any], object], list[int]]] = {
    "scalar": (lambda x: x[1, 2], [1]),
    "part, then sum": (lambda x: x[1:3].sum(), [1, 2]),
    "row, then tolist": (lambda x: x[2].tolist(), [2]),
    "column": (lambda x: x[:, 0].tolist(), [0, 1, 2, 3]),
    "part of a part": (lambda x: x[1:][1:].copy(), [2, 3]),
    "fancy index": (lambda x: x[np.array([3, 1])], [3, 1]),
    "mask": (lambda x: x[np.array([True, False, True, False])], [0, 2]),
    "negative": (lambda x: x[-1, 0], [3]),
    "asarray": (np.asarray, [0, 1, 2, 3]),
    "array of a part": (lambda x: np.array(x[:2]), [0, 1]),
    "ufunc": (lambda x: x[:2] + 1, [0, 1]),
    "where": (lambda x: np.where(x[:2] > 0, 1, 0), [0, 1]),
    "concatenate": (lambda x: np.concatenate([x[:1], x[:1]]), [0]),
    "iterate": (list, [0, 1, 2, 3]),
    "contains": (lambda x: 5 in x, [0, 1, 2, 3]),
    "torch.tensor": (lambda x: torch.tensor(x[1].tolist()), [1]),
    "int": (lambda x: int(x[1:2, 1:2].item()), [1]),
    "equality": (lambda x: x[:1] == 0, [0]),
}

WRITES: dict[str, tuple[Callable[[Any], object], list[int]]] = {
    "index": (lambda x: operator.setitem(x, 1, 0), [1]),
    "slice": (lambda x: operator.setitem(x, slice(2), 0), [0, 1]),
    "element": (lambda x: operator.setitem(x, (2, 1), 0), [2]),
    "everything": (lambda x: operator.setitem(x, Ellipsis, 0), [0, 1, 2, 3]),
    "part": (lambda x: operator.setitem(x[1:3], slice(None), 0), [1, 2]),
    "row of a part": (lambda x: operator.setitem(x[1:][0], 1, 0), [1]),
    "fill": (lambda x: x[1:2].fill(3), [1]),
    "sort": (lambda x: x[1:3].sort(), [1, 2]),
    "in place": (lambda x: x[:1].__iadd__(1), [0]),
    "out=": (lambda x: np.cumsum([1, 2, 3], out=x[1]), [1]),
    "ufunc out=": (lambda x: np.add([1, 2, 3], 1, out=x[1]), [1]),
    "copyto": (lambda x: np.copyto(x[3], 1), [3]),
    "ufunc.at": (lambda x: np.add.at(x[1], [0], 1), [1]),
    "mask": (lambda x: operator.setitem(x, np.array([True, False, False, True]), 0), [0, 3]),
}

REFUSED: dict[str, Callable[[Any], object]] = {
    "view": lambda x: x.view(np.int32),
    "data": lambda x: x.data,
    "ctypes": lambda x: x.ctypes,
    "reshape": lambda x: x.reshape(-1),
    "T": lambda x: x.T,
    "put": lambda x: np.put(x, [0], [9]),
    "place": lambda x: np.place(x, np.ones((4, 3), dtype=bool), [9]),
    "fill_diagonal": lambda x: np.fill_diagonal(x, 9),
    "asarray write": lambda x: np.asarray(x).__setitem__(0, 9),
    "asarray without copy": lambda x: x.__array__(copy=False),
    "torch.from_numpy": torch.from_numpy,
    "memoryview": memoryview,
    "interface": lambda x: x.__array_interface__,
    "struct": lambda x: x.__array_struct__,
    "dlpack": np.from_dlpack,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "flat": lambda x: x.flat,
    "setfield": lambda x: x.setfield(1, np.int8),
    "frombuffer": np.frombuffer,
}


@pytest.mark.parametrize("name", READS)
def test_read_is_recorded(name: str) -> None:
    array, memory, log = make()
    before = memory.copy()
    act, rows = READS[name]
    act(array)
    assert log.reads
    assert {row for one in log.reads for row in one} == set(rows)
    assert not log.writes
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("name", WRITES)
def test_write_is_recorded_and_reaches_the_memory(name: str) -> None:
    array, memory, log = make()
    memory[:] = memory[::-1, ::-1].copy()
    before = memory.copy()
    act, rows = WRITES[name]
    act(array)
    assert {row for one in log.writes for row in one} == set(rows)
    assert (memory != before).any()
    changed = np.flatnonzero((memory != before).any(axis=1)).tolist()
    assert set(changed) <= set(rows)


@pytest.mark.parametrize("name", REFUSED)
def test_unseen_way_is_refused(name: str) -> None:
    array, memory, _ = make()
    before = memory.copy()
    with pytest.raises((RefusedError, TypeError, ValueError, AttributeError, BufferError)):
        REFUSED[name](array)
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("name", sorted(READING_METHODS))
def test_listed_method_is_a_recorded_read(name: str) -> None:
    array, memory, log = make()
    part = array[1:2, 0]
    arguments = (np.float64,) if name == "astype" else ()
    result = getattr(part, name)(*arguments)
    assert log.reads == [[1]]
    assert not isinstance(result, np.ndarray) or not np.shares_memory(result, memory)


def test_plain_attributes_read_nothing() -> None:
    array, memory, log = make()
    for name in PLAIN_ATTRIBUTES:
        assert getattr(array, name) == getattr(memory, name)
    assert not log.reads
    assert not log.writes


def test_results_do_not_share_memory() -> None:
    array, memory, _ = make()
    for result in (np.asarray(array), array.copy(), array[:2] + 0, np.where(array > 0, array, 0)):
        assert not np.shares_memory(result, memory)
