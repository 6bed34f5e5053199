"""The place of a result, and the form in which it is written."""

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
    """The place of a verb's result, one `.safetensors` file or a folder, and the form in which it is written.

    The result appears under its name when all of it is on the disk. A path alone, `out="OUT"`, is `Output("OUT")`.

    Attributes:
        path: A `.safetensors` file, or a folder, which gets the shards and the further files of the network that the
            result takes over.
        overwrite: Whether an output of that name may be replaced. In a folder, files that are not of a checkpoint stay.
        resume: Whether to continue what an interrupted run left; work in memory is done anew.
        dtype: The dtype to which floating-point tensors are rounded, once, or its name; values that it cannot hold are
            refused. As in the network that the result takes over by default.
        shard_size: Bytes, or text such as "5GB", of the values in one file of a folder; as there by default.
        provenance: The provenance of the output; the call that writes it, by default.
        page: Draws the HTML page of a report from its JSON file, for verbs that write one; no page by default.
        shared: Whether the other processes of torchrun or Slurm make the same call, and take a share of the work:
            `rg.align`, `rg.merge` and recipes of checkpoints that are read tensor by tensor, with a folder as output.

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
        """Return an output from a path, or as it is."""
        return out if isinstance(out, Output) else cls(out)

    @property
    def is_file(self) -> bool:
        """Whether it is one file of weights, and no folder."""
        return is_single_file(self.path)

    @property
    def crew(self) -> Crew:
        """The processes that make it."""
        if not self.shared:
            return Crew()
        from regauge.checkpoints.outputs.processes import join  # imports torch.distributed

        return join()

    def require_alone(self, work: str) -> None:
        """Raise a ValueError if it is shared, for work of which one process makes the result."""
        if self.shared:
            raise ValueError(f"{work} is not shared by processes; leave `shared=True` out, and start one alone")

    @property
    def form(self) -> Form:
        """The form in which the network is written."""
        return Form.of(self.dtype, self.shard_size)


def alignment_label(out: Output | str | Path | None) -> str:
    """Return the name of the alignment next to an output for a provenance, which is the same for all names of
    outputs."""
    return f"*{ALIGNMENT}" if out is None or Output.of(out).is_file else f"regauge{ALIGNMENT}"
