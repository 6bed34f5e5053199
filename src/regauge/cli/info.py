"""`regauge info`: print the tensors of a checkpoint, and its provenance."""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from regauge import Checkpoint
from regauge.checkpoints.memory_limit import size_text
from regauge.checkpoints.outputs.provenance import read_provenance, summarize
from regauge.cli.checkpoint_options import Info
from regauge.cli.output import tell, tell_table
from regauge.core.escaping import escape

DEEPEST = 20
"""The largest depth of indentation. Ancestors at larger depths have the same indentation."""


def run(options: Info) -> None:
    """Report the tensors, or the number of values of each dtype, the strings in the header, and the provenance."""
    with Checkpoint.open(options.checkpoint) as checkpoint:
        stored, header = list(checkpoint.stored.values()), dict(checkpoint.header)
        files, nbytes, bad = len(checkpoint.metadata), checkpoint.nbytes, checkpoint.count_not_finite()
    if options.tensors:
        tell_table("tensors", [{"tensor": t.name, "shape": str([*t.shape]), "dtype": _short(t.dtype)} for t in stored])
    counts: Counter[str] = Counter()
    for one in stored:
        counts[_short(one.dtype)] += prod(one.shape)
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in counts.items())
    tell(
        f"{options.checkpoint}: {len(stored)} tensors of {counts.total():,} values ({kinds}), {size_text(nbytes)} in "
        f"{files} file{'s' * (files > 1)}",
        checkpoint=str(options.checkpoint),
        values=dict(counts),
        nbytes=nbytes,
        files=files,
        header=header,
        not_finite=bad,
    )
    if bad is None:
        tell("NaN and Inf: not checked, because the checkpoint is large")
    elif bad:
        names, number = escape(", ".join([*bad][:4]) + ", ..." * (len(bad) > 4)), sum(bad.values())
        tell(f"NaN or Inf: {number:,} value{'s' * (number > 1)} in {len(bad)} tensor{'s' * (len(bad) > 1)}: {names}")
    for name, text in header.items():
        tell(f"header: {escape(name)} = {escape(text if len(text) < 100 else text[:97] + '...')}", header=header)
    found = read_provenance(options.checkpoint)
    tell("origin: not recorded" if found is None else "\n".join(_lines(found)), provenance=found)


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a provenance, and below each input the lines of the input's provenance, without repetition."""
    ancestors = dict(document.get("ancestors", {}))
    open_inputs = [_begin(document)]
    while open_inputs:
        indent = "    " * min(len(open_inputs) - 1, DEEPEST)
        line, own = next(open_inputs[-1], (None, None))
        if line is None:
            open_inputs.pop()
            continue
        yield f"{indent}{line}"
        if own in ancestors:
            open_inputs.append(_begin(ancestors.pop(own)))


def _begin(document: Mapping[str, Any]) -> Iterator[tuple[str | None, str | None]]:
    """Yield the lines of one provenance. A line about an input comes with the key of the input's provenance."""
    (title, _), *facts = summarize(document)
    yield title, None
    for (what, hashes), one in zip(facts, document["inputs"], strict=True):
        yield f"  {what}: {hashes}", one.get("provenance")


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
