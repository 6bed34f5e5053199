"""The manifold of canonical networks: one sphere for each unit's incoming weights, and Euclidean factors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regauge.canonical.carry_out import leading_axes
from regauge.canonical.step_plan import ScaleStep, plan
from regauge.core import sphere
from regauge.core.arguments import check_arguments
from regauge.core.families import gather, scatter, unit_index
from regauge.core.groups import Group
from regauge.core.params import Params, require_same_shapes
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True, eq=False)
class Spheres:
    """Unit spheres on which the weights of units lie, given by flat indices `[units, values]` into each parameter."""

    pieces: tuple[tuple[str, Int[Tensor, "units values"]], ...]

    @property
    def count(self) -> int:
        """The number of units."""
        return len(self.pieces[0][1])

    @property
    def dim(self) -> int:
        """The length of the vectors, which is one more than the dimension of each sphere."""
        return sum(index.shape[-1] for _, index in self.pieces)

    @property
    def label(self) -> str:
        """A description of the parameters on the spheres."""
        return ", ".join(dict.fromkeys(name for name, _ in self.pieces))


@dataclass(frozen=True, eq=False)
class Manifold:
    """The manifold of canonical networks: a product of unit spheres and Euclidean factors.

    Points are parameters. Tangent vectors are dictionaries with the same names and shapes. Distances count every
    floating-point parameter once. On the spheres, distances are angles in radians. Buffers and further names of tied
    tensors are interpolated too, but distances ignore them. A unit without incoming weights has no point on its sphere,
    and moves on a straight line towards or from zero. Populations have a leading model axis on every tensor. The
    manifold does not align networks. Signs, orders and rotations must already agree; `canonicalize` makes them agree.

    Attributes:
        symmetry: The symmetry. All sizes of its groups must be known.
        spheres: The entries that lie on spheres. All other entries are Euclidean.
        left: Sentences that describe the freedom that canonical forms do not fix.

    References:
        Erdogan (2025), sections 4.4 and 6.2.
    """

    symmetry: Symmetry
    spheres: tuple[Spheres, ...]
    left: tuple[str, ...]

    @property
    def fixed(self) -> tuple[str, ...]:
        """Sentences that describe the parts of the symmetry that canonical forms fix."""
        words: dict[str, Callable[[Group], bool]] = {
            "order": lambda group: group.is_permuted,
            "scales": lambda group: group.scales > 0,
            "signs": lambda group: group.signs > 0,
            "half periods": lambda group: group.shifts > 0,
            "matrices": lambda group: group.matrix != "none",
        }
        return tuple(word for word, has in words.items() if any(map(has, self.symmetry.groups)))

    def __str__(self) -> str:
        rows = [f"{s.count} unit spheres in {s.dim} dimensions: {s.label}" for s in self.spheres]
        return "\n".join([*rows, "a flat space of all other parameters", *self.left])

    def distance(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> Float[Tensor, "*lead"]:
        """Return the length of the shortest geodesic in float64: the root of summed squared distances of all factors.

        Raises:
            ValueError: The networks are not canonical or have different architectures.
        """
        self._require_pair(params_a, params_b)

        def angle(x: Tensor, y: Tensor) -> Tensor:
            # A vector of the point's length whose only nonzero entry is the angle: its squared norm is then the squared
            # distance.
            rest = x.new_zeros(x.shape[-1] - 1).expand(*x.shape[:-1], -1)
            return torch.cat([sphere.distance(x, y).unsqueeze(-1), rest], dim=-1)

        apart = self._on_spheres((params_a, params_b), _difference(params_a, params_b), lambda _, x, y: angle(x, y))
        ignored = {*self.symmetry.buffers, *(name for names in self.symmetry.tied for name in names[1:])}
        lead = leading_axes(self.symmetry, params_a)
        squares = [
            tensor.double().square().reshape(*tensor.shape[:lead], -1).sum(-1)
            for name, tensor in apart.items()
            if tensor.is_floating_point() and name not in ignored
        ]
        return torch.stack(squares).sum(0).sqrt()

    def exp(self, params: Mapping[str, Tensor], velocity: Mapping[str, Tensor]) -> Params:
        """Return the point that the geodesic with an initial velocity reaches after unit time from a canonical network.

        Raises:
            ValueError: The network is not canonical, or the velocity has another architecture.
        """
        require_same_shapes(params, velocity)
        self._require_canonical(params)
        straight = {n: x + velocity[n] if x.is_floating_point() else x for n, x in params.items()}
        return self._on_spheres((params,), straight, lambda s, x: sphere.exp(x, self._vectors(s, velocity)))

    def log(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> Params:
        """Return the initial velocity of the geodesic that reaches the second network from the first after unit time.

        Raises:
            ValueError: The networks are not canonical or have different architectures, or two units are antipodal and
                have no unique shortest geodesic.
        """
        self._require_pair(params_a, params_b)
        self._require_near(params_a, params_b)
        straight = _difference(params_a, params_b)
        return self._on_spheres((params_a, params_b), straight, lambda _, x, y: sphere.log(x, y))

    def geodesic(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float) -> Params:
        """Return the network at fraction t of the geodesic, exactly the first network at t = 0 and the second at t = 1.

        Raises:
            ValueError: The velocity of the geodesic cannot be computed; see `log`.
        """
        self._require_pair(params_a, params_b)
        self._require_near(params_a, params_b)
        straight = {n: (1 - t) * x + t * params_b[n] if x.is_floating_point() else x for n, x in params_a.items()}
        return self._on_spheres((params_a, params_b), straight, lambda _, x, y: sphere.geodesic(x, y, t))

    def mean(self, networks: Sequence[Mapping[str, Tensor]], *, weights: Sequence[float] | None = None) -> Params:
        """Return the Karcher mean of canonical networks. The mean of two networks lies on the geodesic between them.

        Args:
            networks: One or more networks. On each sphere, all networks should lie within a half sphere, because
                otherwise the mean may not be unique.
            weights: One nonnegative weight for each network. Default: equal weights.

        Raises:
            ValueError: There are no networks, or the networks are not canonical or have different architectures. The
                number of weights is wrong, or the points on a sphere cancel.
        """
        if not networks:
            raise ValueError("there are no networks; a mean needs at least one")
        given = [1.0] * len(networks) if weights is None else [float(w) for w in weights]
        if len(given) != len(networks) or min(given) < 0 or sum(given) <= 0:
            raise ValueError(
                f"the weights {given} do not fit {len(networks)} networks; give one for each, none negative and not "
                "all zero"
            )
        for params in networks:
            require_same_shapes(networks[0], params)
            self._require_canonical(params)
        shares = [w / sum(given) for w in given]
        straight = dict(networks[0])
        for name, tensor in networks[0].items():
            if tensor.is_floating_point():
                straight[name] = torch.stack([w * p[name] for w, p in zip(shares, networks, strict=True)]).sum(0)
        weighted = torch.tensor(shares, dtype=torch.float64)
        return self._on_spheres(
            networks, straight, lambda _, *points: sphere.mean(torch.stack(points, dim=-2), weighted)
        )

    def _on_spheres(
        self, networks: Sequence[Mapping[str, Tensor]], straight: Params, function: Callable[..., Tensor]
    ) -> Params:
        """Return a network with Euclidean entries from `straight` and with spherical entries computed by a function.

        The function computes the entries of units that lie on their spheres in all networks.
        """
        result = dict(straight)
        for spheres in self.spheres:
            points = [self._vectors(spheres, params) for params in networks]
            # A unit without weights has norm zero and no point on the sphere. The function gets another point instead,
            # which prevents NaN in the gradient, and the Euclidean result is used.
            blank = torch.zeros_like(points[0])
            blank[..., 0] = 1
            is_on = torch.stack([_norms(x) > 0.5 for x in points]).all(0).unsqueeze(-1)
            moved = function(spheres, *(torch.where(is_on, x, blank) for x in points))
            moved = torch.where(is_on, moved, self._vectors(spheres, result))
            start = 0
            for name, index in spheres.pieces:
                part = moved[..., start : start + index.shape[-1]]
                result[name] = scatter(result[name], index, part.to(result[name]), len(self.symmetry.shapes[name]))
                start += index.shape[-1]
        for names in self.symmetry.tied:
            result |= {name: result[names[0]] for name in names[1:] if names[0] in result and name in result}
        return result

    def _vectors(self, spheres: Spheres, params: Mapping[str, Tensor]) -> Float[Tensor, "*lead units dim"]:
        """Return the points or tangent vectors of all units, as vectors."""
        pieces = [gather(params[name], index, len(self.symmetry.shapes[name])) for name, index in spheres.pieces]
        return torch.cat(pieces, dim=-1)

    def _require_pair(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> None:
        require_same_shapes(params_a, params_b)
        self._require_canonical(params_a)
        self._require_canonical(params_b)

    def _require_canonical(self, params: Mapping[str, Tensor]) -> None:
        self.symmetry.bind(params)
        for spheres in self.spheres:
            norms = _norms(self._vectors(spheres, params))
            tolerance = max(32 * torch.finfo(norms.dtype).eps, 1e-6)
            bad = int(((norms - 1).abs() > tolerance).logical_and(norms != 0).sum())
            if bad:
                raise ValueError(
                    f"{bad} of {norms.numel()} units of {spheres.label} do not have norm one, so the network is not "
                    "canonical; bring it there with `regauge.canonicalize` (and a head with "
                    "`regauge.canonical.normalize_logits`)"
                )

    def _require_near(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> None:
        for spheres in self.spheres:
            x, y = self._vectors(spheres, params_a), self._vectors(spheres, params_b)
            bad = int((sphere.is_antipodal(x, y) & (_norms(x) > 0.5)).sum())
            if bad:
                raise ValueError(
                    f"{bad} units of {spheres.label} are at opposite points of their spheres, so the shortest path is "
                    "not unique; align the networks first (`regauge.canonicalize` with a reference)"
                )


@check_arguments
def canonical_manifold(symmetry: Symmetry, *, head: str | None = None) -> Manifold:
    """Return the manifold of an architecture's canonical networks, derived from the symmetry.

    Args:
        symmetry: The symmetry. All sizes of its groups must be known: it was discovered, or bound to parameters.
        head: The name of the last layer's weight, if `normalize_logits` gave it norm one. A weight of norm one lies on
            one sphere.

    Raises:
        KeyError: The symmetry has no parameter with the name `head`.
        ValueError: Another sphere already contains entries of the weight `head`.
    """
    steps = plan(symmetry)
    spheres = [
        Spheres(tuple((p.name, unit_index(symmetry, p.name, p.site)) for p in step.places))
        for step in steps.steps
        if isinstance(step, ScaleStep)
    ]
    if head is not None:
        if head not in symmetry.shapes:
            raise KeyError(
                f"there is no parameter {head!r} for a head; the symmetry knows {list(symmetry.shapes)[-5:]}"
            )
        if any(name == head for known in spheres for name, _ in known.pieces):
            raise ValueError(
                f"the units of {head!r} already lie on spheres, so it cannot be the head; name the weight of the last "
                "layer"
            )
        whole = torch.arange(torch.Size(symmetry.shapes[head]).numel()).unsqueeze(0)
        spheres.append(Spheres(((head, whole),)))
    # Canonical forms are computed from representatives, whose streams are rotated.
    behind = plan(symmetry.on_representatives(rotate=True)) if symmetry.rotatable else steps
    return Manifold(symmetry, tuple(spheres), behind.left)


def _difference(params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> Params:
    return {n: params_b[n] - x if x.is_floating_point() else x for n, x in params_a.items()}


def _norms(x: Float[Tensor, "*lead dim"]) -> Float[Tensor, "*lead"]:
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms
