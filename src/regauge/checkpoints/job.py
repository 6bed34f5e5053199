"""Networks in files: whether they are worked on in memory or streamed, and where the result goes.

In memory, networks are read as a whole. Where they need more than the memory that is allowed, they stay on the disk and
are read tensor by tensor. In both cases the result, one file or a folder, is made in a folder next to the output, and
takes its place when it is complete.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint, require_same_kinds
from regauge.checkpoints.checkpoint_names import ALIGNMENT
from regauge.checkpoints.disk import require_space
from regauge.checkpoints.form import AS_STORED
from regauge.checkpoints.formats.file_formats import weight_suffixes
from regauge.checkpoints.formats.location import ADAPTER_CONFIG
from regauge.checkpoints.memory_limit import MemoryLimit, size_text
from regauge.checkpoints.names.from_transformers import name_by, share
from regauge.checkpoints.output import Output
from regauge.checkpoints.outputs.provenance import Provenance, name_networks
from regauge.checkpoints.outputs.staging import Staging, require_place
from regauge.checkpoints.writing import Pieces, Shard, require_writable
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry

ALIGNING = 5
"""Copies in float32 of one network that aligning two in memory holds."""
MERGING = 8
"""Copies of each network that merging holds, which aligns them with one another; measured with two and five."""

Network: TypeAlias = Mapping[str, Tensor] | str | Path
"""Parameters by name, or a checkpoint: its path, or opened (which is a mapping, too)."""


@dataclass(frozen=True)
class FileJob:
    """Checkpoints of which one is made.

    Attributes:
        number: The index of the checkpoint whose names, dtypes and files the output takes over.
        output: The place of the result; None if it is not written.
        beside: The path of a further file, if any, by the name of the output: next to a `.safetensors` file or in a
            folder.
        limit: The limit on memory.
        copies: Copies in float32 of the values of one network that are held in memory, besides the stored ones.
    """

    checkpoints: tuple[Checkpoint, ...]
    number: int
    output: Output | None = None
    beside: Callable[[Path], Path] | None = None
    limit: MemoryLimit = field(default_factory=lambda: MemoryLimit.of(None))
    copies: int = ALIGNING

    @property
    def source(self) -> Checkpoint:
        """The checkpoint whose names, dtypes and further files the output takes over."""
        return self.checkpoints[self.number]

    @property
    def out(self) -> Path | None:
        """The file or folder that is written, if any."""
        return None if self.output is None else self.output.path

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The files of weights that are written."""
        file = self.output.path.name if self.output is not None and self.output.is_file else None
        return tuple(self.source.layout(file))

    @property
    def is_streamed(self) -> bool:
        """Whether the networks stay on the disk, because in memory they would need more than is allowed."""
        return all(checkpoint.is_lazy for checkpoint in self.checkpoints) and not self.fits()

    @property
    def nbytes(self) -> int:
        """The bytes that working in memory holds at once."""
        return self.needed(self.copies)

    def needed(self, copies: int) -> int:
        """Bytes of the checkpoints in memory, and of so many copies of one of them in float32."""
        values = sum(one.nbytes // one.dtype.itemsize for one in self.source.stored.values())
        return sum(checkpoint.nbytes for checkpoint in self.checkpoints) + 4 * copies * values

    def fits(self, copies: int | None = None) -> bool:
        """Whether working in memory is allowed, with `copies` where it holds more than usual."""
        return (self.nbytes if copies is None else self.needed(copies)) <= self.limit.nbytes

    @property
    def needs_memory(self) -> str:
        """The end of a sentence about what cannot be done to streamed networks."""
        return (
            f"needs the networks in memory, which takes {size_text(self.nbytes)}, more than the "
            f"{size_text(self.limit.nbytes)} that are allowed: leave it out, or allow more --memory"
        )

    def require_memory(self, work: str) -> None:
        """Raise a ValueError unless the networks fit in memory for some work, the begin of a sentence."""
        if not self.fits():
            raise ValueError(
                f"{work} needs all values in memory, which takes {size_text(self.nbytes)}, more than the "
                f"{size_text(self.limit.nbytes)} that are allowed: allow more --memory"
            )

    def named_by(self, symmetry: Symmetry) -> "FileJob":
        """A job with the checkpoints under the names of a symmetry, where files have other names than models."""
        return replace(self, checkpoints=share([name_by(one, symmetry) for one in self.checkpoints]))

    def require_output(self) -> None:
        """Refuse an output that cannot be written, before any work is done for it.

        Raises:
            FileExistsError: It, or the file written next to it, exists and may not be replaced.
            FileNotFoundError: Its folder does not exist.
            OSError: The disk has no room for it.
            ValueError: Another process is writing it, or it is another kind of file than `.safetensors`.
        """
        self.require_name()
        if self.out is not None:
            require_space(self.out, sum(shard.nbytes for shard in self.shards))

    def require_name(self) -> None:
        """The same, without a look at the room on the disk."""
        if self.output is None or self.out is None:
            return
        if not self.output.is_file and self.out.name.endswith((*weight_suffixes(), ".json")):
            written = " or ".join(weight_suffixes(is_written=True))
            raise ValueError(f"the output {str(self.out)!r} must end in {written}, or be the name of a folder")
        if self.out.name.endswith(ALIGNMENT):
            raise ValueError(f"the output {str(self.out)!r} is the name of an alignment; leave {ALIGNMENT} out")
        require_place(self.out, overwrite=self.output.overwrite)
        if self.beside is not None and not self.output.resume and self.output.is_file:
            beside = self.beside(self.out)
            require_writable(beside, overwrite=self.output.overwrite, suffixes=(beside.suffix,))

    def write(
        self,
        made: Mapping[str, Tensor] | Pieces,
        save_beside: Callable[[Path], object] | None = None,
        progress: Progress = no_progress,
    ) -> None:
        """Write a result, whole or not at all, if it is to be written; what an interrupted run left is made anew.

        Args:
            made: The result in memory, or its tensors piece by piece.
            save_beside: Writes the file that belongs next to it, under the name that it is given.
            progress: Shows how much is written.
        """
        if self.output is None:
            return
        pieces = made if callable(made) else lambda name: iter([made[name].detach()])
        output = replace(self.output, overwrite=self.output.overwrite or self.output.resume, resume=False)
        with replace(self, output=output).stage(None) as staging:
            staging.write(self.shards, pieces, progress)
            if save_beside is not None and self.beside is not None:
                save_beside(staging.content / self.beside(staging.out).name)
            staging.publish(self.shards, self.source)

    def stage(self, inputs: Any, nbytes: int | None = None) -> Staging:
        """Open the folder in which the output of `nbytes` is made; a run is resumed only from equal inputs.

        Raises:
            ValueError: There is no output, or what is to be resumed was made from other inputs.
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
        )
        staging.beside = dict(self.source.replaced)
        return staging


def open_job(
    networks: Sequence[Network],
    number: int,
    beside: Callable[[Path], Path] | None = None,
    *,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    copies: int = ALIGNING,
) -> FileJob | None:
    """Open networks that are in files, and read their headers; None if they are dictionaries.

    The result has the form of the checkpoint with this number unless the output says another one.

    Raises:
        TypeError: Some networks are in files, and others are dictionaries, or all are and the result is to be written.
        FileNotFoundError: A checkpoint is not there.
        ValueError: A checkpoint is damaged, or the memory cannot be read.
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
    require_same_kinds(checkpoints)
    adapters = [one for one in checkpoints if one.is_adapter]
    if adapters:
        if len(adapters) < len(checkpoints):
            raise ValueError(
                f"{adapters[0].label!r} is an adapter, and others are networks; name a network with its adapter as "
                "BASE+ADAPTER, or give adapters of one base alone"
            )
        from regauge.checkpoints.padded import match_adapters

        checkpoints = match_adapters(checkpoints, number)
    source = checkpoints[number]
    if ADAPTER_CONFIG in source.replaced and output is not None and output.is_file:
        raise ValueError(
            f"{source.label!r} gets other ranks, which its {ADAPTER_CONFIG} has to say: give a folder as the output"
        )
    return FileJob(checkpoints, number, output, beside, MemoryLimit.of(memory), copies)


def open_call(
    command: str,
    settings: Mapping[str, Any],
    named: Mapping[str, object],
    networks: Sequence[Network],
    number: int,
    beside: Callable[[Path], Path] | None = None,
    *,
    symmetry: Symmetry,
    generator: torch.Generator | None = None,
    element: str | None = None,
    out: Output | str | Path | None,
    memory: int | str | MemoryLimit | None,
    copies: int = ALIGNING,
) -> FileJob | None:
    """Open the networks of a call from Python under the names of its symmetry; see `open_job`.

    Unless it is given, the provenance is made of the call: its settings, and the networks by what they are for.

    Raises:
        FileExistsError: The output exists, and may not be replaced.
    """
    output = None if out is None else Output.of(out)
    if output is not None and output.provenance is None:
        seed = None if generator is None else generator.initial_seed()
        origin = Provenance(command, {**settings, **output.form.settings}, name_networks(**named), seed, element)
        output = replace(output, provenance=origin)
    job = open_job(networks, number, beside, out=output, memory=memory, copies=copies)
    if job is None:
        return None
    job.require_output()
    return job.named_by(symmetry)
