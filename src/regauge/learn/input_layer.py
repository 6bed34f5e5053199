"""The first layer of networks. A transformation of the inputs is equivalent to a change of the first layer's
weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task

EXACT = 1e-6
"""The largest difference, relative to the largest output, at which two networks count as equal in float64."""


@dataclass(frozen=True)
class InputLayer:
    """The first layer `W x + b` of networks whose inputs are vectors, such as the coordinates of a signal.

    Attributes:
        weight: The name of W, `[units, inputs]`.
        bias: The name of b, `[units]`.
        inputs: The number of inputs.
    """

    weight: str
    bias: str
    inputs: int

    @classmethod
    def find(cls, symmetry: Symmetry, module: nn.Module) -> "InputLayer":
        """Return the first layer: the only matrix with a group on its output axis and no group on its input axis.

        The layer is tested in float64. Transforming the inputs of a random network must give the same outputs as
        transforming the network's first layer.

        Raises:
            ValueError: No matrix, or more than one matrix, has a group only on its output axis. The error is also
                raised if the network also uses its inputs in other layers.
        """
        outputs = {(place.parameter, place.axis): group.name for group in symmetry.groups for place in group.placements}
        shapes = symmetry.shapes
        found = []
        for name, shape in shapes.items():
            group = outputs.get((name, 0))
            if len(shape) == 2 and group is not None and (name, 1) not in outputs:
                biases = [b for b, s in shapes.items() if len(s) == 1 and outputs.get((b, 0)) == group]
                found += [cls(name, bias, shape[1]) for bias in biases]
        right = [layer for layer in found if layer._moves(module)]
        if len(right) != 1:
            raise ValueError(
                f"{len(found)} layers may read the inputs of these networks, and {len(right)} of them can represent "
                "changes of the inputs; leave out translations, rotations and scalings of the input, which are for "
                "networks of coordinates such as SIRENs"
            )
        return right[0]

    def move(self, params: Mapping[str, Tensor], matrix: Tensor, shift: Tensor) -> Params:
        """Return networks that compute `f(matrix x + shift)`, where f is the function of the given network."""
        weight, bias = params[self.weight], params[self.bias]
        moved = bias + torch.einsum("moi,mi->mo", weight, shift.to(weight))
        return {**params, self.weight: weight @ matrix.to(weight), self.bias: moved}

    def _moves(self, module: nn.Module) -> bool:
        """Return whether transforming the layer has the same effect on the outputs as transforming the inputs."""
        chance = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=chance, dtype=torch.float64)

        params = {
            name: 0.3 * draw(1, *tensor.shape) if tensor.is_floating_point() else tensor.unsqueeze(0)
            for name, tensor in module.state_dict().items()
        }
        matrix, shift, points = draw(1, self.inputs, self.inputs), draw(1, self.inputs), draw(7, self.inputs)
        task = Task(module, ())
        moved = {name: tensor[0] for name, tensor in self.move(params, matrix, shift).items()}
        try:
            wanted = task.run({name: tensor[0] for name, tensor in params.items()}, points @ matrix[0].T + shift[0])
            got = task.run(moved, points)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return False  # the module does not take vectors of this length
        return bool(got.isfinite().all()) and float((got - wanted).abs().max()) <= EXACT * float(wanted.abs().max())
