"""Run a traced model as far as some of its intermediate values, and return these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from regauge.discovery.registry import leaves_as_operators
from regauge.discovery.trace import Program


@dataclass(frozen=True, eq=False)
class IntermediateValues:
    """The intermediate values of a traced model, by name: "%" and the name of the node.

    Attributes:
        module: The model.
        program: Its trace, for inputs of one shape.
    """

    module: nn.Module
    program: Program
    _graphs: dict[tuple[str, ...], GraphModule] = field(default_factory=dict, repr=False)

    def __call__(
        self,
        params: Mapping[str, Tensor],
        inputs: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        names: Sequence[str],
    ) -> dict[str, Tensor]:
        """Run the model on inputs of the shapes of the trace; no gradients.

        Args:
            params: Parameters and buffers.
            inputs: Positional inputs.
            kwargs: Keyword inputs, in the order of the trace.
            names: Which values.
        """
        graph = self._graph(tuple(names))
        with torch.no_grad(), leaves_as_operators(self.module):
            return dict(zip(names, graph(*self._placeholders(params, inputs, kwargs)), strict=True))

    def _graph(self, names: tuple[str, ...]) -> GraphModule:
        """The program as far as these values need it."""
        if names not in self._graphs:
            graph = Graph()
            copies: dict[Node, Node] = {}
            graph.graph_copy(self.program.graph.graph, copies)
            by_name = {f"%{old.name}": new for old, new in copies.items()}
            graph.output(tuple(by_name[name] for name in names))
            graph.eliminate_dead_code()
            self._graphs[names] = GraphModule(self.program.graph, graph)
        return self._graphs[names]

    def _placeholders(
        self, params: Mapping[str, Tensor], inputs: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        given = dict(zip(self.program.inputs, pytree.tree_leaves((tuple(inputs), dict(kwargs))), strict=True))
        result = []
        for node in self.program.graph.graph.find_nodes(op="placeholder"):
            state = self.program.states.get(node.name)
            if state is None:
                held = self.program.held.get(node.name)
                result.append(given.get(node.name) if held is None else held)
            else:
                names = self.program.aliases.get(state, (state,))
                result.append(next(params[name] for name in names if name in params))
        return result
