"""`regauge info`: what a checkpoint is, and where it comes from."""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from regauge.cli.options import Info
from regauge.cli.output import tell, tell_table
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.memory_limit import size_text
from regauge.storage.checkpoints.outputs.provenance import read_provenance, summarize


def run(options: Info) -> None:
    """Tell the tensors, or how many values of which dtypes there are, the strings in the header, and the provenance."""
    with Checkpoint.open(options.checkpoint) as checkpoint:
        stored = list(checkpoint.stored.values())
        files = len(checkpoint.metadata)
        header = dict(checkpoint.header)
    if options.tensors:
        rows = [{"tensor": t.name, "shape": str(list(t.shape)), "dtype": _short(t.dtype)} for t in stored]
        tell_table("tensors", rows)
    counts: Counter[str] = Counter()
    for one in stored:
        counts[_short(one.dtype)] += prod(one.shape)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    nbytes = sum(one.nbytes for one in stored)
    tell(
        f"{options.checkpoint}: {len(stored)} tensors of {counts.total():,} values ({kinds}), {size_text(nbytes)} in "
        f"{files} file{'s' * (files > 1)}",
        checkpoint=str(options.checkpoint),
        values=dict(counts),
        nbytes=nbytes,
        files=files,
        header=header,
    )
    for name, text in header.items():
        tell(f"header: {name} = {text if len(text) < 100 else text[:97] + '...'}", header=header)
    found = read_provenance(options.checkpoint)
    if found is None:
        tell("where it comes from: it does not say", provenance=None)
    else:
        tell("\n".join(_lines(found, dict(found.get("ancestors", {})), "")), provenance=found)


def _lines(document: Mapping[str, Any], ancestors: dict[str, Any], indent: str) -> Iterator[str]:
    """A provenance, and below each input its own, once."""
    (title, _), *facts = summarize(document)
    yield f"{indent}{title}"
    for (what, hashes), one in zip(facts, document["inputs"], strict=True):
        yield f"{indent}  {what}: {hashes}"
        if one.get("provenance") in ancestors:
            yield from _lines(ancestors.pop(one["provenance"]), ancestors, indent + "    ")


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
