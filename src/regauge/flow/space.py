"""The space of a flow: networks as points in a product of unit spheres and a Euclidean space."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regauge.canonical import canonical_manifold, canonicalize
from regauge.core import sphere
from regauge.core.balance import balance
from regauge.core.params import Params, count_models
from regauge.core.structure import require_same, without_structure
from regauge.core.symmetry import Symmetry
from regauge.flow.manifold import Manifold, Points, Sphere
from regauge.flow.representation import Representation
from regauge.flow.value_orbits import exchanged_values, signed_values

LOG_NORM = "logarithm of the head's norm"
"""The name of an additional coordinate, the logarithm of the last layer's norm, which is not a tensor of the
networks."""


@dataclass(frozen=True, eq=False)
class Space(Manifold):
    """The space of the networks of one architecture. Coordinates on unit spheres come first, then Euclidean
    coordinates.

    Every floating-point entry of a network is one coordinate, including running statistics, because the outputs depend
    on running statistics. Structure, such as masks, has no coordinates, and a tied tensor has coordinates only once.
    Variances and other positive parameters are represented by their logarithms.

        x = space.enter(population)       # [models, values]
        space.leave(x)                    # networks that compute the same functions

    Attributes:
        symmetry: The symmetry, with every size known.
        representation: The way in which points represent networks.
        spheres: The coordinates that lie on spheres.
        normed: The parameters that are normalized when points of a Euclidean space are converted to networks.
        order: The flat index of every coordinate in the concatenation of all tensors in `names`.
        names: Tensors whose entries are coordinates. If the space has the coordinate `LOG_NORM`, it is the last name.
        positive: The tensors whose entries are represented by logarithms.
        constants: Tensors that are equal in all networks.
        exchanged: The class index of each coordinate. Permutations exchange the coordinates of one class.
        signed: Whether signs of the symmetry flip each coordinate.
    """

    symmetry: Symmetry
    representation: Representation
    spheres: tuple[Sphere, ...]
    normed: tuple[Sphere, ...]
    order: Int[Tensor, " places"]
    names: tuple[str, ...]
    positive: tuple[str, ...]
    constants: Mapping[str, Tensor]
    exchanged: Int[Tensor, " values"]
    signed: Bool[Tensor, " values"]

    @classmethod
    def of(
        cls, population: Mapping[str, Tensor], symmetry: Symmetry, representation: Representation | None = None
    ) -> "Space":
        """Return the space of the networks of a population.

        Args:
            population: Some networks, with a leading model axis. The population determines which tensors exist, which
                tensors are positive, and which tensors are not floating point.
            symmetry: The symmetry of the networks.
            representation: The way in which points represent networks.

        Raises:
            KeyError: There is no parameter with the name of the head.
            ValueError: The networks do not fit the symmetry, or the head already lies on spheres.
        """
        how = Representation() if representation is None else representation
        count_models(population)
        symmetry = symmetry.bind({name: tensor[0] for name, tensor in population.items()})
        if missing := [name for name in population if name not in symmetry.shapes]:
            raise ValueError(f"the symmetry lacks {missing[0]!r}; discover it from a module with this parameter")
        again = {name for names in symmetry.tied for name in names[1:]}
        fixed = {n for n, tensor in population.items() if not tensor.is_floating_point() or n in symmetry.structure}
        names = tuple(n for n in population if n not in again | fixed)
        positive = tuple(n for n in names if n in symmetry.buffers and bool((population[n] > 0).all()))
        constants = {n: t[0].clone() for n, t in population.items() if n in fixed}
        # Sampled networks are evaluated, and their running statistics may be recomputed.
        symmetry = without_structure(symmetry).on_data
        head = how.head if how.head_form != "keep" else None
        if head is not None and head not in symmetry.shapes:
            raise KeyError(f"there is no parameter {head!r} for a head; the last ones are {list(names)[-4:]}")
        return cls.build(symmetry, how, names, positive, constants)

    @classmethod
    def build(
        cls,
        symmetry: Symmetry,
        how: Representation,
        names: Sequence[str],
        positive: Sequence[str],
        constants: Mapping[str, Tensor],
    ) -> "Space":
        """Return the space of an architecture, given the names of tensors whose entries are coordinates."""
        head = how.head if how.head_form != "keep" else None
        manifold = canonical_manifold(symmetry, head=head)
        known = manifold.spheres
        if how.scales in ("balance", "keep"):
            known = known[-1:] if head is not None else ()
        names = (*names, LOG_NORM) if how.head_form == "direction" else tuple(names)
        whole = _with_norm(symmetry) if LOG_NORM in names else symmetry
        counts = [torch.Size(whole.shapes[name]).numel() for name in names]
        starts = dict(zip(names, torch.tensor([0, *counts]).cumsum(0).tolist(), strict=False))
        spheres, places, start = [], [], 0
        for one in known:
            index = torch.cat([starts[name] + index for name, index in one.pieces], dim=-1)
            spheres.append(Sphere(start, *index.shape))
            places.append(index.flatten())
            start += index.numel()
        is_left = torch.ones(sum(counts), dtype=torch.bool)
        for index in places:
            is_left[index] = False
        order = torch.cat([*places, torch.arange(sum(counts))[is_left]])
        exchanged = torch.unique(exchanged_values(whole, names)[order], return_inverse=True)[1]
        signed = signed_values(whole, names)[order]
        lie, normed = ((), tuple(spheres)) if how.scales == "flat" else (tuple(spheres), ())
        return cls(whole, how, lie, normed, order, names, tuple(positive), dict(constants), exchanged, signed)

    def resize(self, symmetry: Symmetry) -> "Space":
        """Return the space of networks with other numbers of units.

        Raises:
            ValueError: Networks with the given symmetry have other tensors.
        """
        if missing := [name for name in self.names if name not in {*symmetry.shapes, LOG_NORM}]:
            raise ValueError(
                f"networks of this symmetry have no {missing[0]!r}; give networks that differ only in widths"
            )
        symmetry = without_structure(symmetry) if symmetry.structure else symmetry
        wrong = [n for n, t in self.constants.items() if tuple(t.shape) != tuple(symmetry.shapes.get(n, t.shape))]
        if wrong:
            raise ValueError(
                f"{wrong[0]!r} is the same in all networks and cannot have another shape; give networks that differ "
                "only in widths"
            )
        names = [name for name in self.names if name != LOG_NORM]
        return self.build(symmetry, self.representation, names, self.positive, self.constants)

    @property
    def dim(self) -> int:
        """The number of coordinates."""
        return len(self.exchanged)

    @cached_property
    def tensors(self) -> Int[Tensor, " values"]:
        """The index in `names` of the tensor of each coordinate."""
        counts = torch.tensor([torch.Size(self.symmetry.shapes[name]).numel() for name in self.names])
        return torch.repeat_interleave(torch.arange(len(self.names)), counts)[self.order]

    def enter(self, population: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Points:
        """Return the points of networks, after translations are removed and scales are made canonical.

        Raises:
            ValueError: A unit has no incoming weights, so it has no point on its sphere. Parameters that were positive
                in the population are not positive. The error is also raised if a network has different structure.
        """
        for name in self.symmetry.structure:
            if name in self.constants and name in population:
                require_same(name, [self.constants[name].expand_as(population[name]), population[name]])
        params = {name: t.double() if t.is_floating_point() else t for name, t in population.items()}
        if LOG_NORM in self.names:
            params[LOG_NORM] = params[self.names[0]].new_zeros(count_models(population), 1)
        if self.representation.scales != "keep":
            params = self.symmetry.split(params)[0] if self.symmetry.translations else params
        if self.representation.scales == "balance":
            params = self.balance(params)
        elif self.representation.scales != "keep":
            params = canonicalize(params, self.symmetry, parts=("scale",))
        found = {name: params[name] for name in self.names}
        for name in self.positive:
            if bool((found[name] <= 0).any()):
                raise ValueError(f"{name!r} must be positive, but has the value {float(found[name].min())}")
            found[name] = found[name].log()
        how = self.representation
        if how.head is not None:
            norms = torch.linalg.vector_norm(found[how.head].flatten(1), dim=-1)
            divided = (how.head, how.head_bias if how.head_form == "unit" else None)
            found |= {n: found[n] / _along(norms, found[n]) for n in divided if n is not None}
            if LOG_NORM in found:
                found[LOG_NORM] = norms.log().unsqueeze(1)
        x = self.collect(found)
        for one in self.spheres:
            length = torch.linalg.vector_norm(self.on(one, x), dim=-1)
            bad = ~((length - 1).abs() < 1e-3)
            if bool(bad.any()):
                network, unit = bad.nonzero()[0].tolist()
                raise ValueError(
                    f"network {network} has a unit ({unit} of {one.count}) without incoming weights, which cannot be "
                    "normalized; leave this network out, or choose scales='keep'"
                )
        return self.project(x.to(dtype))

    def balance(self, params: Params) -> Params:
        """Return, for each network, the network of smallest norm that scales and invertible matrices produce from
        it.
        """
        return self.symmetry.act(balance(params, self.symmetry), params)

    def leave(self, x: Points) -> Params:
        """Return the networks that points represent, with all their tensors."""
        for one in self.normed:
            whole = sphere.normalize(self.on(one, x)).flatten(1)
            x = torch.cat([x[:, : one.start], whole, x[:, one.end :]], dim=1)
        found = self.arrange(x)
        norms = found.pop(LOG_NORM, None)
        head = self.representation.head
        if norms is not None and head is not None:
            found[head] = found[head] * _along(norms[:, 0].exp(), found[head])
        for name in self.positive:
            found[name] = found[name].exp()
        for name, tensor in self.constants.items():
            found[name] = tensor.to(x.device).expand(len(x), *tensor.shape)
        for names in self.symmetry.tied:
            found |= {name: found[names[0]] for name in names[1:] if names[0] in found}
        return found

    def arrange(self, x: Points) -> Params:
        """Return the coordinates as tensors by the names in `names`, in the shapes of the networks."""
        flat = torch.zeros_like(x).index_copy(1, self.order.to(x.device), x)
        pieces = torch.split(flat, [torch.Size(self.symmetry.shapes[name]).numel() for name in self.names], dim=1)
        return {
            name: piece.reshape(len(x), *self.symmetry.shapes[name])
            for name, piece in zip(self.names, pieces, strict=True)
        }

    def collect(self, tensors: Mapping[str, Tensor]) -> Points:
        """Return the coordinates of tensors. `collect` is the inverse of `arrange`."""
        flat = torch.cat([tensors[name].flatten(1) for name in self.names], dim=1)
        return flat[:, self.order.to(flat.device)]


def _with_norm(symmetry: Symmetry) -> Symmetry:
    """Return the symmetry with one additional parameter, which no element transforms."""
    return replace(symmetry, shapes={**symmetry.shapes, LOG_NORM: (1,)})


def _along(factors: Float[Tensor, " models"], tensor: Tensor) -> Tensor:
    """Return one factor per network, in a shape that broadcasts over the entries of a tensor."""
    return factors.reshape(-1, *([1] * (tensor.ndim - 1)))
