"""Two checkpoints on the disk, tensor by tensor, balanced and moved by what an alignment knows so far."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regauge.alignment.streamed.plan import Plan
from regauge.alignment.streamed.state import State
from regauge.core import act as _act
from regauge.core.element import Element
from regauge.core.families import dot
from regauge.core.params import require_finite
from regauge.storage.checkpoints.checkpoint import Checkpoint


class Stream:
    """Both networks of a streamed alignment.

    Args:
        a: The network that stays.
        b: The network that moves.
        plan: The plan of the alignment.
        state: The state of the alignment; tensors are moved by the elements that it has when `refresh` is called.

    Attributes:
        scale: `sum |a| |b|` over what was loaded since `begin_sweep`.
        identity: The objective of the identity, over the same tensors; only summed up in the very first sweep.
        crossed: The inner products in it, without the norms.
    """

    def __init__(self, a: Checkpoint, b: Checkpoint, plan: Plan, state: State) -> None:
        self._a, self._b, self._plan, self._state = a, b, plan, state
        self._symmetry = plan.symmetry
        self._total = state.element
        self._active: dict[int, set[str]] = {}  # By the ids of elements that live until they are looked up anew.
        self.scale = self.identity = self.crossed = 0.0

    def begin_sweep(self) -> None:
        """Set the sums to zero."""
        self.scale = self.identity = self.crossed = 0.0

    def refresh(self) -> None:
        """Take over the elements of the state: the second network is balanced, then moved by the element so far."""
        self._active.clear()
        right, element = self._state.right, self._state.element
        self._total = element if right is None else self._symmetry.compose(element, right)

    def load(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor, float]:
        """Both tensors of a name, balanced, the second one moved; the squared norm of the second where it varies.

        Raises:
            ValueError: A tensor holds NaN or Inf; looked for in the first sweep.
        """
        state, dtype = self._state, self._dtype(name)
        x, y = self._a.read(name, rows=rows, dtype=dtype), self._b.read(name, rows=rows, dtype=dtype)
        is_first = state.initial is None and state.is_anchored
        if state.initial is None:
            require_finite({name: x}, str(self._a.path))
            require_finite({name: y}, str(self._b.path))
        if state.left is not None:
            x = self._move(name, x, state.left)
        start = 0.0
        if self._is_shifting(name) or (is_first and state.left is not None):
            balanced = y if state.right is None else self._move(name, y, state.right)
            start = dot(balanced, balanced)
        if is_first:
            there = y if state.left is None else self._move(name, y, state.left)
            self.crossed += dot(x, there)
            self.identity += dot(x, there)
            sites = self._symmetry.sites[name]
            if state.left is not None and any(any((*s.placement.scale, *s.placement.shift)) for s in sites):
                self.identity -= (dot(there, there) - start) / 2
        self.scale += float(torch.linalg.vector_norm(x)) * float(torch.linalg.vector_norm(y))
        return x, self._move(name, y, self._total), start

    def objective(self, name: str, x: Tensor, y: Tensor, start: float) -> float:
        """What a loaded tensor contributes: `<x, y> - (|y|^2 - start) / 2`; only shifts change the second part."""
        return dot(x, y) - ((dot(y, y) - start) / 2 if self._is_shifting(name) else 0.0)

    def pieces(self, name: str) -> list[tuple[int, int] | None]:
        """Ranges of rows in which a tensor can be read piece by piece; None for all at once."""
        rows, length = self._plan.sizes.rows_of(name), (*self._symmetry.shapes[name], 1)[0]
        if rows is None:
            return [None]
        return [(first, min(first + rows, length)) for first in range(0, length, rows)]

    def nbytes(self, names: Sequence[str]) -> int:
        """Bytes of some tensors in both files."""
        return sum(self._a.stored[name].nbytes + self._b.stored[name].nbytes for name in names)

    def read_so_far(self) -> tuple[int, float]:
        """Bytes that were read from both files, and the seconds that this took."""
        readings = (self._a.read_so_far, self._b.read_so_far)
        return sum(r.nbytes for r in readings), sum(r.seconds for r in readings)

    def _move(self, name: str, tensor: Tensor, element: Element) -> Tensor:
        """A tensor moved by an element; groups for which it is the identity are passed over."""
        if id(element) not in self._active:
            self._active[id(element)] = active_groups(element)
        active = self._active[id(element)]
        sites = [site for site in self._symmetry.sites[name] if site.group.name in active]
        if not sites:
            return tensor
        return _act.act(self._symmetry.groups, {name: sites}, element, {name: tensor}, {name: tensor.ndim})[name]

    def _is_shifting(self, name: str) -> bool:
        return any(any(site.placement.shift) for site in self._symmetry.sites[name])

    def _dtype(self, name: str) -> torch.dtype:
        one = torch.promote_types(self._a.stored[name].dtype, self._b.stored[name].dtype)
        return torch.promote_types(one, torch.float32)


def active_groups(element: Element) -> set[str]:
    """The groups for which an element is more than the identity."""
    result = set()
    for name, value in element.items():
        blanks = {"perm": None, "scale": 1, "sign": 1, "shift": 0, "matrix": None}
        for field, blank in blanks.items():
            tensor = getattr(value, field)
            if tensor is None:
                continue
            if field == "perm":
                is_blank = bool((tensor == torch.arange(tensor.shape[-1])).all())
            elif field == "matrix":
                is_blank = bool((tensor == torch.eye(tensor.shape[-1], dtype=tensor.dtype)).all())
            else:
                is_blank = bool((tensor == blank).all())
            if not is_blank:
                result.add(name)
                break
    return result
