"""Dependencies between the families of an ascent, which follow from the symmetry alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regauge.alignment.engine.joint_signs import SignPair, find_sign_pairs
from regauge.core.act import Site
from regauge.core.families import Family, coupled_tensors


@dataclass(frozen=True)
class Neighborhoods:
    """Families of groups and the dependencies between them.

    Attributes:
        families: The families whose elements are chosen.
        coupled: Whether each acts on two axes of one tensor.
        neighbors: The families whose best value depends on each of them.
        sign_pairs: Families whose signs are chosen together at the end.
        others: For the tensors of each family where other families act on them, by the number of the other one.
        near: The numbers of the families that act on its tensors.
    """

    families: tuple[Family, ...]
    coupled: tuple[bool, ...]
    neighbors: tuple[tuple[int, ...], ...]
    sign_pairs: tuple[SignPair, ...]
    others: tuple[Mapping[str, Mapping[int, Sequence[Site]]], ...]
    near: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, families: Sequence[Family]) -> "Neighborhoods":
        """Find the dependencies of families, whose sites ignore the leading axis of the tensors."""
        coupled = tuple(bool(coupled_tensors(family)) for family in families)
        neighbors = tuple(
            tuple(
                k
                for k, other in enumerate(families)
                if (coupled[k] if other is one else bool(other.sites.keys() & one.sites.keys()))
            )
            for one in families
        )
        others = tuple(_other_sites(families, k) for k in range(len(families)))
        near = tuple(frozenset(number for local in own.values() for number in local) for own in others)
        return cls(tuple(families), coupled, neighbors, tuple(find_sign_pairs(families)), others, near)


def _other_sites(families: Sequence[Family], k: int) -> dict[str, dict[int, list[Site]]]:
    """The sites of other families on the tensors of family k, by tensor and number of the family."""
    own = {group.name for group in (*families[k].members, *families[k].fixed)}
    result: dict[str, dict[int, list[Site]]] = {}
    for number, other in enumerate(families):
        if number == k:
            continue
        skipped = own | {group.name for group in other.fixed}
        for name in other.sites.keys() & families[k].sites.keys():
            sites = [site for site in other.sites[name] if site.group.name not in skipped]
            if sites:
                result.setdefault(name, {})[number] = sites
    return result
