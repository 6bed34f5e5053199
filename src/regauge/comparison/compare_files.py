"""Lineages of many networks in files: trees that show which network descends from which."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from os.path import commonpath
from pathlib import Path
from typing import Any

import torch

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.file_formats import weight_suffixes
from regauge.checkpoints.location import ALIGNMENT, locate
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.output import Output
from regauge.comparison.comparison import Comparison
from regauge.comparison.comparison_report import require_page, write_page
from regauge.comparison.independence import DRAWS
from regauge.comparison.lineage import Lineage, compare_many
from regauge.comparison.origins import named_parents
from regauge.comparison.relatives import NO_TRACING, Relatives, open_relatives
from regauge.comparison.trees import tree_lines
from regauge.core.arguments import check_arguments
from regauge.core.families import connected
from regauge.core.given import given_or_seed
from regauge.core.params import require_finite
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.hub import Model


@dataclass(frozen=True)
class Lineages:
    """The lineages of networks in files.

    Each network is compared with all networks that have an architecture in common with it.

    Attributes:
        lineages: One lineage for each architecture.
        left_out: The names of networks that cannot be compared with any other network.
        failures: The errors of networks that could not be opened, or that contain NaN or Inf.
        notes: Notes on the parts that tracing excluded.
    """

    lineages: tuple[Lineage, ...]
    left_out: tuple[str, ...]
    failures: tuple[Exception, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def unrelated(self) -> list[str]:
        """Return the names of the compared networks that are related to none of the other networks."""
        return [one for lineage in self.lineages for family in lineage.families if len(family) == 1 for one in family]

    def __str__(self) -> str:
        """Return the trees, the averages and the unrelated networks as text."""
        parts = ["\n".join(tree_lines(list(tree))) for lineage in self.lineages for tree in lineage.trees]
        parts += [str(average) for lineage in self.lineages for average in lineage.averages]
        if self.unrelated:
            parts.append(f"unrelated to all others: {', '.join(self.unrelated)}")
        if self.left_out:
            names = ", ".join(self.left_out)
            parts.append(f"left out, because they cannot be compared with any other network: {names}")
        return "\n\n".join(parts)

    @property
    def facts(self) -> dict[str, Any]:
        """Return pairs, families, averages and trees as plain values for JSON and HTML pages."""
        return {
            "pairs": [row for lineage in self.lineages for row in lineage.rows],
            "families": [list(family) for lineage in self.lineages for family in lineage.families],
            "averages": [
                {"child": one.child, "parents": list(one.parents), "weights": list(one.weights), "is_told": one.is_told}
                for lineage in self.lineages
                for one in lineage.averages
            ],
            "trees": [
                [vars(one) | {"is_certain": one.is_certain} for one in tree]
                for lineage in self.lineages
                for tree in lineage.trees
            ],
            "names": [list(lineage.names) for lineage in self.lineages],
            "unrelated": self.unrelated,
            "left_out": list(self.left_out),
        }


@check_arguments
def compare_files(
    paths: Sequence[str | Path],
    model: Model | str | Path | None = None,
    *,
    symmetry: Symmetry | None = None,
    tracing: Mapping[str, Any] = NO_TRACING,
    draws: int = DRAWS,
    generator: torch.Generator | None = None,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    progress: Progress = no_progress,
) -> Lineages:
    """Compare all pairs of networks in files, and build trees of related networks.

    All entries are compared, because trees and averages are computed from distances, which a sample would only
    estimate.

    Networks with the same shapes are opened together. A network with shapes that no other network has is compared with
    networks of the same architecture but other widths, vocabularies or numbers of layers. Files that are damaged, and
    networks with NaN or Inf, are left out.

    Args:
        paths: The checkpoints. The result names checkpoints by their paths relative to their common folder.
        model: The model of the checkpoints, or its name. Default: the model is found as in `rg.open_networks`.
        symmetry: The symmetry of the networks. Default: the symmetry of the model.
        tracing: Further settings of `rg.open_model`, used if the model is given by name.
        draws: The number of random elements in each independence test.
        generator: The source of randomness for the tests. The test of each pair starts from the same generator state.
            Default: a generator with seed 0.
        out: The path of the HTML page to write, with matrices and trees.
        memory: The memory limit, as in `rg.compare`.
        progress: A function that shows how many pairs are done.

    Raises:
        FileExistsError: The page exists and may not be replaced.
        FileNotFoundError: A checkpoint does not exist.
        KeyError: No network could be opened, because a parameter on which the symmetry acts is missing.
        ValueError: A checkpoint is given twice, no checkpoint could be opened, or no two checkpoints can be compared.
    """
    names = dict(zip(_short([Path(path) for path in paths]), map(Path, paths), strict=True))
    page, generator = require_page(out), given_or_seed(generator)
    state = generator.get_state()
    places, failures = _open(
        names, partial(open_relatives, model=model, symmetry=symmetry, tracing=tracing, memory=memory)
    )
    if not places and failures:
        raise failures[0]

    def compare(a: str, b: str) -> Comparison | None:
        one, two = places[a], places[b]
        if not _can_compare(one, two):
            return None
        chance = torch.Generator().set_state(state)
        try:
            return one.relatives.compare(one.checkpoint, two.checkpoint, draws=draws, generator=chance, exact=True)
        except ValueError as error:  # The error names "the first" or "the second network".
            raise ValueError(f"comparing {a!r} with {b!r}: {error}") from error

    lineages = []
    for own in _together(places):
        parents = named_parents({name: places[name].checkpoint for name in own})
        is_streamed = any(places[name].relatives.is_streamed for name in own)
        read = None if is_streamed else lambda name: copy(places[name].checkpoint)
        lineages.append(compare_many(own, compare, parents=parents, read=read, progress=progress))
    if not lineages:
        raise ValueError(
            f"no two of the {len(names)} checkpoints have tensors of the same names and shapes; compare two at a time"
        )
    left_out = tuple(name for name in names if name not in places)
    notes = dict.fromkeys(note for place in places.values() for note in place.relatives.networks.notes)
    result = Lineages(tuple(lineages), left_out, tuple(failures), tuple(notes))
    if page is not None:
        distances = {f"{len(one.names)} networks": one.distances for one in result.lineages}
        write_page(page, result.facts, generator.initial_seed(), distances)
    return result


def find_checkpoints(paths: Sequence[str | Path]) -> list[Path]:
    """Return the checkpoints at the given paths.

    A folder that is not itself a checkpoint is replaced by the checkpoints in it, which are files or folders.

    Raises:
        ValueError: A folder contains no checkpoint.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        inside = [] if not path.is_dir() or _is_checkpoint(path) else sorted(path.iterdir())
        if path.is_dir() and inside and not any(map(_is_checkpoint, inside)):
            raise ValueError(
                f"there is no checkpoint in the folder {str(path)!r}, nor in the folders in it; name a folder with "
                "checkpoints"
            )
        found += [one for one in inside if _is_checkpoint(one)] or [path]
    return found


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is a folder with a checkpoint, or a file of weights."""
    if not path.is_dir():
        return path.suffix in weight_suffixes(is_read=True) and not path.name.endswith(ALIGNMENT)
    try:
        locate(path)
    except (OSError, ValueError):
        return False
    return True


@dataclass(frozen=True)
class _Place:
    """A checkpoint, and the group of networks with which it was opened. `is_own` states whether the checkpoint has the
    shapes of the group's symmetry.
    """

    relatives: Relatives
    checkpoint: Checkpoint
    is_own: bool


def _open(
    names: Mapping[str, Path], open_all: Callable[[Sequence[Path]], Relatives]
) -> tuple[dict[str, _Place], list[Exception]]:
    """Return the checkpoints that can be compared with another checkpoint, and the errors of all other checkpoints."""
    classes: dict[tuple[Any, ...], list[str]] = {}
    places, failures, rest = dict[str, _Place](), list[Exception](), list[str]()
    for name, path in names.items():
        try:
            with Checkpoint.open(path) as one:
                classes.setdefault(tuple(sorted((n, t.shape) for n, t in one.stored.items())), []).append(name)
        except ValueError as error:  # For example, a damaged file.
            failures.append(error)
    lead = next((own for own in classes.values() if len(own) > 1), next(iter(classes.values()), None))
    for own in classes.values():
        if len(own) > 1 or own is lead:
            try:
                opened = open_all([names[name] for name in own])
            except (ValueError, KeyError) as error:  # For example, another model.
                failures.append(error)
                rest += own
                continue
            places |= {n: _Place(opened, one, True) for n, one in zip(own, opened.networks.checkpoints, strict=True)}
        else:
            rest += own
    for relatives in {id(place.relatives): place.relatives for place in places.values()}.values():
        for name in [name for name in rest if name not in places]:
            with suppress(ValueError, KeyError):
                other = relatives.read_other(Checkpoint.open(names[name]))
                places[name] = _Place(relatives, other, False)
    for name, place in list(places.items()):
        try:
            for key in place.checkpoint:  # one tensor at a time, because networks may exceed the memory
                structure = place.relatives.networks.symmetry.structure
                require_finite({key: place.checkpoint[key]}, place.checkpoint.label, structure)
        except ValueError as error:
            failures.append(error)
            del places[name]
    if len(places) == 1:
        places = {}
    return {name: places[name] for name in names if name in places}, failures


def _together(places: Mapping[str, _Place]) -> list[list[str]]:
    """Return the names of the networks that can be compared with one another, in their given order."""
    pairs = [{a, b} for a, b in combinations(places, 2) if _can_compare(places[a], places[b])]
    return [[name for name in places if name in part] for part in connected(pairs)]


def _can_compare(one: _Place, two: _Place) -> bool:
    if one.relatives is two.relatives and one.is_own and two.is_own:
        return True
    return one.relatives.can_compare(one.checkpoint, two.checkpoint)


def _short(paths: Sequence[Path]) -> list[str]:
    """Return paths relative to their common folder."""
    folder = Path(commonpath([path.resolve().parent for path in paths]))
    names = [str(path.resolve().relative_to(folder)) for path in paths]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is given more than once; name each checkpoint once")
    return names
