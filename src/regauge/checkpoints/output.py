"""The path of a result, and the form in which the result is written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from regauge.checkpoints.form import Form
from regauge.checkpoints.formats.file_formats import is_single_file
from regauge.checkpoints.location import ALIGNMENT
from regauge.checkpoints.outputs.provenance import Provenance
from regauge.core.progress import Crew


@dataclass(frozen=True, init=False)
class Output:
    """The path of a verb's result, one `.safetensors` file or a folder, and the form in which the result is written.

    The result appears under its name only when all of it is on the disk. A plain path, `out="OUT"`, is equivalent to
    `Output("OUT")`.

    Attributes:
        path: A `.safetensors` file, or a folder. A folder gets the shards, and the further files of the source network,
            which is the network whose names and files the result takes over.
        overwrite: Whether an output of that name may be replaced. Files in a folder that do not belong to a checkpoint
            stay.
        resume: Whether to continue an interrupted run from its files. Work in memory is repeated.
        dtype: The dtype, or its name, to which floating-point tensors are rounded once. Values that the dtype cannot
            hold are refused. By default, each tensor keeps its dtype in the source network.
        shard_size: The largest size of the values in one file of a folder: bytes, or text such as "5GB". By default,
            the files are split as in the source network.
        provenance: The provenance of the output; by default, that of the call that writes the output.
        page: A function that renders the JSON file of a report as an HTML page, for verbs that write a report. By
            default there is no page.
        shared: Whether the other processes of torchrun or Slurm make the same call and do a share of the work. This is
            possible for `rg.align`, `rg.merge` and recipes, if checkpoints are read tensor by tensor and the output is
            a folder.

    Raises:
        ValueError: The dtype is unknown, or the shard size cannot be read or is not positive.
    """

    path: Path
    overwrite: bool = False
    resume: bool = False
    dtype: torch.dtype | None = None
    shard_size: int | str | None = None
    provenance: Provenance | None = None
    page: Callable[[Path], str] | None = None
    shared: bool = False

    def __init__(
        self,
        path: str | Path,
        overwrite: bool = False,
        resume: bool = False,
        dtype: torch.dtype | str | None = None,
        shard_size: int | str | None = None,
        provenance: Provenance | None = None,
        page: Callable[[Path], str] | None = None,
        shared: bool = False,
    ) -> None:
        form = Form.of(dtype, shard_size)
        given = (Path(path), overwrite, resume, form.dtype, form.shard_size, provenance, page, shared)
        for name, value in zip(self.__dataclass_fields__, given, strict=True):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, out: "Output | str | Path") -> "Output":
        """Return the given output, or an output with the given path."""
        return out if isinstance(out, Output) else cls(out)

    @property
    def is_file(self) -> bool:
        """Whether the output is one file of weights, not a folder."""
        return is_single_file(self.path)

    @property
    def crew(self) -> Crew:
        """The processes that make the output."""
        if not self.shared:
            return Crew()
        from regauge.checkpoints.outputs.processes import join  # imports torch.distributed

        return join()

    def require_alone(self, work: str) -> None:
        """Raise a ValueError if the output is shared, because a single process does this work."""
        if self.shared:
            raise ValueError(f"{work} is not shared by processes; leave `shared=True` out, and start one alone")

    @property
    def form(self) -> Form:
        """The form in which the network is written."""
        return Form.of(self.dtype, self.shard_size)


def alignment_label(out: Output | str | Path | None) -> str:
    """Return the file name of an output's alignment for a provenance.

    The name does not depend on the name of the output.
    """
    return f"*{ALIGNMENT}" if out is None or Output.of(out).is_file else f"regauge{ALIGNMENT}"
