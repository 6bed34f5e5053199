"""Comparison of large networks by a sample of their entries, if the sample is certain to give the same verdict."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from regauge.alignment import align
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.problem import bind_networks
from regauge.alignment.streamed.memory import BASE, SLACK
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.representative_checkpoint import RepresentativeCheckpoint
from regauge.comparison.common import Common
from regauge.comparison.comparison import Comparison
from regauge.comparison.matched import Matched, weigh
from regauge.comparison.origins import Origins
from regauge.comparison.pair import Pair, measure_shares
from regauge.comparison.sample import Indices, Read, Sample, layer_of, select
from regauge.comparison.strangers import explain, scramble
from regauge.comparison.verdicts import RELATED, STRANGE, beyond_chance, by_chance
from regauge.core.interpolation import mean_share
from regauge.core.params import VALUES, Params, work_dtype
from regauge.core.symmetry import Symmetry

LARGE = 1 << 26
"""Networks with at least this number of entries are first compared by a sample."""
MOST = 1 << 25
"""The largest number of entries in a sample."""
MARGIN = 0.1
"""A sample decides the verdict only if the share beyond chance is at least this far from each threshold."""
SPREAD = 5.0
"""The assumed largest error of the mean over sampled layers, in standard errors: the 98.5% quantile of Student's t
distribution with 3 degrees of freedom."""
FEW = 4
"""The smallest number of sampled layers from which conclusions about other layers are drawn."""
TELLING = 512
"""For the verdict "unrelated", units of a sample must be matched by at least this number of entries per unit."""
NEAR = 0.95
"""If the explained share is at least this number, all entries are compared, because one network may be a transformed
copy of the other."""
UNMOVED = 0.75
"""If at least this fraction of the distance remains after alignment, the networks are not the same in another gauge."""
ORDERED = 3.0
"""If the z-score for the stored order of units is at least this number, all entries are compared."""
ROTATED = 0.5
"""A residual stream may have been rotated if inner products along axes without a group have a larger correlation than
this between both networks."""
PROBED = 512
"""The number of entries along an axis without a group whose inner products are compared."""
ALIGNED_COPIES, READ_COPIES = 12, 4
"""The numbers of copies of a sample, and of its largest tensor with all units, that are in memory at once."""
PIECE = 1 << 23
"""The number of bytes of a tensor that are read at once."""


def compare_sampled(
    a: Mapping[str, Tensor] | Checkpoint,
    b: Mapping[str, Tensor] | Checkpoint,
    symmetry: Symmetry,
    origins: Origins,
    *,
    draws: int,
    generator: torch.Generator,
    memory: MemoryLimit | None = None,
) -> Comparison | None:
    """Compare two networks by a sample of their tensors.

    Return None if the networks are small, or if the sample does not decide the verdict. From each stack of layers, the
    sample contains some layers. From each large group, the sample contains some units of the first network, and the
    most similar units of the second. The sampled parts are compared as smaller networks, as in `rg.compare`. Two facts
    allow conclusions from the sample to all entries:

    - The objective of an element on sampled units and entries is an unbiased estimate of the objective on all entries.
      The best objective on a sample is therefore, in expectation, at least as large as the best objective on all
      entries. Therefore, for unrelated networks, a sample overestimates both the explained share and the share by
      chance.
    - The mean share over sampled layers differs from the mean over all layers by about its standard error.

    The sample decides "descended" or "unrelated" if the share beyond chance is above or below the thresholds by more
    than its standard error plus a margin. The sample does not decide if the networks may be the same in another gauge,
    or if a residual stream may be rotated. The sample also does not decide if somebody may have chosen the order of
    units, or if units were matched by too few entries.

    Args:
        a: The first network.
        b: The second network. The tensors of both networks have the same shapes.
        symmetry: The symmetry of both networks.
        origins: The origins of both networks, as recorded in their provenance.
        draws: The number of random permutations in the independence test.
        generator: The source of randomness. The generator is copied, so the caller's generator is not changed.
        memory: The memory limit for networks in files. If a sample would exceed the limit, the result is None.
    """
    blank = a.on_meta() if isinstance(a, Checkpoint) else a
    values = sum(math.prod(tensor.shape) for tensor in blank.values())
    if values < LARGE or any(undo is not None for undo in origins.undo):
        return None
    symmetry = symmetry.bind(blank)
    has_empty = any(math.prod(blank[name].shape) == 0 for name in symmetry.sites)
    if has_empty or symmetry.structure or symmetry.moves_statistics:
        return None
    generator = torch.Generator(generator.device).set_state(generator.get_state())
    sample = Sample.of(symmetry, {name: tuple(tensor.shape) for name, tensor in blank.items()}, generator)
    if sample.values > MOST or (memory is not None and _peak(sample, draws) + memory.held() > memory.nbytes):
        return None
    return _Sampled(a, b, symmetry, sample).compare(origins, values, draws, generator)


def _peak(sample: Sample, draws: int) -> int:
    """Return a bound on the memory, in bytes, for aligning a sample and testing the order of its units."""
    largest = max(math.prod(shape) for shape in sample.shapes.values())
    testing = max((group.size * (8 * group.size + 24 * draws) for group in sample.symmetry.groups), default=0)
    aligning = ALIGNED_COPIES * 4 * sample.values
    return int(SLACK * (max(aligning, testing + 8 * sample.values) + READ_COPIES * 4 * largest)) + BASE


class _Sampled:
    """Two networks of which only a sample of the entries is read."""

    def __init__(
        self,
        a: Mapping[str, Tensor] | Checkpoint,
        b: Mapping[str, Tensor] | Checkpoint,
        symmetry: Symmetry,
        sample: Sample,
    ) -> None:
        self._symmetry, self._sample = symmetry, sample
        self._networks = a, b
        self._stored = partial(_read, a), partial(_read, b)
        self._behind: tuple[Read, Read] = self._stored
        if symmetry.translations:
            one, other = (_representative(network, symmetry) for network in (a, b))
            self._behind = partial(_read, one), partial(_read, other)

    def compare(self, origins: Origins, values: int, draws: int, generator: torch.Generator) -> Comparison | None:
        """Return the comparison if the sample decides the verdict, and None otherwise."""
        sample = self._sample
        a, b = (sample.cut(read, sample.units) for read in self._stored)
        narrow = bind_networks((a, b), sample.narrow, "compare single networks, two at a time")
        stored = Pair(a, b, narrow)
        before = mean_share(measure_shares(stored, narrow.identity()), is_after=False)
        is_ordered = before is not None and before > RELATED
        units, least = (sample.units, TELLING) if is_ordered else sample.match(*self._behind)
        is_stored = self._behind is self._stored
        first = self._narrow(a if is_stored else sample.cut(self._behind[0], sample.units), narrow)
        second = self._narrow(b if is_stored and is_ordered else sample.cut(self._behind[1], units), narrow)
        pair = Pair(first, second, narrow.on_representatives())
        result = align(first, second, pair.symmetry, method=WeightMatching())

        def chance() -> float | None:
            stranger = partial(_scrambled, self._behind[1], sample)
            own = sample.units if is_ordered else sample.match(self._behind[0], stranger)[0]
            other = self._narrow(sample.cut(stranger, own), narrow)
            return by_chance(explain([(first, other)], pair.symmetry))

        matched = Matched(
            pair,
            result.element,
            chance,
            tested=_Stored(*self._networks, sample.symmetry, sample, tuple(stored.shapes)),
            stored=stored,
            units={name: (own, units[name]) for name, own in sample.units.items()},
            notes=result.notes,
        )
        common = Common(narrow, sample.shapes, sample.values / values, (self._note,), is_whole=True)
        found = weigh(matched, common, origins, draws=draws, generator=generator)
        return replace(found, is_sampled=True) if self._is_sure(found, least) else None

    @cached_property
    def _note(self) -> str:
        """Return a note that describes the sample."""
        layers, every = self._sample.layers
        most = max((len(own) for own in self._sample.units.values()), default=0)
        return (
            f"a sample was enough: {layers} of {every} layers, and up to {most} units of each group with their "
            "counterparts. All numbers belong to the sample; `exact` compares all values"
        )

    def _narrow(self, params: Params, narrow: Symmetry) -> Params:
        """Return a network with only the sampled units, in one dtype and without translations and gains."""
        wide = functools.reduce(torch.promote_types, {t.dtype for t in params.values() if t.dtype in VALUES})
        params = {name: t.to(work_dtype(wide)) if t.dtype in VALUES else t for name, t in params.items()}
        return narrow.split(params)[0] if narrow.translations or narrow.gains else params

    def _is_sure(self, found: Comparison, least: int) -> bool:
        """Return whether the verdict on all entries would be the same as the verdict on the sample."""
        low, high = (beyond_chance(share, found.share_by_chance) for share in _interval(found, self._sample.layers))
        if low is None or high is None:
            return False
        if found.verdict == "descended":
            is_moved = found.orbit_distance < UNMOVED * found.distance
            return low >= RELATED + MARGIN and not (is_moved and (found.share_after or 0.0) > NEAR)
        is_free = (found.z_score is None or found.z_score < ORDERED) and least >= TELLING
        return found.verdict == "unrelated" and high <= STRANGE - MARGIN and is_free and not self._may_be_rotated

    @cached_property
    def _may_be_rotated(self) -> bool:
        """Whether a rotated residual stream may be the cause of differences that remain after permutations.

        A rotation does not change inner products. Suppose that a rotation R leaves the difference E = X - Y R between
        tensors X and Y. For such X and Y, the two Gram matrices differ by at most |E| (|X| + |Y|). If E is small, the
        entries of both Gram matrices are therefore correlated.
        """
        names = self._symmetry.rotatable
        seen = False
        for tensor, sites in self._symmetry.sites.items() if names else ():
            own = [site for site in sites if site.group.name in names]
            if len(sites) == 1 and own and len(self._symmetry.shapes[tensor]) == 2:
                axis = 1 - own[0].placement.axis
                length = self._symmetry.shapes[tensor][axis]
                index = {axis: torch.arange(min(length, PROBED)) * length // min(length, PROBED)}
                x, y = (read(tensor, index).float().movedim(axis, 0) for read in self._stored)
                above = torch.ones(len(x), len(x)).triu(1) > 0
                products = torch.stack([(x @ x.mT)[above], (y @ y.mT)[above]])
                seen = True
                if float(torch.corrcoef(products)[0, 1]) > ROTATED:
                    return True
        return bool(names) and not seen


@dataclass(frozen=True)
class _Stored(Pair):
    """The sampled tensors of two networks, with all units in their stored order."""

    sample: Sample
    names: tuple[str, ...]

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self.sample.shapes[name] for name in self.names}

    def load(self, name: str, rows: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        indices = self.sample.entries.get(name, {})
        pair = [_read(network, name, indices) for network in (self.first, self.second)]
        dtype = work_dtype(*(tensor.dtype for tensor in pair))
        return pair[0].to(dtype), pair[1].to(dtype)


def _interval(found: Comparison, layers: tuple[int, int]) -> tuple[float | None, float | None]:
    """Return bounds on the mean share over all layers, computed from the variance between sampled layers."""
    if found.share_after is None:
        return None, None
    by_layer: dict[str, list[float]] = {}
    for share in found.shares:
        layer = layer_of(share.name)
        if layer is not None and share.after is not None and len(share.shape) > 1:
            by_layer.setdefault(layer, []).append(share.after)
    means = torch.tensor([sum(own) / len(own) for own in by_layer.values()], dtype=torch.float64)
    chosen, every = layers
    if chosen == every:
        return found.share_after, found.share_after
    if len(means) < FEW:
        return 0.0, 1.0
    error = SPREAD * float(means.std()) * math.sqrt((1 - chosen / every) / len(means))
    return max(0.0, found.share_after - error), min(1.0, found.share_after + error)


def _representative(network: Mapping[str, Tensor] | Checkpoint, symmetry: Symmetry) -> Mapping[str, Tensor]:
    is_lazy = isinstance(network, Checkpoint) and network.is_lazy
    if is_lazy:
        assert isinstance(network, Checkpoint)
        return RepresentativeCheckpoint(network, symmetry)
    return symmetry.split(network)[0]


def _read(network: Mapping[str, Tensor] | Checkpoint, name: str, indices: Indices) -> Tensor:
    """Return the entries at some indices of a network's tensor. Large tensors in files are read in chunks."""
    if not isinstance(network, Checkpoint) or not network.is_lazy:
        return select(network[name].detach().cpu(), indices)
    stored = network.stored[name]
    rows = max(1, PIECE * len(stored.shape[:1]) * (stored.shape or (1,))[0] // max(1, stored.nbytes))
    if not indices or not stored.shape or rows >= stored.shape[0] or isinstance(network, RepresentativeCheckpoint):
        return select(network.read(name), indices)
    index = indices.get(0, torch.arange(stored.shape[0]))
    parts, places = [], []
    for start in range(0, stored.shape[0], rows):
        own = ((index >= start) & (index < start + rows)).nonzero().flatten()
        if len(own):
            piece = network.read(name, rows=(start, min(start + rows, stored.shape[0])))
            parts.append(select(piece, {**indices, 0: index[own] - start}))
            places.append(own)
    return torch.cat(parts)[torch.cat(places).argsort()]


def _scrambled(read: Read, sample: Sample, name: str, indices: Indices) -> Tensor:
    """Return the entries at some indices of a scrambled network's tensor."""
    tensor = read(name, sample.entries.get(name, {}))
    moved = scramble(sample.symmetry, name, tensor.to(work_dtype(tensor.dtype)), 0)
    entries = sample.entries.get(name, {})
    return select(moved, {axis: index for axis, index in indices.items() if axis not in entries})
