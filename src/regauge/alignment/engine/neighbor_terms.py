"""Updates of the cost of a group on one tensor after another group, which also acts on this tensor, has changed."""

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from regauge.alignment.engine.paired_networks import IN_PLACE, PairedNetworks, at, put, unit_factors
from regauge.core.act import Site, take
from regauge.core.closest import character
from regauge.core.families import inner_products, unfold

SHARES = (1 / 16, 1 / 4, 1.0)
"""Bounds that sort pairs of networks by the fraction of units that changed. Pairs between the same two bounds are
corrected together."""


class NeighborTerm:
    """The term `sum_u <a[u, i], (h b)[u, j]>` of one group's cost, where h of another group acts on the index u.

    The method `update` corrects the cost after a change of h: only products with units u that moved or flipped since
    the last update are replaced. The group to which the cost belongs acts on the axis `own` of the tensor, and the
    other group on the axis `neighbor`.

    Elements are stored on the CPU, where the changed units are determined. Therefore the code never waits for the
    device on which the tensors lie.
    """

    def __init__(self, networks: PairedNetworks, name: str, own: Site, neighbor: Site) -> None:
        self._networks, self._name, self._own, self._neighbor = networks, name, own, neighbor
        self._is_signed = any(character(neighbor.placement))
        units = torch.arange(neighbor.group.size).expand(networks.pairs, -1)
        self._perm: Int[Tensor, "pair unit"] = units.clone()
        self._factor: Int8[Tensor, "pair unit"] = torch.zeros_like(units, dtype=torch.int8)  # Nothing is added yet.
        self._b = self._by_unit(networks.b[name])
        self._seen = -1
        self.aim()

    @staticmethod
    def fits(networks: PairedNetworks, name: str, own: Site, neighbor: Site) -> bool:
        """Return whether a `NeighborTerm` can be used. The neighboring group must only permute units and flip signs,
        along a whole axis on which the group of the cost does not act.
        """
        a, b = networks.a[name], networks.b[name]
        is_whole = neighbor.positions.numel() == a.shape[1 + neighbor.placement.axis]
        is_more = any(neighbor.placement.shift) or any(own.placement.shift) or neighbor.group.matrix != "none"
        is_apart = own.placement.axis != neighbor.placement.axis and a.dtype == b.dtype
        return is_apart and is_whole and not is_more and not neighbor.bases and not own.bases

    @property
    def group(self) -> str:
        """The name of the neighboring group."""
        return self._neighbor.group.name

    def aim(self) -> None:
        """Use new first networks. After a call of `aim`, the next update adds the whole term again."""
        self._a = self._by_unit(self._networks.a[self._name])
        self._factor.zero_()
        self._seen = -1

    def update(self, sums: Float[Tensor, "pair target source"], rows: Tensor) -> None:
        """Update the cost `sums` of the pairs `rows` to the current value of the neighboring group."""
        writes = self._networks.writes[self.group]
        if writes == self._seen:
            return
        self._seen = writes if len(rows) == self._networks.pairs else -1
        value = self._networks.value(self.group, rows)
        perm = at(self._perm, rows) if value.perm is None else value.perm
        factor = unit_factors(self._neighbor, value, rows.shape[0])
        if len(sums) == 1 and self._own.group.matrix == "none" and not bool(self._factor.any()):
            self._add_whole(sums)
        else:
            self._add_changes(sums, rows, perm, factor)
        put(self._perm, rows, perm)
        put(self._factor, rows, factor)

    def _add_changes(self, sums: Tensor, rows: Tensor, perm: Tensor, factor: Tensor) -> None:
        """Correct the cost of every pair of networks. The time is proportional to the number of changed units."""
        changed = (perm != at(self._perm, rows)) | (factor != at(self._factor, rows))
        if len(sums) == 1:
            units = changed[0].nonzero().T
            if units.numel():
                self._correct(sums, rows, None if units.numel() > IN_PLACE * changed.numel() else units, perm, factor)
            return
        counts, n = changed.sum(1), changed.shape[1]
        above = torch.zeros_like(counts)
        for share in SHARES:
            width = max(1, round(share * n))
            here = ((counts > above) & (counts <= width)).nonzero().flatten()
            above = torch.full_like(above, width)
            if len(here):
                # Unchanged units pad the selection to the width: their difference is zero.
                most = None if width == n else changed[here].byte().topk(width, dim=1, sorted=False).indices
                self._correct(sums, rows[here], most, perm[here], factor[here])

    def _add_whole(self, sums: Float[Tensor, "pair target source"]) -> None:
        """For a single pair of networks, compute the whole term from the current tensor of the second network, and add
        it.
        """
        group, b = self._own.group, self._networks.moved([self._name])[self._name]
        product = inner_products(group, unfold(self._a, self._own, 1), unfold(b, self._own, 1))
        if self._networks.writes[group.name]:
            value = self._networks.value(group.name)
            if any(character(self._own.placement)):
                product *= unit_factors(self._own, value, 1).to(product).unsqueeze(1 if group.is_permuted else 2)
            if value.perm is not None:
                product = take(product, 2, value.perm[0].argsort().to(b.device))
        sums += product

    def _correct(
        self,
        sums: Tensor,
        rows: Tensor,
        units: Int[Tensor, "row unit"] | None,
        perm: Int[Tensor, "row all_units"],
        factor: Int8[Tensor, "row all_units"],
    ) -> None:
        """Add to the stored sums the change of the products with the given units of the neighboring group."""
        before = at(self._factor, rows)
        new = self._take(self._b, rows, perm, units, factor if self._is_signed else None)
        if bool(before.any()):
            is_plain = not self._is_signed and bool(before.all())
            new -= self._take(self._b, rows, at(self._perm, rows), units, None if is_plain else before)
        left = self._take(self._a, rows, None, units, None)
        change = inner_products(self._own.group, self._unfold(left), self._unfold(new))
        if len(rows) == len(sums):
            sums += change
        else:
            sums.index_add_(0, _send(rows, sums), change.to(sums.dtype))

    def _by_unit(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor `[pair, unit of the neighbor, rest, unit of the group]` for several pairs.

        The tensor of a single pair may be large and is not copied.
        """
        if len(tensor) == 1:
            return tensor
        n, m = self._neighbor.group.size, self._own.group.size
        ordered = _in_order(_in_order(tensor, self._own), self._neighbor)
        ordered = ordered.movedim((1 + self._neighbor.placement.axis, 1 + self._own.placement.axis), (1, -1))
        ordered = ordered.reshape(len(tensor), n, -1, m, ordered.shape[-1] // m).movedim(3, 4)
        return ordered.reshape(len(tensor), n, -1, m).contiguous()

    def _take(
        self, tensor: Tensor, rows: Tensor, perm: Tensor | None, units: Tensor | None, factor: Tensor | None
    ) -> Tensor:
        """Return `factor * tensor[rows, perm]` at some of the neighbor's units.

        If units are permuted, the result is a copy.
        """
        if units is not None:
            perm = units if perm is None else perm.gather(1, units)
            factor = None if factor is None else factor.gather(1, units)
        if len(self._perm) == 1:
            return self._take_single(tensor, perm, factor)
        if perm is None:
            taken = tensor if len(rows) == len(tensor) else tensor[_send(rows, tensor)]
        else:
            flat = _send((rows.unsqueeze(1) * tensor.shape[1] + perm).flatten(), tensor)
            taken = tensor.flatten(0, 1).index_select(0, flat).reshape(*perm.shape, *tensor.shape[2:])
        if factor is not None:
            taken = taken * _send(factor, taken).to(taken.dtype)[..., None, None]
        return taken

    def _unfold(self, taken: Tensor) -> Float[Tensor, "row target rest"]:
        """Return the selected entries of a tensor, with one row for each unit of the group."""
        return unfold(taken, self._own, 1) if len(self._perm) == 1 else taken.flatten(1, 2).mT

    def _take_single(self, tensor: Tensor, perm: Tensor | None, factor: Tensor | None) -> Tensor:
        site, axis = self._neighbor, 1 + self._neighbor.placement.axis
        copies = site.positions.numel() // site.group.size
        if perm is None:
            tensor = _in_order(tensor, site)
        else:
            index = perm[0] if site.is_plain else site.positions.reshape(-1, copies)[perm[0]].flatten()
            tensor = take(tensor, axis, _send(index, tensor))
        if factor is None:
            return tensor
        shape = [-1 if k == axis else 1 for k in range(tensor.ndim)]
        return tensor * _send(factor[0].repeat_interleave(copies), tensor).to(tensor.dtype).reshape(shape)


def _in_order(tensor: Tensor, site: Site) -> Tensor:
    """Return the entries of a tensor `[pair, ...]` on which a group acts, in the order of the units."""
    axis = 1 + site.placement.axis
    if site.is_sorted and site.positions.numel() == tensor.shape[axis]:
        return tensor
    return take(tensor, axis, _send(site.positions, tensor))


def _send(index: Tensor, there: Tensor) -> Tensor:
    """Copy a small tensor to the device of another tensor without waiting for the device."""
    return index.to(there.device, non_blocking=True)
