"""Jobs on networks in files, and the paths of their outputs. Networks are processed in memory or streamed.

In memory, networks are read completely. Networks that need more memory than the limit stay on the disk, and are read
tensor by tensor. The output, a file or a folder, is written to a staging folder next to its final path. When the output
is complete, it is moved to its final path.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from regauge.checkpoints.checkpoint import Checkpoint, require_same_kinds
from regauge.checkpoints.disk import require_space
from regauge.checkpoints.form import AS_STORED
from regauge.checkpoints.formats.file_formats import weight_suffixes
from regauge.checkpoints.formats.state_dicts import match
from regauge.checkpoints.location import ADAPTER_CONFIG, ALIGNMENT
from regauge.checkpoints.memory_limit import MemoryLimit, large_blocks_returned, size_text
from regauge.checkpoints.names.from_transformers import expected_of, name_by, name_for, share
from regauge.checkpoints.output import Output, alignment_label
from regauge.checkpoints.outputs.provenance import Provenance, name_networks
from regauge.checkpoints.outputs.staging import Staging, require_place
from regauge.checkpoints.writing import Pieces, Shard, path_beside, require_writable, save_text
from regauge.core.closest import character
from regauge.core.progress import Crew, Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.names import VERSION

Network: TypeAlias = Mapping[str, Tensor] | str | Path
"""A network: parameters by name, the path of a checkpoint, or an open checkpoint, which is also a mapping."""
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Work:
    """A kind of work on networks in memory.

    Attributes:
        copies: The number of additional copies of each network that the work holds, in float32 or, for networks in
            float64, in float64. The number for aligning was measured with networks of about 100 MB
            (`benchmarks/working_memory.py`).
        beside: The suffix of the file that is written next to the output, if any; see `path_beside`.
        behind: The number of further copies if networks are matched after translations and gains are removed (see
            `Symmetry.split`). None if the work does not match networks. Work that matches networks also holds the costs
            of matching.
    """

    copies: float
    beside: str = ""
    behind: float | None = None


WORKS = {
    "aligning": Work(2.1, ALIGNMENT, behind=0.75),
    "comparing": Work(3, behind=0.75),
    "aligning many networks": Work(8, ALIGNMENT, behind=0),
    "applying an alignment": Work(2.5),
    "merging": Work(8, ".md", behind=0),
    "transporting": Work(8, behind=0),
    "canonicalizing": Work(4.25, ALIGNMENT),
    "choosing a gauge": Work(8, ".gauge.json"),
    "learning a gauge by function": Work(96, ".gauge.json"),
    "pruning": Work(12, ".prune.json"),
    "repairing": Work(4),
}
"""Each kind of work, by its name in messages."""


LOG = logging.getLogger(__name__)
LIBRARIES = 48 << 20
"""The bytes of libraries that are imported when a model is differentiated for the first time, as measured."""
SEARCHED, SOLVED = 3, 10
"""The numbers of matrices that are in memory at once during an assignment, and during a singular value decomposition in
float64."""
SHARED = ("aligning", "merging")
"""Kinds of work that several processes can share."""


@dataclass(frozen=True)
class FileJob:
    """A job that makes one checkpoint from several checkpoints.

    Attributes:
        number: The index of the checkpoint whose names, dtypes and files the output has.
        output: The path and form of the output; None if no output is written.
        limit: The limit on memory.
        work: The work in memory, one of `WORKS`.
        learning: Bytes that learning an element holds in addition to the checkpoints; zero if nothing is learned.
        more_copies: The number of further copies of each network, if representatives are matched; zero before the
            symmetry is known.
        costs: Bytes of the costs of matching that are kept for all groups; zero before the symmetry is known.
        searching: Bytes that the search for the value of one group needs in addition.
    """

    checkpoints: tuple[Checkpoint, ...]
    number: int
    output: Output | None = None
    limit: MemoryLimit = field(default_factory=lambda: MemoryLimit.of(None))
    work: str = "aligning"
    learning: int = 0
    more_copies: float = 0
    costs: int = 0
    searching: int = 0

    @property
    def source(self) -> Checkpoint:
        """The checkpoint whose names, dtypes and other files the output has."""
        return self.checkpoints[self.number]

    @property
    def out(self) -> Path | None:
        """The path of the output file or folder, if an output is written."""
        return None if self.output is None else self.output.path

    @property
    def adapter(self) -> Checkpoint | None:
        """The adapter of the last network, if the result is also an adapter."""
        return self.checkpoints[-1].adapter

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The weight files of the output."""
        file = self.output.path.name if self.output is not None and self.output.is_file else None
        return tuple((self.adapter or self.source).layout(file))

    @property
    def is_streamed(self) -> bool:
        """Whether the networks stay on the disk because they would need more memory than the limit."""
        is_shared = self.output is not None and self.output.shared
        return all(checkpoint.is_lazy for checkpoint in self.checkpoints) and (is_shared or not self.fits)

    def streams(self, symmetry: Symmetry) -> bool:
        """Return whether the networks stay on the disk, given the memory that matching by a symmetry needs."""
        return self.matched_by(symmetry).is_streamed

    @property
    def crew(self) -> Crew:
        """The processes that share the work."""
        return Crew() if self.output is None else self.output.crew

    @property
    def nbytes(self) -> int:
        """The number of bytes that the work holds at once if networks are in memory."""
        copies = (WORKS[self.work].copies + self.more_copies) * len(self.checkpoints)
        held = max(self._copied(copies), self.learning)
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints) + held + self.costs + self.searching

    def _copied(self, copies: float) -> int:
        """Return the bytes of copies of one network in float32, or in float64 for tensors that have this dtype."""
        stored = self.source.stored.values()
        return int(copies * sum(one.nbytes // one.dtype.itemsize * max(4, one.dtype.itemsize) for one in stored))

    @property
    def fits(self) -> bool:
        """Whether the memory limit suffices for the work."""
        return self.nbytes <= self.limit.nbytes

    @property
    def needs_memory(self) -> str:
        """The end of an error sentence about work that needs networks in memory."""
        return (
            f"needs the networks in memory, which takes {size_text(self.nbytes)}, more than the "
            f"{size_text(self.limit.nbytes)} that are allowed: leave it out, or allow more `memory=`"
        )

    def require_memory(self, remedy: str = "") -> None:
        """Raise a ValueError, which also advises `remedy`, unless the memory limit suffices for the work."""
        if not self.fits:
            raise ValueError(
                f"{self.work} needs all values in memory, in float64, which takes {size_text(self.nbytes)}, more than "
                f"the {size_text(self.limit.nbytes)} that are allowed: allow more `memory=`{remedy}"
            )

    def learned(self, method: str, phases: Sequence[tuple[float, int]]) -> "FileJob":
        """Return the job with the memory that learning the elements needs, pair after pair, and log this memory.

        Every further network needs two copies: its representative, and the transformed network.

        Args:
            method: The alignment method that learns from data.
            phases: For each phase, the number of float32 copies of each network, and the number of bytes of the
                activations.

        Raises:
            ValueError: The memory exceeds the limit.
        """
        further = 2 * (len(self.checkpoints) - 2)
        held = max(self._copied(2 * copies + further) + activations for copies, activations in phases)
        job = replace(self, learning=max(self.learning, held + LIBRARIES))
        needed = f"{method} holds up to {size_text(job.nbytes)} at once, with the activations of one batch"
        if not job.fits:
            raise ValueError(
                f"{needed}. This is more than the {size_text(self.limit.nbytes)} that are allowed: allow more "
                "`memory=`, make batches smaller, or choose a method that needs no data, such as WeightMatching"
            )
        LOG.info(needed)
        return job

    def named_by(self, symmetry: Symmetry) -> "FileJob":
        """Return a job whose checkpoints have the tensor names of a symmetry, if the files use other names."""
        named = replace(self, checkpoints=share([name_by(one, symmetry) for one in self.checkpoints]))
        return named.matched_by(symmetry)

    def matched_by(self, symmetry: Symmetry) -> "FileJob":
        """Return a job that includes the memory for matching by a symmetry, if the work matches networks."""
        behind, dtypes = WORKS[self.work].behind, [one.dtype for one in self.source.stored.values()]
        if behind is None:
            return self
        costs, searching = matching_bytes(symmetry, max((4, *(dtype.itemsize for dtype in dtypes))))
        more = behind if symmetry.translations or symmetry.gains else 0.0
        return replace(self, more_copies=more, costs=costs, searching=searching)

    def named_for(self, module: nn.Module) -> "FileJob":
        """Return a job whose checkpoints are in memory, and whose tensors have the names in a module."""
        named = share([name_for(one, module) for one in self.checkpoints])
        whole = (one.with_params(match(one.params, expected_of(module, one), one.label)) for one in named)
        return replace(self, checkpoints=tuple(whole))

    def of(self, *checkpoints: Checkpoint) -> "FileJob":
        """Return a job with the given views of its checkpoints."""
        return replace(self, checkpoints=checkpoints)

    def require_output(self) -> None:
        """Raise an error if the output cannot be written, before any work is done for it.

        Raises:
            FileExistsError: The output, or the file next to it, exists and may not be replaced.
            FileNotFoundError: The folder of the output does not exist.
            OSError: The disk has no space for the output.
            ValueError: Another process is writing the output, or the output is a file with a suffix other than
                `.safetensors`.
        """
        self.require_name()
        if self.out is not None and self.crew.rank == 0:
            require_space(self.out, sum(shard.nbytes for shard in self.shards))

    def require_name(self) -> None:
        """Raise an error if the output's path is invalid, without checking the space on the disk."""
        if self.output is None or self.out is None:
            return
        if not self.output.is_file and self.out.name.endswith((*weight_suffixes(), ".json")):
            written = " or ".join(weight_suffixes(is_written=True))
            raise ValueError(f"the output {str(self.out)!r} must end in {written}, or be the name of a folder")
        if self.out.name.endswith(ALIGNMENT):
            raise ValueError(f"the output {str(self.out)!r} is the name of an alignment; leave {ALIGNMENT} out")
        if self.output.shared:
            self._require_shared(self.output)
        if self.crew.rank:  # the first process may be at work there
            return
        require_place(self.out, overwrite=self.output.overwrite)
        ending = WORKS[self.work].beside
        if ending and not self.output.resume and self.output.is_file:
            beside = path_beside(self.out, ending)
            require_writable(beside, overwrite=self.output.overwrite, suffixes=(beside.suffix,))

    def _require_shared(self, output: Output) -> None:
        """Raise an error if the output is shared by processes, but the work can only be done by a single process."""
        if self.work not in SHARED:
            output.require_alone(self.work)
        if output.is_file:
            raise ValueError(
                f"processes share the files of a folder, and {str(output.path)!r} is one file; name a folder"
            )
        whole = next((one for one in self.checkpoints if not one.is_lazy), None)
        if whole is not None:
            raise ValueError(
                f"{whole.label!r} can only be read as a whole, so processes cannot share its tensors; save it as "
                ".safetensors, or with torch.distributed.checkpoint"
            )

    def write(
        self,
        made: Mapping[str, Tensor] | Pieces,
        beside: str | Callable[[Path], object] | None = None,
        progress: Progress = no_progress,
    ) -> Checkpoint:
        """Write the output atomically and open it. Files of an interrupted run are not reused.

        Args:
            made: The result in memory, or a function that yields its tensors in chunks.
            beside: The text of the file next to the output, or a function that writes this file under a given name.
            progress: A function that shows the progress of writing.
        """
        assert self.output is not None
        pieces = made if callable(made) else lambda name: iter([made[name].detach()])
        output = replace(self.output, overwrite=self.output.overwrite or self.output.resume, resume=False)
        with replace(self, output=output).stage(None) as staging:
            staging.write(self.shards, pieces, progress)
            if beside is not None:
                path = staging.content / path_beside(staging.out, WORKS[self.work].beside).name
                save_text(beside, path) if isinstance(beside, str) else beside(path)
            written = staging.publish(self.shards, self.source)
        written.notes = self.source.notes
        return written

    def write_reported(
        self,
        made: Mapping[str, Tensor] | Pieces,
        kind: str,
        facts: Callable[[], Mapping[str, Any]],
        progress: Progress = no_progress,
    ) -> Checkpoint:
        """Write a result with a report next to it. The report is a JSON file of `facts`, optionally with an HTML page.

        `facts` is called last. The report begins with its kind and version, the checkpoint, and the seed in the
        provenance.
        """

        def save_report(path: Path) -> None:
            assert self.output is not None
            origin = self.output.provenance
            given = [] if origin is None else [one.path for one in origin.inputs if one.role == "checkpoint"]
            head = {"format": kind, "version": 1, "regauge": VERSION, "checkpoint": [*given, self.source.label][0]}
            head |= {} if origin is None else {"seed": origin.seed}
            save_text(json.dumps(head | dict(facts()), indent=1, allow_nan=False), path)
            if self.output.page is not None:
                save_text(self.output.page(path), path.with_suffix(".html"))

        return self.write(made, save_report, progress)

    def stage(self, inputs: Any, nbytes: int | None = None) -> Staging:
        """Open the staging folder of an output with `nbytes` bytes. A run is resumed only if its inputs are equal.

        Raises:
            ValueError: There is no output, or the run to be resumed had other inputs.
        """
        if self.output is None:
            raise ValueError(
                "these networks do not fit in the memory that is allowed: give `out`, a .safetensors file or a folder "
                "for the result, or allow more memory"
            )
        staging = Staging(
            self.output.path,
            inputs,
            resume=self.output.resume,
            overwrite=self.output.overwrite,
            provenance=self.output.provenance,
            nbytes=sum(shard.nbytes for shard in self.shards) if nbytes is None else nbytes,
            crew=self.crew,
        )
        staging.beside = dict(self.source.replaced)
        return staging


def matching_bytes(symmetry: Symmetry, itemsize: int) -> tuple[int, int]:
    """Return two bounds on the bytes of cost matrices: of all groups together, and in the search for the value of one
    group.

    Every group keeps the sum of its costs: one matrix for each combination of signs that weights can have. The search
    for the value of the largest group needs further matrices: a product, its copy and reduced costs, or the matrices of
    a singular value decomposition in float64.
    """
    held, most = 0, 0
    for group in symmetry.groups:
        if group.is_permuted or group.matrix != "none":
            entries = symmetry.count_copies(group.name) * group.size**2
            held += len({character(place) for place in group.placements}) * itemsize * entries
            is_rotated = group.matrix != "none" or group.behind_gains != "none"
            most = max(most, (SOLVED * 8 if is_rotated else SEARCHED * itemsize) * entries)
    return held, most


def with_files(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function such that it gives large freed memory blocks back to the system if networks are in files."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given = [one for value in args for one in (value if isinstance(value, list | tuple) else [value])]
        if not any(isinstance(one, str | Path | Checkpoint) for one in given):
            return function(*args, **kwargs)
        with large_blocks_returned():
            return function(*args, **kwargs)

    return call


def open_job(
    networks: Sequence[Network],
    number: int,
    *,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    work: str = "aligning",
) -> FileJob | None:
    """Open networks in files and read their headers; return None if the networks are dictionaries.

    The output has the form of the checkpoint with index `number`, unless `out` specifies another form.

    Raises:
        TypeError: Some networks are in files and others are dictionaries. The error is also raised if all networks are
            dictionaries, but an output was requested.
        FileNotFoundError: A checkpoint does not exist.
        ValueError: A checkpoint is damaged, or the memory limit cannot be read.
    """
    checkpoints = tuple(Checkpoint.open(one) for one in networks if isinstance(one, str | Path | Checkpoint))
    if not checkpoints and out is None and memory is None:
        return None
    if len(checkpoints) < len(networks):
        raise TypeError(
            "networks with `out` or `memory` must all be checkpoints, given by their paths; save the dictionaries as "
            ".safetensors, or give dictionaries only and save the result yourself"
        )
    output = None if out is None else Output.of(out)
    if output is not None and output.form != AS_STORED:
        checkpoints = tuple(one.written_as(output.form) for one in checkpoints)
    if work == "transporting" and [one.is_adapter for one in checkpoints] == [False, False, True]:
        checkpoints = (*checkpoints[:2], _add_adapter(checkpoints[1], checkpoints[2], output))
    require_same_kinds(checkpoints)
    adapters = [one for one in checkpoints if one.is_adapter]
    if adapters:
        if len(adapters) < len(checkpoints):
            raise ValueError(
                f"{adapters[0].label!r} is an adapter, but others are networks; name a network with its adapter as "
                "BASE+ADAPTER, or give only adapters of one base"
            )
        from regauge.checkpoints.padded import match_adapters

        checkpoints = match_adapters(checkpoints, number)
    source = checkpoints[number]
    if ADAPTER_CONFIG in source.replaced and output is not None and output.is_file:
        raise ValueError(
            f"the ranks of {source.label!r} change, and with them its {ADAPTER_CONFIG}: give a folder as the output"
        )
    return FileJob(checkpoints, number, output, MemoryLimit.of(memory), work)


def _add_adapter(base: Checkpoint, adapter: Checkpoint, output: Output | None) -> Checkpoint:
    """Return a base with an adapter. If an adapter is added, the result of the job is also an adapter."""
    if output is not None and (output.is_file or output.shard_size is not None):
        raise ValueError(
            f"{adapter.label!r} is an adapter, so the output is a folder with one file of weights: give a folder, "
            "without a shard size"
        )
    made = base.changed_by(adapter.path.parent)
    made.adapter = adapter
    return made


def open_call(
    command: str,
    settings: Mapping[str, Any],
    named: Mapping[str, Any],
    *,
    work: str,
    networks: Sequence[Network] | None = None,
    number: int = 0,
    symmetry: Symmetry | None = None,
    generator: torch.Generator | None = None,
    out: Output | str | Path | None,
    memory: int | str | MemoryLimit | None = None,
) -> FileJob | None:
    """Open the networks of a Python call, with the tensor names of a given symmetry; see `open_job`.

    By default, the provenance describes the call: its settings, and the networks by their roles.

    Args:
        command: The name of the called function.
        settings: The settings of the call, ready for JSON.
        named: The networks by role; None for networks that are not given.
        networks: The networks in the order of the job, if this order differs from the order of `named`.

    Raises:
        FileExistsError: The output exists and may not be replaced.
    """
    given = [one for one in named.values() if one is not None] if networks is None else networks
    output = None if out is None else Output.of(out)
    if output is not None and output.provenance is None:
        seed = None if generator is None else generator.initial_seed()
        element = alignment_label(output) if WORKS[work].beside == ALIGNMENT else None
        origin = Provenance(command, {**settings, **output.form.settings}, name_networks(**named), seed, element)
        output = replace(output, provenance=origin)
    job = open_job(given, number, out=output, memory=memory, work=work)
    if job is None:
        return None
    job.require_output()
    return job if symmetry is None else job.named_by(symmetry)
