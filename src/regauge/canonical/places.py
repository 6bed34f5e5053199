"""The axes of compared parameters on which groups act, each with the other groups that act on the same entries."""

from dataclasses import dataclass, field

from regauge.core.act import Site
from regauge.core.groups import Group
from regauge.core.symmetry import Symmetry


@dataclass(frozen=True, eq=False)
class GroupSite:
    """A site: a parameter and one of its axes on which a group acts.

    The field `others` contains the action of each further group on the same entries.
    """

    name: str
    site: Site
    is_weight: bool
    others: list["GroupSite"] = field(default_factory=list, repr=False)

    @property
    def group(self) -> Group:
        return self.site.group

    @property
    def scale(self) -> tuple[int, ...]:
        return self.site.placement.scale

    @property
    def signs(self) -> tuple[int, ...]:
        """The sign exponents, modulo two.

        A rotation that is fixed up to the signs of its axes has one sign for each unit.
        """
        return tuple(e % 2 for e in self.site.placement.sign) if self.group.matrix == "none" else (1,)


Places = tuple[GroupSite, ...]


def places_of(symmetry: Symmetry) -> dict[str, list[GroupSite]]:
    """Return where each group acts on compared parameters.

    Buffers are left out, and a tied tensor appears under one name.
    """
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    result: dict[str, list[GroupSite]] = {group.name: [] for group in symmetry.groups}
    for name, sites in symmetry.sites.items():
        here = [
            GroupSite(name, site, is_weight=len(symmetry.shapes[name]) > 1) for site in sites if name not in ignored
        ]
        for place in here:
            place.others.extend(other for other in here if other is not place and _overlap(place.site, other.site))
            result[place.group.name].append(place)
    return result


def _overlap(one: Site, other: Site) -> bool:
    """Return whether two groups act on common entries of one parameter."""
    if one.placement.axis != other.placement.axis:
        return True
    return not set(one.positions.tolist()).isdisjoint(other.positions.tolist())


def comes_in(place: GroupSite) -> bool:
    """Return whether a scale multiplies (rather than divides) the entries at a site, an axis on which a group acts."""
    return any(exponent > 0 for exponent in place.scale)
