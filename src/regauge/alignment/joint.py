"""Several dictionaries of tensors, viewed as one dictionary with one symmetry.

One group element acts on all dictionaries of a network.

The role of a dictionary defines how an element acts on it. The joined dictionary (a view) has one name for each tensor
of each dictionary, and its symmetry has the placements of all dictionaries. Therefore any method that compares
parameters can match several dictionaries at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from regauge.core.behind_gains import Added
from regauge.core.element import Element
from regauge.core.given import as_params
from regauge.core.groups import Placement
from regauge.core.params import Params, label, require_finite, require_same_shapes
from regauge.core.symmetry import Symmetry

Role = Literal["parameters", "magnitudes"]
"""The role of a dictionary: parameters, or magnitudes without signs such as standard deviations."""
Dictionaries = tuple[Mapping[str, Tensor], ...]


@dataclass(frozen=True)
class JointView:
    """A view in which the dictionaries of every network are joined to one dictionary of tensors.

    If there are roles, each network was given as a tuple of dictionaries.

    Attributes:
        roles: The role of each dictionary, which determines how elements act on it. `roles` is empty if networks are
            single dictionaries.
        whole: The symmetry of the first dictionary of each network. All sizes of its groups are known.
        symmetry: The symmetry that acts on joined dictionaries. If a dictionary contains magnitudes, orthogonal and
            linear groups are excluded, because a rotated diagonal Gaussian is not diagonal.
    """

    roles: tuple[Role, ...]
    whole: Symmetry
    symmetry: Symmetry

    @classmethod
    def of(cls, roles: tuple[Role, ...], symmetry: Symmetry, networks: Sequence[Dictionaries]) -> "JointView":
        """Return the view of networks, after checking that their dictionaries belong together."""
        if not roles:
            return cls((), symmetry, symmetry)
        for k, network in enumerate(networks):
            _require_entries(networks[0], network, k)
        is_fixed = "magnitudes" in roles
        placements: dict[str, list[Placement]] = {
            group.name: [] for group in symmetry.groups if not (is_fixed and group.matrix != "none")
        }
        shapes: dict[str, tuple[int, ...]] = {}
        buffers: list[str] = []
        added: dict[str, Added] = {}
        for k, (role, params) in enumerate(zip(roles, networks[0], strict=True)):
            view = role_symmetry(symmetry, role, params)
            buffers.extend(joint_name(k, name) for name in view.buffers)
            added |= {joint_name(k, name): number for name, number in view.added.items()}
            for group in view.groups:
                shapes.update({joint_name(k, p.parameter): view.shapes[p.parameter] for p in group.placements})
                if group.name in placements:
                    renamed = (replace(p, parameter=joint_name(k, p.parameter)) for p in group.placements)
                    placements[group.name].extend(renamed)
        free = (group for group in symmetry.groups if group.name in placements)
        groups = tuple(replace(group, placements=tuple(placements[group.name])) for group in free)
        return cls(roles, symmetry, Symmetry(groups, shapes, buffers=tuple(buffers), added=added))

    def join(self, network: Dictionaries) -> Params:
        """Return the dictionaries of one network, joined to one dictionary."""
        if not self.roles:
            return dict(network[0])
        return {joint_name(k, name): tensor for k, params in enumerate(network) for name, tensor in params.items()}

    def split(self, params: Params, like: Any) -> Any:
        """Return the separate dictionaries of a joined network, as a tuple of the same type as the tuple `like`."""
        if not self.roles:
            return params
        parts = [{name: params[joint_name(k, name)] for name in one} for k, one in enumerate(like)]
        return like._make(parts) if hasattr(like, "_make") else tuple(parts)

    def element(self, element: Element) -> Element:
        """Return an element for joined dictionaries as an element of the whole symmetry.

        Missing groups get the identity.
        """
        if len(self.symmetry.groups) == len(self.whole.groups):
            return element
        rest = self.whole.identity(element.batch)
        values = {g.name: (element if g.name in element else rest)[g.name] for g in self.whole.groups}
        return Element(values, element.batch)


def require_dictionaries(method: object, roles: Sequence[Role], network: object, what: str) -> Dictionaries:
    """Return a network in the form that a method takes: a tuple of dictionaries, or a single dictionary if there are no
    roles.

    Raises:
        TypeError: The network is not of the type that the method takes.
    """
    name, given = type(method).__name__, type(network).__name__
    if not roles:
        if not isinstance(network, tuple):
            return (as_params(network, what),)
        raise TypeError(
            f"{name} aligns single dictionaries of parameters, not a {given}; for means and standard deviations use "
            "`regauge.GaussianMatching()`, for other tuples of dictionaries `regauge.alignment.JointMatching(roles)`"
        )
    if isinstance(network, tuple) and len(network) == len(roles):
        return tuple(as_params(one, f"entry {k} of {what}") for k, one in enumerate(network))
    given = f"a tuple of {len(network)}" if isinstance(network, tuple) else f"a {given}"
    raise TypeError(
        f"{name} aligns tuples of {len(roles)} dictionaries ({', '.join(roles)}), not {given}; give all networks as "
        "such tuples"
    )


def role_symmetry(symmetry: Symmetry, role: Role, params: Mapping[str, Tensor]) -> Symmetry:
    """Return the symmetry as it acts on a dictionary with the given role, which may lack some names.

    Elements of the whole symmetry can be applied with the returned symmetry. Parts of an element that the returned
    symmetry lacks do not change the dictionary.
    """
    groups = symmetry.groups
    if role == "magnitudes":
        symmetry = symmetry.on_changes
        groups = tuple(g.without("sign", "parity", "shift") for g in symmetry.groups if g.matrix == "none")
    present = tuple(
        replace(group, placements=tuple(p for p in group.placements if p.parameter in params)) for group in groups
    )
    return replace(symmetry, groups=present, buffers=tuple(n for n in symmetry.buffers if n in params), tied=())


def joint_name(k: int, name: str) -> str:
    """Return the name that a tensor of the k-th dictionary has in the joined dictionary."""
    return f"{k}/{name}"


def dictionary_of(name: str) -> tuple[int, str]:
    """Return the index of the dictionary to which a joined name belongs, and the tensor's name in this dictionary."""
    k, _, rest = name.partition("/")
    return int(k), rest


def _require_entries(first: Dictionaries, network: Dictionaries, number: int) -> None:
    """Raise an error if a network's later dictionaries do not fit its first dictionary, or contain NaN or Inf."""
    for k in range(1, len(network)):
        require_same_shapes(first[k], network[k])
        require_finite(network[k], f"entry {k} of the stack of {label(number)}")
        for name, tensor in network[k].items():
            if name not in network[0] or tensor.shape != network[0][name].shape:
                known = f"shape {tuple(network[0][name].shape)}" if name in network[0] else "no tensor of this name"
                raise ValueError(
                    f"{name!r} has shape {tuple(tensor.shape)} in entry {k} of the stacks, but entry 0 has {known}; "
                    "all dictionaries of a stack belong to one architecture"
                )
