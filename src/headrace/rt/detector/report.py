"""What the kernel detector says, and what it keeps of a launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

Order: TypeAlias = Literal["forward", "reverse"] | int
"""In which order the programs of a launch run; a number seeds a shuffle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One contiguous region on which the result depends on the order of programs or lanes.

    Attributes:
        kind: See the package's text.
        value_class: "different-value", "same-value", "value-changing", "silent" or "".
        kernel: Name of the kernel.
        tensor: Name of the argument.
        index: First element of the region, for example "[3, 0]".
        num_elements: Elements of the region.
        program_a, access_a, site_a: One program, its access (R, W, A) and its source line.
        program_b, access_b, site_b: The other one; for lanes the same program.
    """

    kind: str
    value_class: str
    kernel: str
    tensor: str
    index: str
    num_elements: int
    program_a: str
    access_a: str
    site_a: str
    program_b: str
    access_b: str
    site_b: str

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Kind, tensor and both lines, whatever the programs."""
        return self.kind, self.tensor, self.site_a, self.site_b

    @property
    def is_warning(self) -> bool:
        """Whether the report is about lanes, which need not be a race on hardware."""
        return self.kind.startswith("LANE")

    def __str__(self) -> str:
        """Return the report in one line."""
        head = f"{self.kind} {self.value_class}".strip()
        more = f" and {self.num_elements - 1} more" if self.num_elements > 1 else ""
        return (
            f"{head} {self.tensor}{self.index}{more}: "
            f"program {self.program_a} {self.access_a} at {self.site_a}, "
            f"program {self.program_b} {self.access_b} at {self.site_b} ({self.kernel})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Elements of a tensor that depend on the order of the programs of a launch.

    Attributes:
        kernel, tensor, index: Where the first differing element lies.
        num_elements: Elements that differ.
        order: The order that gave other bytes than the forward one.
    """

    kernel: str
    tensor: str
    index: str
    num_elements: int
    order: Order

    def __str__(self) -> str:
        """Return the difference in one line."""
        return (
            f"ORDER-DEPENDENT {self.tensor}{self.index}: {self.num_elements} elements differ "
            f"between forward order and {self.order} ({self.kernel})"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Touched:
    """Bytes of one storage that a launch touched.

    Attributes:
        start: Address of the storage.
        unit: Bytes for each entry.
        units: By access ("R", "W", "A"): bool arrays, or None if there was no such access.
    """

    start: int
    unit: int
    units: Mapping[str, NDArray[np.bool_] | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaunchRecord:
    """What one launch did.

    Attributes:
        kernel: Name of the kernel.
        grid: Programs in each direction.
        tensors: The launch's tensors by argument name; members of a tuple are "name[i]".
        num_accesses: Load, store and atomic operations.
        storages: Touched bytes of each storage.
    """

    kernel: str
    grid: tuple[int, int, int]
    tensors: Mapping[str, torch.Tensor]
    num_accesses: int
    storages: Sequence[Touched] = field(repr=False)

    def touched_bytes(self, start: int, size: int, access: str) -> NDArray[np.bool_]:
        """Bytes of the storage at an address that the launch touched, [size]."""
        for touched in self.storages:
            units = touched.units[access]
            if touched.start == start and units is not None:
                return np.repeat(units, touched.unit)[:size]
        return np.zeros(size, dtype=np.bool_)

    def touched(self, tensor: torch.Tensor, access: str) -> torch.Tensor:
        """Elements of a tensor that the launch touched.

        Args:
            tensor: Any tensor; one that the launch never saw gives all False.
            access: "R", "W" or "A".

        Returns:
            Bool tensor of the shape of the argument.
        """
        storage = tensor.untyped_storage()
        touched = self.touched_bytes(storage.data_ptr(), storage.nbytes(), access)
        return byte_view(torch.from_numpy(touched), tensor).any(-1)


def byte_view(flags: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The flags of a tensor's bytes: a view of shape [*tensor.shape, element size].

    Args:
        flags: One flag for each byte of the tensor's storage.
        tensor: A view into that storage.
    """
    size = tensor.element_size()
    return flags.as_strided(
        (*tensor.shape, size),
        (*(stride * size for stride in tensor.stride()), 1),
        tensor.storage_offset() * size,
    )


def name_byte(tensors: Mapping[str, torch.Tensor], start: int, offset: int) -> tuple[str, str, int]:
    """Argument, index and element size of a byte of the storage at an address."""
    fallback: tuple[str, int] | None = None
    for name, tensor in tensors.items():
        if tensor.untyped_storage().data_ptr() != start:
            continue
        size = tensor.element_size()
        index = _unravel(offset // size - int(tensor.storage_offset()), tensor)
        if index is not None:
            return name, f"[{', '.join(map(str, index))}]", size
        fallback = fallback or (name, size)
    assert fallback is not None, f"no tensor lies in the storage at {start:#x}"
    return f"storage of {fallback[0]}", f"[byte {offset}]", fallback[1]


def _unravel(element: int, tensor: torch.Tensor) -> list[int] | None:
    """Index of the element at a distance from the first one, or None if the view skips it."""
    index = [0] * tensor.dim()
    if element < 0 or tensor.numel() == 0:
        return None
    strides = tensor.stride()
    for dim in sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True):
        stride, size = strides[dim], tensor.shape[dim]
        if stride > 0 and size > 1:
            index[dim] = min(element // stride, size - 1)
            element -= index[dim] * stride
    return index if element == 0 else None


def thin_out(reports: list[Report], limit: int) -> list[Report]:
    """Without repetitions; beyond a readable number, one for each kind, tensor and pair of lines.

    It counts the elements of all its regions and has the worst value class.
    """
    unique = list(dict.fromkeys(reports))
    if len(unique) <= limit:
        return unique
    groups: dict[tuple[str, ...], list[Report]] = {}
    for report in unique:
        groups.setdefault(report.place, []).append(report)
    return [_merge(group) for group in groups.values()]


def _merge(group: list[Report]) -> Report:
    fields: dict[str, Any] = {name: getattr(group[0], name) for name in Report.__slots__}
    harmless = ("", "same-value", "silent")
    worst = max(group, key=lambda report: report.value_class not in harmless)
    fields["num_elements"] = sum(report.num_elements for report in group)
    fields["value_class"] = worst.value_class
    return Report(**fields)
