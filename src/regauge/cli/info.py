"""`regauge info`: what a checkpoint is, and where it comes from."""

import json
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from regauge.cli.options import Info
from regauge.cli.output import print_table
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.memory_limit import size_text
from regauge.storage.checkpoints.provenance import read_provenance, summarize


def run(options: Info) -> None:
    """Print a table of the tensors, or of their dtypes, the strings in the header, and the provenance."""
    with Checkpoint.open(options.checkpoint) as checkpoint:
        stored = list(checkpoint.stored.values())
        files = len(checkpoint.metadata)
        header = dict(checkpoint.header)
    if options.tensors:
        rows = [{"tensor": t.name, "shape": str(list(t.shape)), "dtype": _short(t.dtype)} for t in stored]
        print_table(rows)
    values = sum(prod(one.shape) for one in stored)
    dtypes = Counter(dict.fromkeys(dict.fromkeys(_short(one.dtype) for one in stored), 0))
    for one in stored:
        dtypes[_short(one.dtype)] += prod(one.shape)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in dtypes.items())
    size = size_text(sum(one.nbytes for one in stored))
    print(f"{options.checkpoint}: {len(stored)} tensors of {values:,} values ({kinds}), {size} in {files} files")
    for name, text in header.items():
        print(f"header: {name} = {text if len(text) < 100 else text[:97] + '...'}")
    found = read_provenance(options.checkpoint)
    if found is None:
        print("where it comes from: it does not say")
    elif options.provenance:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        _show(found, dict(found.get("ancestors", {})), "")


def _show(document: Mapping[str, Any], ancestors: dict[str, Any], indent: str) -> None:
    """Print a provenance, and below each input its own, once."""
    (title, _), *facts = summarize(document)
    print(f"{indent}{title}")
    for (what, hashes), one in zip(facts, document["inputs"], strict=True):
        print(f"{indent}  {what}: {hashes}")
        if one.get("provenance") in ancestors:
            _show(ancestors.pop(one["provenance"]), ancestors, indent + "    ")


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
