"""A metanetwork: an encoder from weights to features, layers, and a head."""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regauge.checkpoints.writing import save
from regauge.core.element import PARTS, ROTATION, TRANSLATION, Element, require_parts
from regauge.core.params import require_finite, select
from regauge.core.symmetry import Symmetry
from regauge.core.typed_json import named
from regauge.core.unit_plans import Axis
from regauge.weightspace.conditioning import Conditioning
from regauge.weightspace.encoder import VALUES, Encoder, Scalars, Values
from regauge.weightspace.features import Features, Read
from regauge.weightspace.heads import HEADS, Head
from regauge.weightspace.heads.equivariant import Equivariant
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.layers import LAYERS
from regauge.weightspace.layers.message_passing import MessagePassing
from regauge.weightspace.layers.plan import Layer, LayerPlan
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.linear_reader import LinearReader, statistics_of
from regauge.weightspace.probes.probed import Probed
from regauge.weightspace.probes.probes import ProbeEncoder, Probes
from regauge.weightspace.reader import Reader, multiplied_blocks, require_values, tell_difference

KIND = "regauge net over networks"
VERSION = "1"
LARGEST_ARRAY = 2**22
"""The number of entries of the largest array that is used on a CPU.

CPU allocators return arrays above this size to the system after each use, which is slow.
"""


@dataclass(frozen=True)
class Settings:
    """The settings of a net, except its symmetries; see `Metanet`."""

    layer: Layer
    head: Head
    width: int
    depth: int
    values: Values
    parts: tuple[str, ...]
    reads_moments: bool = False
    readers: tuple[Axis, ...] = ()
    conditions: int = 0
    is_linear: bool = False

    def __post_init__(self) -> None:
        require_parts(self.parts)
        if ROTATION in self.parts:
            raise ValueError(
                "nets over networks do not respect rotations behind gains; leave the part 'rotation' out, or give "
                "canonical networks (`rg.canonicalize`)"
            )
        if "permutation" not in self.parts or self.width < 1 or self.depth < 0:
            raise ValueError(
                f"parts={self.parts}, width={self.width}, depth={self.depth}: parts must include permutations, which "
                "layers always respect, width must be at least 1 and depth at least 0"
            )
        if self.readers and (self.reads_moments or not self.layer.traits.weighs_units):
            raise ValueError(
                f"{'moments of tensors' if self.reads_moments else self.layer} take maxima or sums, which count a unit "
                "that is split in two twice; choose means, or give no `readers`"
            )
        if self.is_linear and (self.readers or self.answers is None):
            raise ValueError(
                "a linear reader of statistics needs an `Invariant` head, and counts a unit that is split in two "
                "twice; leave `is_linear` out with other heads and with `readers`"
            )

    @property
    def answers(self) -> int | None:
        """The number of outputs that are also computed from probes, or None if the head is not `Invariant`."""
        return self.head.outputs if isinstance(self.head, Invariant) else None


class Metanet(nn.Module):
    """A network that reads other networks. By construction, a metanetwork is invariant or equivariant under the
    symmetry of the networks.

        net = Metanet(symmetry, layer=MessagePassing(), head=Invariant(outputs=10), generator=generator)
        net.standardize(population)
        net(population)                       # [models, 10], the same for all networks of an orbit

    The layers are equivariant to permutations. If any invertible matrix can be inserted between two tensors, such as
    queries and keys, the net reads their product. The net first canonicalizes scales, signs and half periods. The net
    also canonicalizes rotations whose products would be too large. Some layers respect signs without a canonical form:
    with `ScaleGMN`, signs are not canonicalized, and with `Propagation`, signs and half periods are not canonicalized.
    With an `Equivariant` head, the net maps its changes of canonical networks back to the original networks. The
    canonical form of signs is discontinuous where the sum that determines a sign is zero. If the symmetry has
    translations, the net reads networks without translations (representatives, `Symmetry.split`). To remove
    translations, the net needs the buffers of the population.

    Args:
        symmetry: The symmetry of the networks, with all sizes known, or a list with the symmetries of several
            architectures. Architectures share all parameters of the net that do not belong to single tensors.
        layer: The settings of the layers: an instance of a class in `LAYERS`.
        head: The head: `Invariant`, `Equivariant` or `UnitFeatures`.
        width: The length of the vectors of units, pairs and networks.
        depth: The number of layers. A net with 0 layers reads only the outputs of networks at `probes`.
        values: The encoding of single weights.
        parts: The parts of the symmetry that the net respects: some of "permutation", "sign", "scale", "shift",
            "linear" and "translation". The default is all parts, and "permutation" is always included. `net.parts`
            lists the parts that a net respects. No net respects "rotation" (rotations that depend on gains).
        readers: Axes (parameter, axis) along which layers sum over units, as `find_readers` returns them. If `readers`
            are given, units are weighted by shares of their outgoing weights; see `weightspace.shares`. Copies of a
            split unit, which divide its outgoing weights, then count as one unit. With `readers`, the net does not
            respect translations.
        probes: Inputs on which the networks are evaluated. Activations and outputs at the probes become additional
            features. For several architectures, pass one `Probes` for each architecture, in the order of the
            symmetries. With an `Invariant` head, a second net reads the outputs at the probes, and the result is the
            mean of the two nets' outputs.
        reads_moments: Whether the net also reads the moments of every tensor of the canonical networks (logarithm of
            the size, mean, extremes). The symmetry does not change the moments, but splitting a unit does.
        conditions: The number of further inputs for each network, such as a time or a class, which the net reads in
            addition to the weights. Functions of the conditions scale and shift features before every layer.
        is_linear: Whether the output includes a `LinearReader` of statistics of canonical networks. A linear reader
            requires an `Invariant` head. The linear reader is fitted separately. The weight of the linear reader in the
            output is the buffer `linear_share`, which is zero by default.
        generator: The random number generator for the initial weights.

    Raises:
        ValueError: A part is unknown, or a size is invalid. Layers have parameters for single tensors, but there are
            several architectures. The number of `Probes` differs from the number of architectures. The module of some
            `Probes` has another architecture.
    """

    share: Tensor
    linear_share: Tensor

    def __init__(
        self,
        symmetry: Symmetry | Sequence[Symmetry],
        *,
        layer: Layer | None = None,
        head: Head,
        width: int = 64,
        depth: int = 4,
        values: Values | None = None,
        parts: Sequence[str] | None = None,
        readers: Collection[Axis] = (),
        probes: Probes | Sequence[Probes] | None = None,
        reads_moments: bool = False,
        conditions: int = 0,
        is_linear: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        symmetries = (symmetry,) if isinstance(symmetry, Symmetry) else tuple(symmetry)
        given = () if probes is None else (probes,) if isinstance(probes, Probes) else tuple(probes)
        layer, values = MessagePassing() if layer is None else layer, Scalars() if values is None else values
        wanted, axes = (*PARTS, TRANSLATION) if parts is None else tuple(parts), tuple(sorted(readers))
        if readers and any(one.translations for one in symmetries):
            wanted = tuple(part for part in wanted if part != TRANSLATION)  # its means would count a split unit twice
        self.settings = Settings(layer, head, width, depth, values, wanted, reads_moments, axes, conditions, is_linear)
        _require_fitting(self.settings, symmetries, given)
        self._architectures = len(symmetries)
        # Shares, moments and activations are those of canonical networks.
        canonical = {"scale"} if readers or reads_moments or given else set()
        self._left = tuple(part for part in wanted if part in layer.traits.respects and part not in canonical)
        self._readers = [self._reader(one, k) for k, one in enumerate(symmetries)]
        layouts = [reader.layout for reader in self._readers]
        self.parts = tuple(part for part in wanted if not any(part in reader.frame.open for reader in self._readers))
        self.encoders = nn.ModuleList(self._encoder(one, generator) for one in layouts[: len(layouts) if depth else 0])
        self.probes = nn.ModuleList(
            ProbeEncoder(one, layout, width if depth else None, self.settings.answers, generator=generator)
            for one, layout in zip(given, layouts, strict=False)
        )
        if given and isinstance(head, Invariant):
            self.register_buffer("share", torch.tensor(0.5 if depth else 1.0))
        if is_linear:
            plain = [reader.plain.layout for reader in self._readers if reader.plain is not None]
            self.linear = nn.ModuleList(LinearReader(one, self.settings.answers or 0) for one in plain)
            self.register_buffer("linear_share", torch.tensor(0.0))
        for k, encoder in enumerate(self.probes):
            assert isinstance(encoder, ProbeEncoder)
            self._readers[k] = replace(self._readers[k], probed=encoder.probed)
        self.layers = nn.ModuleList(self._layers(layouts, generator))
        has_pairs = layer.traits.keeps_pairs
        self.conditioned = nn.ModuleList(
            Conditioning(conditions, width, has_pairs=has_pairs, generator=generator)
            for _ in range(depth if conditions else 0)
        )
        known = [found.made if depth and (found := layer.reaches(one, depth - 1)) else {} for one in layouts]
        self.head = head.build(layouts, width, has_pairs=has_pairs, generator=generator, known=known) if depth else None
        for k, layout in enumerate(layouts):
            self.register_buffer(f"sizes_{k}", torch.ones(len(layout.parameters)))

    def _encoder(self, layout: Layout, generator: torch.Generator | None) -> Encoder:
        """Return the encoder for the values of one architecture."""
        made = self.settings
        return Encoder(
            layout,
            made.width,
            made.values,
            has_pairs=made.layer.traits.keeps_pairs,
            channels=made.layer.traits.channels,
            multiplied=multiplied_blocks(made.layer, layout, made.depth),
            reads_moments=made.reads_moments,
            generator=generator,
        )

    def _layers(self, layouts: Sequence[Layout], generator: torch.Generator | None) -> Iterator[nn.Module]:
        """Yield the layers.

        The last layer computes only what the head reads, and all other layers compute all features.
        """
        made, has_pairs = self.settings, self.settings.layer.traits.keeps_pairs
        everything = frozenset({"units", "positions", "network", "odd", *(("pairs", "unwritten") if has_pairs else ())})
        last = made.head.reads(layouts, has_pairs=has_pairs)
        for k in range(made.depth):
            reads = last if k == made.depth - 1 else everything
            yield made.layer.build(LayerPlan(layouts, made.width, reads, generator, before=k))

    @property
    def symmetries(self) -> tuple[Symmetry, ...]:
        """The symmetries of the architectures for which the net has parameters."""
        return tuple(
            {reader.number: reader.layout.symmetry for reader in reversed(self._readers)}[k]
            for k in range(self._architectures)
        )

    @property
    def layout(self) -> Layout:
        """The layout of the networks of the first architecture."""
        return self._readers[0].layout

    def save(self, path: str | Path, *, about: Mapping[str, Any] | None = None, overwrite: bool = False) -> Path:
        """Write the net atomically to a `.safetensors` file.

        The header of the file contains all settings for rebuilding the net.

        Args:
            path: A path that ends in `.safetensors`, in an existing folder. Architectures to which the net was adapted
                are not written. Call `adapt` again after loading the net.
            about: Additional information as JSON, such as the purpose of the training.
            overwrite: Whether an existing file may be replaced.

        Raises:
            FileExistsError: The file exists and `overwrite` is false.
            FileNotFoundError: The folder of `path` does not exist.
            OSError: The disk is full.
            ValueError: The name does not end in `.safetensors`, or a function selects the outputs at probes.
        """
        made, facts = json.dumps(self.describe()), json.dumps(dict(about or {}))
        header = {"kind": KIND, "version": VERSION, "net": made, "about": facts}
        return save(self.state_dict(), path, overwrite=overwrite, metadata=header)

    def describe(self) -> dict[str, Any]:
        """Return all settings of the net as plain data for JSON, without its tensors.

        Raises:
            ValueError: A function selects the outputs at probes.
        """
        settings = self.settings
        return {
            "layer": named(settings.layer, LAYERS),
            "head": named(settings.head, HEADS),
            "values": named(settings.values, VALUES),
            "width": settings.width,
            "depth": settings.depth,
            "parts": list(settings.parts),
            "reads_moments": settings.reads_moments,
            "readers": [list(axis) for axis in settings.readers],
            "conditions": settings.conditions,
            "is_linear": settings.is_linear,
            "symmetries": [json.loads(symmetry.to_json()) for symmetry in self.symmetries],
            "probes": [encoder.describe() for encoder in self.probes if isinstance(encoder, ProbeEncoder)],
        }

    def reads(self, population: Mapping[str, Tensor], symmetry: Symmetry | None = None) -> bool:
        """Return whether the net can read a population, that is, whether the population's tensors and the given
        symmetry fit.
        """
        return any(reader.fits(population, symmetry) for reader in self._readers)

    def adapt(self, symmetry: Symmetry, module: nn.Module | None = None) -> None:
        """Prepare the net to also read networks with other numbers of units, without a change of the net's parameters.

        The maps in every layer depend on the roles of tensors, not on their sizes. Therefore widths, numbers of heads
        and experts, and sizes of matrices whose products are read may differ. Axes that no group permutes (inputs,
        classes, kernels) must keep their length. The statistics that `standardize` computed do not change.

        Args:
            symmetry: The symmetry of the networks with other numbers of units.
            module: The module of the networks with other numbers of units, for nets with probes.

        Raises:
            ValueError: The networks differ from the net's original networks in more than the numbers of units, or the
                module is missing.
        """
        for reader in self._readers:
            made = self._reader(symmetry, 0, reader.layout.contracted)
            if reader.layout.key == made.layout.key:
                self._readers.append(replace(made, number=reader.number, probed=self._trace(reader, made, module)))
                return
        there = self._reader(symmetry, 0, self.layout.contracted).layout
        raise ValueError(
            "this net has no parameters for networks of that symmetry, which differ not only in the numbers of units: "
            f"{self.layout.difference(there)}; make a net for both symmetries and train it on both"
        )

    @torch.no_grad()
    def standardize(self, population: Mapping[str, Tensor], symmetry: Symmetry | None = None) -> None:
        """Compute the statistics for standardizing weights from some networks of one architecture.

        Each block of values has one mean and one deviation, and each tensor has one root mean square. All positions in
        a block share the mean and deviation, because permutations exchange positions. See `forward` for `symmetry`.

        Raises:
            ValueError: The net cannot read the architecture of the networks.
        """
        reader = self._find(population, symmetry)
        require_finite({name: population[name] for name in reader.layout.parameters}, "the population")
        canonical, _ = reader.canonicalize(population)
        if len(self.encoders):
            encoder = self.encoders[reader.number]
            assert isinstance(encoder, Encoder)
            encoder.standardize(reader.read(canonical)[0], reader.layout)
        if reader.probed is not None:
            probes = self.probes[reader.number]
            assert isinstance(probes, ProbeEncoder)
            probes.standardize(canonical, reader.probed)
        sizes = [float(canonical[name].double().square().mean().sqrt()) or 1.0 for name in reader.layout.parameters]
        self.get_buffer(f"sizes_{reader.number}").copy_(torch.tensor(sizes))

    def forward(
        self, population: Mapping[str, Tensor], conditions: Tensor | None = None, *, symmetry: Symmetry | None = None
    ) -> Any:
        """Return the output of the head for each network of a population of one architecture.

        With probes and an `Invariant` head, the output is the weighted mean of `read_weights` and `read_probes`. The
        weight of `read_probes` in the mean is the buffer `share`. The buffer `share` is one half by default, and one at
        depth 0. With `is_linear`, the result is the weighted mean of this output and of `read_linear`. The weight of
        `read_linear` is `linear_share`.

        Args:
            population: Networks with a leading model axis.
            conditions: The conditions of each network, `[models, conditions]`.
            symmetry: The symmetry of the networks. The symmetry is needed if the net reads several architectures with
                the same tensors, such as networks of one shape with different activations.

        Raises:
            ValueError: The net cannot read the architecture of the networks, or the networks have several
                architectures. Conditions are missing or have the wrong length.
        """
        if self.head is None:
            made = self.read_probes(population, symmetry=symmetry)
        else:
            made = self.read_weights(population, conditions, symmetry=symmetry)
            if len(self.probes) and isinstance(self.settings.head, Invariant):
                made = torch.lerp(made, self.read_probes(population, symmetry=symmetry), self.share)
        if not self.settings.is_linear:
            return made
        return torch.lerp(made, self.read_linear(population, symmetry=symmetry), self.linear_share)

    def read_weights(
        self, population: Mapping[str, Tensor], conditions: Tensor | None = None, *, symmetry: Symmetry | None = None
    ) -> Any:
        """Return the head's output, computed from weights; see `forward`.

        Raises:
            ValueError: The net cannot read the architecture of the networks, or has no layers.
        """
        if self.head is None:
            raise ValueError("a net of depth 0 reads only outputs at probes; give it a depth of at least 1")
        reader = self._find(population, symmetry)
        wanted = self.settings.conditions
        given = 0 if conditions is None else conditions.shape[-1]
        if given != wanted:
            raise ValueError(
                f"this net needs {wanted} conditions for each network, but {given} were given; `conditions` is "
                "[models, conditions], as many as in `Metanet(conditions=...)`"
            )
        parts = self._groups(reader.layout, population)
        if len(parts) == 1:
            return self._read(reader, population, conditions)
        told = [None if conditions is None else conditions[part] for part in parts]
        return _join([self._read(reader, select(population, p), c) for p, c in zip(parts, told, strict=True)])

    def read_probes(self, population: Mapping[str, Tensor], *, symmetry: Symmetry | None = None) -> Tensor:
        """Return the output that is computed only from the networks' outputs at probes.

        Raises:
            ValueError: The net has no probes or no `Invariant` head, or the networks have another architecture.
        """
        reader = self._find(population, symmetry)
        if reader.probed is None or not isinstance(self.settings.head, Invariant):
            raise ValueError("only a net with probes and an `Invariant` head reads outputs; give it probes")
        encoder = self.probes[reader.number]
        assert isinstance(encoder, ProbeEncoder)
        return encoder.answer(population, reader.probed)  # the same for all networks of an orbit

    def linear_reader(self, number: int) -> LinearReader:
        """Return the linear reader of an architecture, by the index of the architecture; see `is_linear`."""
        found = self.linear[number]
        assert isinstance(found, LinearReader)
        return found

    def statistics(self, population: Mapping[str, Tensor], *, symmetry: Symmetry | None = None) -> Tensor:
        """Return the statistics of canonical networks that linear readers use, `[models, statistics]`.

        Raises:
            ValueError: The net cannot read the architecture of the networks, or has no linear reader.
        """
        return statistics_of(self._plain_values(self._find(population, symmetry), population))

    def read_linear(self, population: Mapping[str, Tensor], *, symmetry: Symmetry | None = None) -> Tensor:
        """Return the output of the linear reader of statistics.

        Raises:
            ValueError: The net cannot read the architecture of the networks, or has no linear reader.
        """
        reader = self._find(population, symmetry)
        values = self._plain_values(reader, population)
        return self.linear_reader(reader.number)(values)  # type: ignore[no-any-return]

    def _plain_values(self, reader: Reader, population: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of blocks of networks in which everything except the order of units is canonicalized."""
        if reader.plain is None:
            raise ValueError("this net has no linear reader of statistics; make it with `is_linear=True`")
        return reader.plain.read(reader.plain.canonicalize(population)[0])[0]

    def _groups(self, layout: Layout, population: Mapping[str, Tensor]) -> list[slice]:
        """Return slices of a population whose arrays have at most `LARGEST_ARRAY` entries, if smaller arrays are
        faster.
        """
        count = len(population[layout.parameters[0]])
        pairs = max((math.prod(block.sizes) for block in layout.pair_blocks), default=1)
        size = max(1, LARGEST_ARRAY // (2 * self.settings.width * max(1, pairs)))
        is_whole = any(t.device.type != "cpu" or not t.ndim or len(t) != count for t in population.values())
        if is_whole or not self.settings.layer.traits.keeps_pairs:
            return [slice(None)]
        return [slice(start, start + size) for start in range(0, count, size)]

    def _read(self, reader: Reader, population: Mapping[str, Tensor], conditions: Tensor | None) -> Any:
        """Return the head's output for some networks of a population at once."""
        canonical, element = reader.canonicalize(population)
        features = self._run(reader, canonical, len(self.layers), conditions)
        known = self.get_buffer(f"sizes_{reader.number}").tolist()
        sizes = dict(zip(reader.layout.parameters, known, strict=True))
        assert self.head is not None
        made = self.head(Read(features, reader.layout, reader.number, reader.layout.symmetry.sums(canonical), sizes))
        head = self.settings.head
        return reader.complete(population, made, element, head.changes) if isinstance(head, Equivariant) else made

    def canonical_features(self, population: Mapping[str, Tensor]) -> tuple[Features, Element | None]:
        """Return the features of networks after all layers, and the elements that canonicalized the networks.

        Features that signs change belong to the canonical networks, not to the networks in `population`. The value None
        stands for identity elements. The elements do not include translations.

        Raises:
            ValueError: The net cannot read the architecture of the networks.
        """
        reader = self._find(population)
        canonical, element = reader.canonicalize(population)
        return self._run(reader, canonical, len(self.layers), None), reader.from_given(population, element)

    def layout_of(self, population: Mapping[str, Tensor]) -> Layout:
        """Return the layout with which the net reads a population.

        Raises:
            ValueError: The net cannot read the architecture of the networks.
        """
        return self._find(population).layout

    def features(
        self, population: Mapping[str, Tensor], *, layers: int | None = None, conditions: Tensor | None = None
    ) -> Features:
        """Return the features of networks after `layers` layers, or after all layers by default.

        Raises:
            ValueError: The net cannot read the architecture of the networks, or has no layers.
        """
        if self.head is None:
            raise ValueError("a net of depth 0 reads only outputs at probes; give it a depth of at least 1")
        reader = self._find(population)
        count = len(self.layers) if layers is None else layers
        return self._run(reader, reader.canonicalize(population)[0], count, conditions)

    def _run(self, reader: Reader, canonical: Mapping[str, Tensor], layers: int, conditions: Tensor | None) -> Features:
        values, shares = reader.read(canonical)
        features: Features = self.encoders[reader.number](values, reader.layout, shares)
        if reader.probed is not None:
            features = self.probes[reader.number](features, canonical, reader.probed)
        for k, layer in enumerate(self.layers[:layers]):
            if conditions is not None:
                features = self.conditioned[k](features, conditions)
            features = layer(features, reader.layout)
        return features

    def _reader(self, symmetry: Symmetry, number: int, contracted: tuple[str, ...] | None = None) -> Reader:
        made, left = self.settings, self._left
        chosen = contracted if "linear" in made.parts else ()
        make = partial(Reader.of, symmetry, number, made.layer, made.depth, made.parts, contracted=chosen)
        return replace(make(left, readers=made.readers), plain=make((), readers=()) if made.is_linear else None)

    def _trace(self, reader: Reader, made: Reader, module: nn.Module | None) -> Probed | None:
        """Trace the evaluation of a module on the probes of a reader; return None if there are no probes."""
        if reader.probed is None:
            return None
        if module is None:
            raise ValueError("this net runs networks on probes; give the `module` of the other architecture, too")
        encoder = self.probes[reader.number]
        assert isinstance(encoder, ProbeEncoder)
        probed = encoder.trace(module, made.layout)
        if probed.key != reader.probed.key:
            raise ValueError(
                "the activations of this module belong to other sets of units than those of the net's module; make a "
                "net for both and train it on both"
            )
        return probed

    def _find(self, population: Mapping[str, Tensor], symmetry: Symmetry | None = None) -> Reader:
        found = [reader for reader in self._readers if reader.fits(population, symmetry)]
        if not found:
            raise ValueError(tell_difference(population, self.layout))
        if len({reader.number for reader in found}) > 1:
            raise ValueError(
                f"{len(found)} architectures of this net have the tensors of these networks, but different symmetries; "
                "choose one with `net(population, symmetry=...)`"
            )
        require_values(population, found[0].layout)
        return found[0]


def _join(made: list[Any]) -> Any:
    """Concatenate the head's outputs for slices of a population."""
    if isinstance(made[0], Tensor):
        return torch.cat(made)
    return {name: torch.cat([part[name] for part in made]) for name in made[0]}


def _require_fitting(settings: Settings, symmetries: Sequence[Symmetry], probes: Sequence[Probes]) -> None:
    """Raise a ValueError unless a net with given settings can read networks with given symmetries and probes."""
    if not settings.depth and (not probes or settings.answers is None):
        raise ValueError(
            "with depth=0, a net reads only outputs at probes, for an `Invariant` head; give `probes` and this head, "
            "or a depth of at least 1"
        )
    if not symmetries or (len(symmetries) > 1 and not settings.layer.traits.is_shared):
        raise ValueError(
            f"{type(settings.layer).__name__} has parameters for single tensors, so it reads one architecture, not "
            f"{len(symmetries)}; choose a layer that is shared by all tensors, such as MessagePassing"
        )
    axes = {(p.parameter, p.axis) for one in symmetries for group in one.groups for p in group.placements}
    unknown = sorted({*settings.readers} - axes)
    if unknown:
        raise ValueError(
            f"no group acts on {unknown[0]}; give readers as (parameter, axis), such as {sorted(axes)[:3]}"
        )
    if probes and len(probes) != len(symmetries):
        raise ValueError(
            f"there are probes for {len(probes)} architectures, but this net reads {len(symmetries)}; give one "
            "`Probes` for each symmetry, in the same order"
        )
