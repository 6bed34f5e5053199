"""Records of merges, also as model cards: inputs, rule, alignment, distances and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import WORKS
from regauge.checkpoints.plain_files import short_paths
from regauge.checkpoints.writing import path_beside
from regauge.core.counted import count
from regauge.core.element import Element
from regauge.core.escaping import escape, escape_code, escape_markdown, markdown_table, text_table
from regauge.core.families import CHUNK, row_ranges
from regauge.core.interpolation import ExplainedSums, mean_share
from regauge.core.params import Params, work_dtype
from regauge.core.symmetry import Symmetry
from regauge.merging.blend import read_piece
from regauge.merging.settings import Number

Metrics = Mapping[str, float]
SHARE = 0.1
"""A threshold. Alignment is needed if it brings networks closer, and permutes or negates this share of a group's units.

In `benchmarks/aligned_merges.py`, alignment permutes no unit of a fine-tune, and nearly all units of an unrelated
network.
"""
CLOSER = 0.5
"""A threshold. Alignment is needed if it reduces the distance below this share. In `benchmarks/aligned_merges.py`,
fine-tunes keep 0.97 of the distance or more."""
EXPLAINED = 0.5
"""A threshold. Alignment is needed if it increases the explained share so much that the ratio before / after is
smaller.

In `benchmarks/aligned_merges.py`, the ratio is at least 0.99 for fine-tunes, and below 0.02 for unrelated networks.
"""


@dataclass(frozen=True)
class Need:
    """The changes that an alignment of a network to a reference network would make.

    Attributes:
        moved: The number of units that alignment permutes or negates.
        units: The total number of units.
        worst: The largest share of permuted or negated units in a group.
        before: The distance of the unaligned networks, without running statistics.
        after: The distance of the aligned networks.
        stored: The mean explained share (squared correlation) of the matrices before alignment; see `ExplainedTensor`.
            None if units cannot be distinguished.
        aligned: The mean explained share after alignment.
        is_carried: Whether the networks differ in structure tensors, such as masks, and the element maps one structure
            to the other.
    """

    moved: int
    units: int
    worst: float
    before: float
    after: float
    stored: float | None
    aligned: float | None
    is_carried: bool

    @classmethod
    def of(
        cls,
        symmetry: Symmetry,
        element: Element,
        reference: Mapping[str, Tensor],
        network: Mapping[str, Tensor],
        moved: Mapping[str, Tensor],
    ) -> "Need":
        """Compare a network, as stored and after its transformation by an element, with a reference network.

        Args:
            symmetry: The symmetry, with every size known.
            element: The element that aligns the network to the reference.
            reference: The reference network. Each network is a dictionary of parameters by name, or a checkpoint.
            network: The unaligned network.
            moved: The network, transformed by the element.
        """
        identity, changed_units, units, worst = symmetry.identity(), 0, 0, 0.0
        for name, value in element.items():
            changed = None
            for part in ("perm", "sign"):
                own, stays = getattr(value, part), getattr(identity[name], part)
                if own is not None:
                    differs = (own != stays).flatten(0, -2).any(0) if own.ndim > 1 else own != stays
                    changed = differs if changed is None else changed | differs
            if changed is not None and changed.numel():
                number = int(changed.sum())
                changed_units, units = changed_units + number, units + changed.numel()
                worst = max(worst, number / changed.numel())
        shares, is_carried = [], False
        blanks = reference.on_meta() if isinstance(reference, Checkpoint) else reference
        for name, blank in blanks.items():
            if name in symmetry.structure:
                pair = [read_piece(one, name, None, blank.dtype) for one in (reference, network)]
                is_carried |= not torch.equal(*pair)
            elif blank.is_floating_point() and name not in symmetry.buffers:
                total, dtype = ExplainedSums(), work_dtype(blank.dtype)
                for rows in row_ranges(symmetry, name, blank.shape, CHUNK // 4):
                    x, y, z = (read_piece(one, name, rows, dtype) for one in (reference, network, moved))
                    total.add(symmetry, name, x, y.to(x), z.to(x))
                shares.append(total.tensor(name, blank.shape))
        before, after = (sqrt(sum(one.squares[k] for one in shares)) for k in range(2))
        stored, aligned = mean_share(shares, is_after=False), mean_share(shares)
        return cls(changed_units, units, worst, before, after, stored, aligned, is_carried)

    @property
    def is_there(self) -> bool:
        """Return whether alignment is needed, because it changes the network more than fine-tuning could have changed
        it.
        """
        explained = True if self.stored is None else self.stored >= EXPLAINED * (self.aligned or 0.0)
        # In noisy networks, some units are matched wrongly, but permuting them does not bring the networks closer.
        is_better = self.after < self.before or (self.aligned or 0.0) > (self.stored or 0.0)
        is_reordered = self.worst >= SHARE and is_better
        return self.is_carried or is_reordered or self.after < CLOSER * self.before or not explained

    def explain(self, label: str, reference: str) -> str:
        """Return a sentence that states whether alignment is needed, with the measured numbers."""
        numbers = f"{self.moved} of {self.units} units move, distance {self.before:.4g} -> {self.after:.4g}"
        if self.is_there:
            return f"{label} is aligned to {reference}: {numbers}"
        return f"{label} needs no alignment, because its units correspond to those of {reference} ({numbers})"


@dataclass(frozen=True)
class Needs:
    """The changes that an alignment of several networks to one network would make, and the decision for each network.

    Attributes:
        each: The changes that the alignment of each network would make.
        is_forced: Whether all networks are transformed, even if alignment is not needed.
    """

    each: tuple[Need, ...]
    is_forced: bool = False

    @property
    def is_moved(self) -> tuple[bool, ...]:
        """Return, for each network, whether it is transformed."""
        return tuple(self.is_forced or need.is_there for need in self.each)

    @property
    def spans(self) -> tuple[tuple[float, float], ...]:
        """Return the distance of each network before and after alignment."""
        return tuple(
            (n.before, n.after if moves else n.before) for n, moves in zip(self.each, self.is_moved, strict=True)
        )

    def keep(self, elements: Sequence[Element], symmetry: Symmetry) -> list[Element]:
        """Return the elements of the networks that are transformed, and the identity for all other networks."""
        return [one if moves else symmetry.identity() for one, moves in zip(elements, self.is_moved, strict=True)]

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a note that states whether alignment helps, for the network with the smallest explained share.

        If the explained shares are unknown, return no note.
        """
        there = [need for need in self.each if need.is_there]
        told = [need for need in there or self.each if need.stored is not None]
        if not told or (self.is_forced and not there):
            return ()
        least = min(told, key=lambda need: need.stored or 0.0)
        if not there:
            return (f"one base, {least.stored:.0%} of the weights are explained: aligning changes nothing",)
        which = f"{len(there)} of {count(self.each, 'network')}" if len(self.each) > 1 else "the other network"
        return (
            f"aligning helps {which}: {least.stored:.0%} of the weights are explained as stored, {least.aligned:.0%} "
            "after alignment",
        )


@dataclass(frozen=True)
class MergeRecord:
    """A record of a merge: the inputs and the rule, with measured distances and metrics.

    Attributes:
        networks: A label for each network. The card lists paths relative to the networks' common folder.
        base: The label of the base; None without a base.
        rule: The rule that combined the aligned networks.
        alignment: The method that aligned the networks; "none" if no network was transformed.
        weights: The weight of each network in the result: shares of a mean, or factors of task vectors. If weights
            differ between tensors, `weights` holds the settings as the caller gave them.
        initial: The objective of the alignment for the unaligned networks.
        objective: The alignment objective after alignment, or `initial` if no network was transformed; larger is
            better.
        before: The Euclidean distance of each unaligned network to the base, or to the first network without a base.
            Distances are over all parameters except running statistics.
        after: The Euclidean distances after alignment.
        data: The name of the data that methods used, and the name of the data on which metrics are measured.
        metrics: Metrics of each network on the task, after the same preparation as for the result. The dictionary is
            empty without a task.
        base_metrics: Metrics of the base.
        merged_metrics: Metrics of the result.
        unaligned_metrics: Metrics of the unaligned networks, merged by the same rule; None for task vectors.
        reports: Reports on the alignments, if the networks were streamed from the disk.
        notes: Remarks on whether alignment helps, and on tensors of the first network or the base that could not be
            copied to the result.
        origin: Facts about the origin of the networks, as pairs (name, text).
    """

    networks: tuple[str, ...]
    base: str | None
    rule: str
    alignment: str
    weights: tuple[Number | str, ...]
    initial: float
    objective: float
    before: tuple[float, ...]
    after: tuple[float, ...]
    data: tuple[str, str] | None = None
    metrics: tuple[Metrics, ...] = ()
    base_metrics: Metrics | None = None
    merged_metrics: Metrics | None = None
    unaligned_metrics: Metrics | None = None
    reports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    origin: tuple[tuple[str, str], ...] = ()

    @property
    def card(self) -> str:
        """Return the record as Markdown."""
        return self._write(is_card=True)

    def __str__(self) -> str:
        return self._write(is_card=False)

    def _write(self, *, is_card: bool) -> str:
        """Return the record: Markdown for a card, plain text for a terminal."""
        quote, code = (escape_markdown, escape_code) if is_card else (escape, escape)
        own = self.networks if self.base is None else (*self.networks, self.base)
        labels = [quote(one) for one in short_paths(own)]
        facts = [
            ("networks", str(len(self.networks))),
            *([] if self.base is None else [("base", labels[-1])]),
            ("rule", code(self.rule)),
            ("alignment", code(self.alignment)),
            ("objective of the alignment", f"{self.initial:.6g} before, {self.objective:.6g} after"),
            ("coordinates of", labels[0] if self.base is None else labels[-1]),
            *([] if self.data is None else zip(("chosen by", "judged by"), self.data, strict=True)),
        ]
        metrics: list[Metrics | None] = [*self.metrics] if self.metrics else [None] * len(self.networks)
        names = list(dict.fromkeys(name for one in (*metrics, self.merged_metrics) for name in one or ()))
        shares = [f"{one:.6g}" if isinstance(one, int | float) else str(one) for one in self.weights]
        spans = [(f"{x:.6g}", f"{y:.6g}") for x, y in zip(self.before, self.after, strict=True)]
        cells = [[share, *span] for share, span in zip(shares, spans, strict=True)]
        rows = [([label, *own], reached) for label, own, reached in zip(labels, cells, metrics, strict=False)]
        if self.base is not None:
            rows.insert(0, ([labels[-1], "base", "0", "0"], self.base_metrics))
        if self.merged_metrics is not None:
            rows.append((["**merged**" if is_card else "merged", "", "", ""], self.merged_metrics))
        if self.unaligned_metrics is not None:
            rows.append((["the same mean without alignment", "", "", ""], self.unaligned_metrics))
        table = [[*own, *(f"{of[name]:.6g}" if of and name in of else "" for name in names)] for own, of in rows]
        header, notes = ["network", "weight", "distance before", "distance after", *names], map(quote, self.notes)
        origin = [(quote(what), hashes) for what, hashes in self.origin]
        if not is_card:
            return "\n".join([*map(": ".join, facts), "", *text_table(header, table), *notes])
        lines = ["# Merged network", "", *markdown_table(["what", "value"], facts), "", *markdown_table(header, table)]
        if self.notes:
            lines += ["", *(f"- {note}" for note in notes)]
        if origin:
            lines += ["", *markdown_table(["where from", "SHA-256"], origin)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class MergeResult:
    """A network that was merged from several networks.

    Attributes:
        params: The merged parameters, with the dtypes, devices and integer buffers of the first network or the base. If
            the networks were streamed, `params` is a mapping that reads the parameters on access.
        elements: For each network, the element that transformed the network before the merge.
        symmetry: The symmetry to which the elements belong, with every size known.
        record: The record of the merge; its `card` is a model card.
    """

    params: Params = field(repr=False)
    elements: tuple[Element, ...]
    symmetry: Symmetry
    record: MergeRecord = field(repr=False)

    def __str__(self) -> str:
        return str(self.record)


def require_labels(labels: Sequence[str] | None, count: int, has_base: bool) -> list[str]:
    """Return labels of `count` networks, with the base's label last. By default, labels are indices.

    Raises:
        ValueError: The number of labels is wrong.
    """
    if labels is None:
        return [f"network {k + 1}" for k in range(count)] + ["base"] * has_base
    if len(labels) != count + has_base:
        raise ValueError(f"labels are {list(labels)}, but {count + has_base} networks need one each (the base last)")
    return list(labels)


def card_path(checkpoint: Path) -> Path:
    """Return the path of a merged checkpoint's model card: `out.md` for `out.safetensors`, or a file in its folder."""
    return path_beside(checkpoint, WORKS["merging"].beside)
