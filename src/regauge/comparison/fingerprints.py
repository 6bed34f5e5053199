"""Fingerprints: 256 numbers that are equal for all networks on one orbit, and the tensors from which they are
computed.
"""

import itertools
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from regauge.alignment.streamed.balancing import balance_streamed
from regauge.alignment.streamed.memory import BASE, SLACK
from regauge.alignment.streamed.passes import Passes
from regauge.alignment.streamed.source import Moved
from regauge.canonical.null_spaces import has_null_spaces, without_null_spaces
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import FileJob, Network, open_job
from regauge.checkpoints.memory_limit import MemoryLimit, size_text
from regauge.checkpoints.representative_checkpoint import RepresentativeCheckpoint
from regauge.core.act import Site
from regauge.core.arguments import check_arguments
from regauge.core.balance import balance, has_balance
from regauge.core.behind_gains import gains_of
from regauge.core.chart import charted
from regauge.core.element import Element
from regauge.core.families import move_tensor, unit_values
from regauge.core.params import VALUES, require_finite, require_movable, work_dtype
from regauge.core.progress import Progress, no_progress
from regauge.core.remembered import remembered
from regauge.core.symmetry import Symmetry

SIZE = 256
"""The number of entries of a fingerprint."""
PROBES = 8
"""The number of fixed random vectors by which tensors are multiplied and summed along axes without a group."""
QUANTILES = 8
"""The number of parts into which the sorted norms of units are divided. Norms are averaged within each part."""
MIXTURES = 4
"""The number of fixed weighted sums in which the norms of a unit in different tensors are combined."""
TINY = torch.finfo(torch.float64).tiny
FAINT_TENSOR = 0.01
"""Tensors whose root mean square is below this fraction of the network's root mean square get less weight."""

Features = Float64[Tensor, "models features"]
HELD = 5
"""The number of copies of the largest tensor that computing its features needs."""


@check_arguments
def fingerprint(
    params: Network,
    symmetry: Symmetry,
    *,
    memory: int | str | MemoryLimit | None = None,
    progress: Progress = no_progress,
) -> Float64[Tensor, "*models numbers"]:
    """Return the fingerprint of a network, which is equal for all networks on its orbit.

    For every element g, `fingerprint(act(g, p)) == fingerprint(p)` up to rounding. Networks with different functions
    almost surely have different fingerprints. Therefore fingerprints find copies and relatives in large collections.
    For near copies, the Euclidean distance of two fingerprints is below the relative change of the parameters. In the
    tested architectures, the distance of two fingerprints is about a third of the change of the parameters.

    First, translations are removed (`Symmetry.split`), and gains that prevent rotations of a residual stream are set to
    one. Next, the network is balanced, that is, replaced by the network of smallest norm that scales and invertible
    matrices produce (`regauge.core.balance`). Balanced networks on one orbit differ only by permutations, signs and
    rotations, which do not change the features. The features of a tensor are its norm, the norms of its Gram matrices,
    and the norms of contractions with fixed random vectors. Tensors are contracted along axes on which no group acts.
    The features of a group are the norms of its units, sorted and then averaged in eight parts. There are four sets of
    features for each group, which weight the tensors differently. For periodic units, the sine of the bias is used.
    Entries that no element can exchange have different fixed weights. Therefore a permutation of the inputs changes the
    fingerprint. Tensors are divided by their norms. A fixed random projection, which keeps distances, maps all features
    to 256 numbers.

    A change of a balanced tensor changes each feature by at most the size of this change. Small noise therefore changes
    the fingerprint little. If the incoming or outgoing weights of a unit with scales are all exactly zero, small noise
    can change the fingerprint much.

    If a checkpoint does not fit in memory, it is read tensor by tensor, in float32, or in float64 if it is stored in
    float64. Up to rounding, the fingerprint equals the fingerprint of the network in memory.

    Args:
        params: A network, a population with a leading model axis, or the path of a checkpoint. Buffers on which the
            symmetry acts are ignored.
        symmetry: The symmetry of the architecture.
        memory: The memory limit for a network in files: a number of bytes, or text such as "2GB". Default: half of the
            machine's memory.
        progress: A function that shows the progress of each pass over streamed files.

    Returns:
        A float64 tensor on the CPU with shape `[256]`, or `[models, 256]` for a population.

    Raises:
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: Parameters do not fit the symmetry, or contain NaN or Inf. ValueError is also raised if the memory
            limit is too low, or if a matrix product of a streamed network does not have full rank.

    References:
        Kempf and Ness (1979) for points of smallest norm on orbits; Johnson and Lindenstrauss (1984), Extensions of
        Lipschitz mappings into a Hilbert space, for the projection.
    """
    job = open_job((params,), 0, memory=memory, work="merging")
    if job is not None:
        job = job.named_by(symmetry)
        if job.is_streamed:
            with balanced_tensors(job, symmetry, progress) as tensors:
                return _project(_features(tensors.symmetry, tensors))[0]
        params = job.source.params
    assert isinstance(params, Mapping)
    symmetry = symmetry.bind(params)
    require_finite(params, "the network", symmetry.structure)
    symmetry.require_ones(params)
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    kept = {  # Elements also permute integer masks and indices.
        name: tensor.detach().to("cpu", torch.float64 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in params.items()
        if tensor.is_floating_point() or name in symmetry.sites
    }
    lead = next((t.shape[: t.ndim - len(symmetry.shapes[n])] for n, t in kept.items() if n in symmetry.sites), ())
    symmetry, whole = seen_by_fingerprints(symmetry), symmetry
    if whole.translations or whole.rotatable:
        kept = whole.split(kept)[0]
    if has_balance(symmetry):
        kept = without_null_spaces(kept, symmetry)
        kept = symmetry.act(balance(kept, symmetry), kept)
    models = torch.Size(lead).numel()
    flat_tensors = {}
    for name, tensor in symmetry.sums(kept).items():
        if name not in ignored and tensor.is_floating_point() and tensor.numel():
            flat = tensor.reshape(models, *tensor.shape[len(lead) :])
            flat_tensors[name] = without_marks(flat, name, whole)
    return _project(_features(symmetry, flat_tensors), models).reshape(*lead, SIZE)


def _project(features: Mapping[str, Features], models: int = 1) -> Float64[Tensor, "models numbers"]:
    """Return a fixed random projection of all features."""
    numbers = torch.zeros(models, SIZE, dtype=torch.float64)
    for key, values in features.items():
        numbers += values @ _fixed(f"{key} projection", values.shape[1], SIZE)
    count = sum(values.shape[1] for values in features.values())
    return numbers / math.sqrt(SIZE * max(1, count))


def _features(symmetry: Symmetry, tensors: Mapping[str, Tensor]) -> dict[str, Features]:
    """Return features that permutations, signs and rotations do not change, by the name of their tensor or group."""
    norms, counts = dict[str, Tensor](), dict[str, int]()
    for name, tensor in tensors.items():
        norms[name], counts[name] = tensor.reshape(len(tensor), -1).norm(dim=1).double(), tensor[0].numel()
    squares = sum((norm.square() for norm in norms.values()), torch.zeros((), dtype=torch.float64))
    size = (squares / max(1, sum(counts.values()))).sqrt()
    found: dict[str, Features] = {}
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        sites, spread = symmetry.sites.get(name, []), math.sqrt(counts[name])
        orbits = orbits_of_entries(symmetry, name)
        relative = tensor / _column((norms[name] + FAINT_TENSOR * size * spread).clamp_min(TINY), tensor).to(tensor)
        share = torch.asinh(norms[name] / (spread * size).clamp_min(TINY)).unsqueeze(1)
        weighted = relative * _weights(f"{name} weights", tensor, orbits)
        found[name] = torch.cat([share, _probe(weighted, name, orbits).double()], 1)
        for k in range(MIXTURES):
            weighted = relative * _weights(f"{name} weights {k}", tensor, orbits)
            for number, site in enumerate(sites):
                key = f"{site.group.name} {k}"
                values = unit_values(symmetry, name, site, weighted, 1)
                if k == 0 and not any(site.group.name in other.group.within for other in sites):
                    # If another group of the tensor is nested in this group, elements change the inner products of
                    # units.
                    found[f"{name} {number}"] = _gram_norm(values).double()
                # An element permutes and rotates all placements of a group in the same way. Therefore sums over all
                # placements are invariant, and show which units of different tensors belong together.
                term = (values.square().sum(-1) if site.group.matrix == "none" else values @ values.mT).double()
                mixed = groups.setdefault(key, [torch.zeros_like(term)])
                mixed[0] = mixed[0] + _fixed(f"{name} {key} {number}").sigmoid() * term
    for key, (mixed_squares,) in groups.items():
        name = key.rpartition(" ")[0]
        is_matrix = symmetry[name].matrix != "none"
        found[f"group {key}"] = _gram_root(mixed_squares) if is_matrix else _averages(mixed_squares.flatten(1))
    return found


def _column(numbers: Float64[Tensor, " models"], like: Tensor) -> Tensor:
    """Return one number per network as a tensor that broadcasts with the networks' tensors."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))


def _weights(key: str, tensor: Tensor, orbits: Mapping[int, Tensor]) -> Tensor:
    """Return fixed weights near one for the entries of a tensor.

    Entries that elements can exchange have the same weight.
    """
    result = tensor.new_ones([1] * tensor.ndim)
    for axis in range(tensor.ndim - 1):
        length = tensor.shape[1 + axis]
        labels = orbits.get(axis, torch.arange(length))
        weights = 0.5 + _fixed(f"{key} {axis}", int(labels.max()) + 1).sigmoid()
        result = result * weights.to(tensor)[labels].reshape([-1 if k == 1 + axis else 1 for k in range(tensor.ndim)])
    return result


def _probe(tensor: Tensor, name: str, moved: Collection[int]) -> Features:
    """Contract a tensor with fixed vectors along the axes on which no group acts.

    Return the norms of the contracted tensors over the remaining axes. If no axes remain, return the contracted
    entries.
    """
    is_contracted = False
    for axis in reversed(range(tensor.ndim - 1)):
        if axis not in moved:
            length = tensor.shape[1 + axis]
            vectors = (_fixed(f"{name} axis {axis}", length, PROBES) / math.sqrt(length)).to(tensor)
            if is_contracted:  # The last axis holds the probes.
                tensor = (tensor.movedim(1 + axis, -2) * vectors).sum(-2)
            else:
                tensor, is_contracted = tensor.movedim(1 + axis, -1) @ vectors, True
    if moved and not is_contracted:
        tensor = tensor.unsqueeze(-1)
    found: Tensor = tensor.flatten(1, -2).norm(dim=1) if moved else tensor.reshape(len(tensor), -1)
    return found


def _averages(squares: Float64[Tensor, "models units"]) -> Features:
    """Return square roots of sums over consecutive parts of the sorted squares."""
    count = squares.shape[1]
    ends = torch.linspace(0, count, min(QUANTILES, count) + 1).round().long().tolist()
    ordered = squares.sort(dim=1).values
    return torch.stack([ordered[:, a:b].sum(1).sqrt() for a, b in itertools.pairwise(ends)], 1)


def _gram_norm(values: Float64[Tensor, "models *copies units values"]) -> Features:
    """Return the norm of the Gram matrices of a tensor's units; see `_gram_root`."""
    tall = values.mT if values.shape[-2] > values.shape[-1] else values
    return _gram_root(tall @ tall.mT)


def _gram_root(grams: Float64[Tensor, "models *copies n n"]) -> Features:
    """Return the fourth root of the sum of squares of all Gram matrices, one for each copy of a group."""
    return grams.flatten(1).square().sum(1, keepdim=True).pow(0.25)


@remembered
def orbits_of_entries(symmetry: Symmetry, name: str) -> dict[int, Int[Tensor, " length"]]:
    """Return, for each axis with a group, labels of indices; equal labels mark indices that can be exchanged."""
    result = {}
    for axis, length in enumerate(symmetry.shapes.get(name, ())):
        local = [site for site in symmetry.sites.get(name, ()) if site.placement.axis == axis]
        moving = [site for site in local if site.group.is_permuted or site.group.matrix != "none"]
        if not local:
            continue
        labels, before = torch.arange(length), None
        while before is None or not torch.equal(labels, before):
            before = labels.clone()
            for site in moving:
                blocks = site.positions.reshape(site.group.size, -1)
                labels[blocks] = labels[blocks].amin(0, keepdim=True).expand_as(blocks)
        result[axis] = torch.unique(labels, return_inverse=True)[1]
    return result


class BalancedTensors(Mapping[str, Tensor]):
    """The compared tensors of a checkpoint after balancing, each with a leading model axis of length one.

    Attributes:
        symmetry: The symmetry that `seen_by_fingerprints` returns. All sizes of its groups are known.
    """

    def __init__(self, source: Checkpoint, whole: Symmetry, names: Sequence[str], passes: Passes) -> None:
        self.symmetry, self._whole = seen_by_fingerprints(whole), whole
        self.element = self.symmetry.identity()
        self._source, self._names, self._passes = source, tuple(names), passes

    def __getitem__(self, name: str) -> Tensor:
        stored = self._source.stored[name]
        tensor = self._source.read(name, dtype=work_dtype(stored.dtype))
        require_finite({name: tensor}, str(self._source.path), self.symmetry.structure)
        self._passes.advance(stored.nbytes)
        moved = move_tensor(self.symmetry, self.element, name, tensor).unsqueeze(0)
        return without_marks(self.symmetry.sums({name: moved})[name], name, self._whole)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def balanced_tensors(job: FileJob, symmetry: Symmetry, progress: Progress) -> Iterator[BalancedTensors]:
    """Return the balanced tensors of a checkpoint for its fingerprint. Each tensor is read twice.

    Raises:
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: The memory limit is too low, parameters do not fit the symmetry, or a matrix product does not have
            full rank.
    """
    source, limit = job.source, job.limit
    symmetry = symmetry.bind(source.on_meta())
    require_movable(symmetry.groups, source.on_meta(), symmetry.buffers)
    symmetry.require_ones({name: source[name] for name in symmetry.ones if name in source.stored})
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    stored = {n: one for n, one in source.stored.items() if n not in ignored and one.dtype in VALUES and one.nbytes}
    is_split = bool(symmetry.translations or symmetry.rotatable)
    wide = charted(symmetry) if is_split else ()
    sizes = {name: work_dtype(one.dtype).itemsize * math.prod(one.shape) for name, one in stored.items()}
    largest = max(size * (1 + (name in wide)) for name, size in sizes.items())
    peak = int(HELD * SLACK * largest) + BASE + limit.held()
    if peak > limit.nbytes:
        raise ValueError(
            f"a fingerprint needs {size_text(peak)} of memory for the largest tensor of {source.label!r}, but only "
            f"{size_text(limit.nbytes)} are allowed; allow {size_text(peak)} or more"
        )
    nbytes = sum(one.nbytes for one in stored.values())
    if is_split:
        source = RepresentativeCheckpoint(source, symmetry)
        job = replace(job, checkpoints=(source,))
    passes = Passes((source,), [], progress)
    tensors = BalancedTensors(source, symmetry, list(stored), passes)
    if has_balance(tensors.symmetry):
        tensors.element = _balance(job, tensors.symmetry, passes, nbytes)
    with passes.timed("measuring", 2 * nbytes):
        yield tensors


def seen_by_fingerprints(symmetry: Symmetry) -> Symmetry:
    """Return the symmetry under which fingerprints are invariant; it includes rotations of residual streams."""
    return symmetry.on_representatives(rotate=True) if symmetry.rotatable else symmetry


def without_marks(tensor: Tensor, name: str, symmetry: Symmetry) -> Tensor:
    """Return a tensor `[models, ...]` in which permuted gains and added half periods are normalized.

    The gains of residual streams that can be rotated are set to 1. A stream with zero gains can only be permuted, and
    its gains are sorted. `_without_shifts` replaces biases to which half periods are added.
    """
    if any(name in gains_of(symmetry, group) for group in symmetry.rotatable):
        return tensor.sort(-1).values
    return _without_shifts(tensor, symmetry.sites.get(name, ()))


def _fixed(key: str, *shape: int) -> Tensor:
    """Return standard normal numbers that depend only on a string."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _balance(job: FileJob, symmetry: Symmetry, passes: Passes, nbytes: int) -> Element:
    if has_null_spaces(Moved(job.source, lambda _, tensor: tensor.double()), symmetry):
        raise ValueError(
            f"a product of matrices in {job.source.label!r} has less than full rank, and its fingerprint "
            f"{job.needs_memory}"
        )
    with passes.timed("balancing", nbytes):
        (element,), _ = balance_streamed((job.source,), symmetry, "move", passes)
    return element


def _without_shifts(tensor: Tensor, sites: Sequence[Site]) -> Tensor:
    """Return `sin(pi x / c)` of a tensor to which half periods c are added.

    A half period only changes the sign of the sine.
    """
    amounts = {abs(amount) for site in sites for amount in site.placement.shift if amount}
    if not amounts:
        return tensor
    step = min(amounts)
    if any(abs(amount / step - round(amount / step)) > 1e-9 for amount in amounts):
        return torch.zeros_like(tensor)
    return (math.pi / step * tensor).sin()
