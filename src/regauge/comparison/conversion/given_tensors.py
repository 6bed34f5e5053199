"""The tensors of the source network, indexed for the search as fibers, vectors, constants and integers."""

from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from re import findall

import torch
from scipy.spatial import KDTree
from torch import Tensor

from regauge.comparison.conversion.fibers import Marks, Owners
from regauge.comparison.conversion.tensor_map import MadeTensor


def is_measured(name: str, tensor: Tensor, label: str) -> bool:
    """Return whether a tensor is searched by its values; integers and masks with -Inf are compared as a whole.

    Raises:
        ValueError: The tensor holds NaN.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    if bool(torch.isnan(tensor).any()):
        raise ValueError(f"{name!r} of {label} holds NaN, and cannot be compared; repair the checkpoint first")
    return bool(torch.isfinite(tensor).all())


def squeeze(tensor: Tensor) -> Tensor:
    """Return a tensor without gradients and without axes of one entry."""
    return tensor.detach().squeeze()


def is_constant(tensor: Tensor) -> bool:
    """Return whether all values are the same."""
    return bool((tensor == tensor.reshape(-1)[0]).all())


class GivenTensors:
    """The tensors of network A, with the features by which they are searched.

    Attributes:
        params: The tensors.
        shapes: The shapes of the tensors.
        constants: The values of tensors whose entries are all equal.
        vectors: Tensors with one axis, squeezed and in float64.
        integers: Names of tensors that are compared as a whole.
        marks: For each length of fibers, the tensors and axes with this length, with their features.
        used: Names of tensors from which tensors of B are made.
    """

    def __init__(self, params: Mapping[str, Tensor], label: str, advance: Callable[[], object]) -> None:
        self.params = params
        self.shapes = {name: tuple(params[name].shape) for name in params}
        self.constants: dict[str, float] = {}
        self.vectors: dict[str, Tensor] = {}
        self.integers: list[str] = []
        self.marks: dict[int, dict[tuple[str, int], Marks]] = {}
        self.used: set[str] = set()
        self._precision = 0.0
        self._owners: dict[tuple[int, str], tuple[Owners, KDTree]] = {}
        for name in params:
            self._read(name, params[name], label)
            advance()

    def _read(self, name: str, tensor: Tensor, label: str) -> None:
        if not is_measured(name, tensor, label):
            self.integers.append(name)
            return
        self._precision = max(self._precision, torch.finfo(tensor.dtype).eps)
        flat = squeeze(tensor)
        if is_constant(flat):
            self.constants[name] = float(flat.reshape(-1)[0])
            return
        if flat.ndim == 1:
            self.vectors[name] = flat.double()
        for axis in range(flat.ndim):
            self.marks.setdefault(flat.shape[axis], {})[name, axis] = Marks.of(flat, axis)

    def precision(self, tensor: Tensor) -> float:
        """Return the precision of the coarsest format among the tensors of A and this tensor."""
        return max(self._precision, torch.finfo(tensor.dtype).eps)

    def owners(self, length: int, kind: str) -> tuple[Owners, KDTree]:
        """Return the fibers of one length with their search tree, for ordered, unordered or scaled features."""
        if (length, kind) not in self._owners:
            read = self.marks[length].items()
            found = Owners.of([(key, one.unordered if kind == "unordered" else one.ordered) for key, one in read])
            self._owners[length, kind] = found, found.tree(scaled=kind == "scaled")
        return self._owners[length, kind]

    def likeness(self, name: str) -> Callable[[str], tuple[bool, bool, float]]:
        """Return the sort key for tensors with equal values: similar names and unused tensors come first."""
        numbers = findall(r"\d+", name)

        def key(other: str) -> tuple[bool, bool, float]:
            likeness = SequenceMatcher(None, name, other, autojunk=False).ratio()
            return findall(r"\d+", other) != numbers, other in self.used, -likeness

        return key

    def use(self, origin: MadeTensor) -> MadeTensor:
        """Record the tensors from which a tensor of B is made."""
        self.used |= {one.name for one in origin.sources if one.name is not None}
        return origin

    def is_equal(self, one: str, two: str) -> bool:
        """Return whether two tensors are equal, such as a tied head and the embedding."""
        return self.shapes[one] == self.shapes[two] and torch.equal(self.params[one], self.params[two])
