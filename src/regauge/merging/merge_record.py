"""A record of a merge: inputs, rule, distances and metrics; a model card."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from regauge.checkpoints.job import WORKS
from regauge.checkpoints.plain_files import short_paths
from regauge.checkpoints.writing import path_beside
from regauge.core.element import Element
from regauge.core.escaping import escape, escape_code, escape_markdown, markdown_table, text_table
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.merging.settings import Number

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class MergeRecord:
    """A record of how networks were merged, in numbers.

    Attributes:
        networks: A label for each network; the card has paths without the folders that all of them lie in.
        base: The label of the base, if there is one.
        rule: The rule that combined the aligned networks.
        alignment: The method that aligned them.
        weights: Weight of each network in the result: shares of a mean, or factors of task vectors; settings as given
            where they differ from tensor to tensor.
        initial: Objective of the alignment at the identities.
        objective: Objective that the alignment reached; larger is better.
        before: Euclidean distance of each network to the base, or else to the first network, over all parameters
            without running statistics.
        after: Distances of the aligned networks.
        data: The names of the data that chose, and of the data that judged. Metrics are measured on the latter.
        metrics: Metrics of each network on the task, prepared as the result is; empty without a task.
        base_metrics: Metrics of the base.
        merged_metrics: Metrics of the result.
        unaligned_metrics: Metrics of the same mean without alignment; None for task vectors.
        reports: Reports of the alignments, where the networks were streamed from the disk.
        notes: Sentences about what could not be taken over from the first network or the base.
        origin: The origin of the networks, in short: pairs of a name and a text.
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
        """The record as Markdown."""
        return self._write(is_card=True)

    def __str__(self) -> str:
        return self._write(is_card=False)

    def _write(self, *, is_card: bool) -> str:
        """The record as Markdown, or as text for a terminal."""
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
    """One network made of many.

    Attributes:
        params: The merged parameters, with the dtypes, devices and integer buffers of the first network or the base; of
            streamed networks a mapping that reads them when they are asked for.
        elements: The element that moved each network before they were combined.
        symmetry: The symmetry that the elements belong to, with every size known.
        record: The record of the merge; its `card` is a model card.
    """

    params: Params = field(repr=False)
    elements: tuple[Element, ...]
    symmetry: Symmetry
    record: MergeRecord = field(repr=False)

    def __str__(self) -> str:
        return str(self.record)


def require_labels(labels: Sequence[str] | None, count: int, has_base: bool) -> list[str]:
    """Labels of `count` networks, and of the base last; numbers by default.

    Raises:
        ValueError: They are not as many.
    """
    if labels is None:
        return [f"network {k + 1}" for k in range(count)] + ["base"] * has_base
    if len(labels) != count + has_base:
        raise ValueError(f"labels are {list(labels)}, but {count + has_base} networks need one each (the base last)")
    return list(labels)


def card_path(checkpoint: Path) -> Path:
    """The path of a merged checkpoint's card: `out.md` for `out.safetensors`, or a file in a folder."""
    return path_beside(checkpoint, WORKS["merging"].beside)
