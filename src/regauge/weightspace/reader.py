"""A reader of the networks of one architecture, which also transforms changes back from canonical networks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.core import chart
from regauge.core.element import TRANSLATION, Element
from regauge.core.params import Params, count_models
from regauge.core.symmetry import Symmetry
from regauge.core.unit_gains import unit_element
from regauge.weightspace.canonical_frame import CanonicalFrame
from regauge.weightspace.layers.plan import Layer
from regauge.weightspace.layout.characters import has_scale
from regauge.weightspace.layout.compile import Layout, compile_layout
from regauge.weightspace.probes.probed import Probed
from regauge.weightspace.shares import divide, find_shares


@dataclass(frozen=True, eq=False)
class Reader:
    """The part of a net that reads networks of one architecture. The field `number` is the index of the reader's
    parameters in the net.

    If the net has probes, `probed` evaluates the networks on the probes. If `is_translated`, the reader first removes
    translations and gains (`Symmetry.split`). If a `LinearReader` reads statistics, `plain` is a second reader, which
    canonicalizes everything except permutations.
    """

    layout: Layout
    frame: CanonicalFrame
    number: int
    probed: Probed | None = None
    is_translated: bool = False
    plain: "Reader | None" = None

    @classmethod
    def of(
        cls,
        symmetry: Symmetry,
        number: int,
        layer: Layer,
        depth: int,
        wanted: tuple[str, ...],
        left: tuple[str, ...],
        *,
        contracted: tuple[str, ...] | None,
        readers: Collection[tuple[str, int]],
    ) -> "Reader":
        """Return the reader of networks for the given layers.

        Args:
            symmetry: The symmetry of the networks.
            number: The index of the parameters for this architecture.
            layer: The settings of the layers.
            depth: The number of layers.
            wanted: The parts of the symmetry that the net should respect.
            left: The parts that layers respect without a canonical form, if possible.
            contracted: The groups of matrices that products replace; see `compile_layout`.
            readers: The axes along which layers sum over units; see `compile_layout`.
        """

        def compiled() -> Layout:
            return compile_layout(
                symmetry,
                contracted=contracted,
                is_signed="sign" in left,
                is_scaled="scale" in left,
                has_shifts={"sign", "shift"} <= {*left},
                readers=readers,
            )

        layout = compiled()
        if not _has_products(layer, layout, depth):
            left = tuple(part for part in left if part != "scale")
            layout = compiled()
        if layout.waves is None:
            left = tuple(part for part in left if part != "shift")
        fixed = tuple(part for part in wanted if part not in ("permutation", TRANSLATION, *left))
        is_translated = TRANSLATION in wanted and bool(symmetry.translations)
        return cls(layout, CanonicalFrame.of(layout, fixed, left), number, is_translated=is_translated)

    def fits(self, population: Mapping[str, Tensor], symmetry: Symmetry | None = None) -> bool:
        """Return whether a population has the tensors of the reader's architecture. A given symmetry must also equal
        the symmetry of this architecture.
        """
        shapes = self.layout.symmetry.shapes
        if symmetry is not None and symmetry.groups != self.layout.symmetry.groups:
            return False
        return all(
            name in population and tuple(population[name].shape[1:]) == tuple(shapes[name])
            for name in self.layout.parameters
        )

    def read(self, canonical: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the values of blocks, and the weights of the units in means (shares)."""
        values = self.layout.read(self.layout.symmetry.sums(canonical))
        if not self.layout.is_weighed:
            return values, {}
        shares = find_shares(values, self.layout)
        return divide(values, self.layout, shares), shares

    def canonicalize(self, population: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Element | None]:
        """Return the networks in canonical form, and the element that maps the networks (after translations are
        removed) to this form, or None for the identity.

        Masks and integer structure tensors become floating-point tensors in canonical networks.
        """
        population = self._represent(population)
        whole = [n for n in self.layout.parameters if not population[n].is_floating_point()]
        if whole:
            dtype = next((t.dtype for t in population.values() if t.is_floating_point()), torch.float32)
            population = {**population, **{name: population[name].to(dtype) for name in whole}}
        element = self.frame(population)
        return (population, None) if element is None else (self.layout.symmetry.act(element, population), element)

    def complete(
        self, population: Mapping[str, Tensor], changes: Params, element: Element | None, count: int
    ) -> Params:
        """Return the changes of the original networks, with zeros for tensors that do not change.

        Changed representatives (networks without translations) are normalized again, and joined with the coordinates of
        the original networks. If a network is translated, its change is therefore translated in the same way.
        """
        full = self._undo(population, changes, element, count)
        if not self.is_translated:
            return full
        symmetry = self.layout.symmetry
        rows = torch.arange(len(population[self.layout.parameters[0]])).repeat_interleave(count)
        before = {name: tensor[rows] for name, tensor in population.items()}
        flat = {name: tensor if count == 1 else tensor.flatten(0, 1) for name, tensor in full.items()}
        representative, coordinates = chart.split(symmetry, before, 1)
        changed = {name: t + flat[name] if name in flat else t for name, t in representative.items()}
        after = chart.join(symmetry, chart.split(symmetry, changed, 1)[0], coordinates, 1)
        moved = chart.charted(symmetry) & flat.keys()
        flat |= {name: (after[name] - before[name]).to(flat[name]) for name in moved}
        return flat if count == 1 else {name: t.reshape(-1, count, *t.shape[1:]) for name, t in flat.items()}

    def from_given(self, population: Mapping[str, Tensor], element: Element | None) -> Element | None:
        """Return the linear part of the element that maps the networks in `population` to their canonical forms."""
        symmetry = self.layout.symmetry
        if not (self.is_translated and chart.chart_gains(symmetry)):
            return element
        given = symmetry.sums({name: tensor.detach() for name, tensor in population.items()})
        unit = unit_element(symmetry, given, symmetry.gains, 1)
        return unit if element is None else symmetry.compose(element, unit)

    def _represent(self, population: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return networks without translations and gains (representatives), in the dtypes of the given networks, if
        translations are respected.
        """
        if not self.is_translated:
            return population
        found = self.layout.symmetry.split(population)[0]
        return {name: tensor.to(population[name].dtype) for name, tensor in found.items()}

    def _undo(self, population: Mapping[str, Tensor], changes: Params, element: Element | None, count: int) -> Params:
        """Return the changes of networks without translations and gains, with zeros for tensors that do not change."""
        full = {}
        for name, tensor in population.items():
            if name in changes:
                full[name] = changes[name].to(tensor.dtype)
            elif tensor.is_floating_point() or name in self.layout.symmetry.sites:
                full[name] = tensor.new_zeros(tensor.shape if count == 1 else (len(tensor), count, *tensor.shape[1:]))
        for names in self.layout.symmetry.tied:
            known = next((full[name] for name in names if name in changes), None)
            full.update({name: known for name in names if name in population and known is not None})
        if element is None:
            return full
        if count == 1:
            return self.frame.undo(element, full)
        rows = torch.arange(element.batch[0]).repeat_interleave(count)
        undone = self.frame.undo(element.rows(rows), {name: tensor.flatten(0, 1) for name, tensor in full.items()})
        return {name: tensor.reshape(-1, count, *tensor.shape[1:]) for name, tensor in undone.items()}


def require_values(population: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise a ValueError unless all tensors to read are numeric and have the same number of networks."""
    count_models({name: population[name] for name in layout.parameters})
    weights = (name for name in layout.parameters if name not in layout.symmetry.structure)
    wrong = [name for name in weights if not population[name].is_floating_point()]
    if wrong:
        raise ValueError(
            f"{wrong[0]!r} is {population[wrong[0]].dtype}, but weights are read as floating-point values; convert "
            "quantized networks back first"
        )


def tell_difference(population: Mapping[str, Tensor], layout: Layout) -> str:
    """Return an error message that states how networks differ from the first layout of a net, with advice."""
    shapes = layout.symmetry.shapes
    missing = [name for name in layout.parameters if name not in population]
    if missing:
        return (
            f"the networks lack {missing[0]!r} ({len(missing)} tensors in all), which this net reads; they have "
            f"{list(population)[:5]}, ...; give networks of the architecture that it was made for"
        )
    wrong = next((n for n in layout.parameters if tuple(population[n].shape[1:]) != tuple(shapes[n])), None)
    if wrong is None:
        return (
            "these networks have the same tensors as the net's networks, but another symmetry, because the functions "
            "between layers differ; make a net for both symmetries and train it on both"
        )
    return (
        f"{wrong!r} has shape {tuple(population[wrong].shape)}, but this net reads populations in which it has one "
        f"model axis and then {tuple(shapes[wrong])}; stack the networks, or call `net.adapt(symmetry)` if they "
        "differ only in their numbers of units"
    )


def _has_products(layer: Layer, layout: Layout, depth: int) -> bool:
    """Return whether layers can respect scales without a canonical form, because messages read all values that scales
    change.

    If a head changes parameters on which both matrices and scales act, the result is False, because scales would not
    cancel in the products from which the head computes the changes.
    """
    scaled = {name for name, character in layout.signs.items() if has_scale(character)}
    found = [one.multiplied for k in range(depth if scaled else 0) if (one := layer.reaches(layout, k)) is not None]
    seen = frozenset[str]().union(*found)
    return not any(w.matrices and has_scale(layout.character(w.block)) for w in layout.writer.written) and not any(
        block.name in scaled - seen for block in layout.pair_blocks
    )


def multiplied_blocks(layer: Layer, layout: Layout, depth: int) -> frozenset[str]:
    """Return the blocks of weights by which a layer multiplies features, if signs act on these weights."""
    found = [] if layer.traits.keeps_pairs else [layer.reaches(layout, k) for k in range(depth)]
    return frozenset(name for one in found if one is not None for name in one.multiplied)
