"""A region of a program: the operators whose tensors contain a certain axis factor, evaluated on random numbers."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from regauge.discovery.evaluation import Constants, UndecidedError, comparable, evaluate, like
from regauge.discovery.freedom import PairedAxis
from regauge.discovery.interpret import Pass
from regauge.discovery.layout import Atom, leaves
from regauge.discovery.trace import Program

LARGEST_TRIED = 1 << 26
"""The largest number of entries of a parameter that is tested.

The weight of a linear layer is restricted to a few inputs before its entries are counted.
"""
FEW = 3
"""The number of inputs of a linear layer that are kept if only its outputs are tested."""


class Region:
    """The operators from some parameters up to the first values that lack a certain axis factor (atom).

    Operands from outside the region are constants with their true values, or random numbers.
    """

    def __init__(
        self, program: Program, found: Pass, atom: Atom, pairs: Sequence[PairedAxis], constants: Constants
    ) -> None:
        self._constants = constants
        self._axes = {pair.name: pair.axis for pair in pairs}
        self._starts = [n for n in constants.parameters if program.states[n.name] in self._axes]
        self.names = [program.states[node.name] for node in self._starts]
        self._inside: dict[Node, str | None] = dict(zip(self._starts, self.names, strict=True))
        self._ends: list[Node] = []
        self.has_output = False
        for node in program.graph.graph.nodes:
            if node in self._inside or not any(source in self._inside for source in node.all_input_nodes):
                continue
            if node.op == "output":
                self.has_output = True
            elif node.users:
                value = found.values.get(node)
                is_inside = value is None or any(atom in leaves(layout) for layout in value.layouts)
                if is_inside:
                    self._inside[node] = None
                else:
                    self._ends.append(node)
        self._given: dict[Node, Any] = {}
        self.params: dict[str, Tensor] = {}

    def shape(self) -> Hashable:
        """Return a key that describes the operators, shapes and constants of the region. Regions with equal keys need
        only one test.

        For example, regions in corresponding layers of a deep model have equal keys.
        """
        inside = {node: k for k, node in enumerate([*self._inside, *self._ends])}

        def told(node: Node) -> Hashable:
            if node in inside:
                return inside[node]
            return like(node.meta.get("val")) if self._constants.is_dependent(node) else self._constants.name(node)

        return tuple(
            (
                node.op,
                like(node.meta.get("val")),
                comparable(node.target, told),
                comparable((node.args, node.kwargs), told),
            )
            if name is None
            else (node.op, like(node.meta.get("val")), len(node.users))
            for node, name in {**self._inside, **dict.fromkeys(self._ends)}.items()
        )

    def draw(self, generator: torch.Generator) -> None:
        """Choose random parameters for the region, and values for all tensors that the region reads from outside.

        Constant tensors keep their true values, and all other tensors get random values.
        """
        for node, name in zip(self._starts, self.names, strict=True):
            shape = tuple(node.meta["val"].shape)
            x = _read_by(node) if self._axes[name] == 0 else None
            if x is not None and x not in self._inside:
                shape = (shape[0], FEW)
                few = (*x.meta["val"].shape[:-1], FEW)
                self._given[x] = torch.randn(few, generator=generator, dtype=torch.float64)
            if torch.Size(shape).numel() > LARGEST_TRIED:
                raise UndecidedError(f"it has more than {LARGEST_TRIED} entries")
            self.params[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
        for node in [*self._inside, *self._ends]:
            for source in node.all_input_nodes:
                if source not in self._inside and source not in self._given:
                    self._given[source] = self._constants.draw(source, generator)

    def ends(self, params: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values at the end of the region, computed from the given parameters."""
        known: dict[Node, Any] = dict(self._given)
        for node, name in self._inside.items():
            known[node] = evaluate(node, known) if name is None else params[name]
        results = [evaluate(node, known) for node in self._ends]
        return [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]


def _read_by(weight: Node) -> Node | None:
    """Return the input of the linear layer that has this weight, or None if the weight is used in another way."""
    reader = next(iter(weight.users), None)
    if reader is None or len(weight.users) > 1 or reader.target is not torch.ops.aten.linear.default:
        return None
    x, matrix = reader.args[:2]
    return x if isinstance(x, Node) and matrix is weight else None
