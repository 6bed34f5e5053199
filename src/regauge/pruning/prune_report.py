"""Files of a pruned network: the smaller checkpoint and its report."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import WORKS, FileJob
from regauge.checkpoints.writing import path_beside
from regauge.pruning.criteria import CRITERIA, Criterion
from regauge.pruning.pruned import Pruned


@runtime_checkable
class Configuration(Protocol):
    """The files of a folder that define the sizes of the folder's network."""

    def changes(self) -> Mapping[str, tuple[Any, Any]]:
        """Return the configuration values that changed, each with the old and the new value."""

    def files(self) -> Mapping[str, bytes | None]:
        """Return the files with the new configuration values."""


def prune_path(checkpoint: Path) -> Path:
    """Return the path of a pruned checkpoint's report: `out.prune.json` for `out.safetensors`, or a file inside of a
    checkpoint folder.
    """
    return path_beside(checkpoint, WORKS["pruning"].beside)


def write_pruned(
    job: FileJob,
    result: Pruned,
    criterion: Criterion,
    share: float | Mapping[str, float],
    configuration: Configuration | None,
) -> Checkpoint:
    """Write a pruned network and its report. The network has the form of the given checkpoint.

    Args:
        job: The checkpoint and the output.
        result: The pruned network.
        criterion: The criterion that chose the units.
        share: The requested share of units.
        configuration: The files of the folder that define sizes, if such files exist.

    Raises:
        ValueError: According to the certificate, the pruned network computes another function.
    """
    if result.certificate is not None and not result.certificate.ok:
        raise ValueError(f"{result.certificate}; nothing was written: please report this model")
    values = {id(t): t.numel() for t in job.source.params.values() if t.is_floating_point()}
    smaller = job.source.resized(result.params)
    facts = _facts(result, criterion, share, sum(values.values())) | {"config": {}}
    if configuration is not None:
        smaller = smaller.replacing(configuration.files())
        changes = configuration.changes()
        facts["config"] = {key: {"before": old, "after": new} for key, (old, new) in changes.items()}
    return job.of(smaller).write_reported(smaller.params, "regauge.prune", lambda: facts)


def _facts(result: Pruned, criterion: Criterion, share: float | Mapping[str, float], values: int) -> dict[str, Any]:
    names = {kind: name for name, kind in CRITERIA.items()}
    by_reason: dict[str, list[str]] = {}
    for one in result.exact:
        by_reason.setdefault(one.why, []).append(str(one))
    certificate = result.certificate
    return {
        "criterion": names.get(type(criterion), repr(criterion)),
        "share": max(share.values(), default=0.0) if isinstance(share, Mapping) else share,
        "values": {"before": values, "after": result.values},
        "certificate": None if certificate is None else {"ok": certificate.ok} | asdict(certificate),
        "groups": [{"group": name, "before": old, "after": new} for name, (old, new) in result.sizes.items()],
        "exact": by_reason,
        "losses": dict(result.losses),
        "data": list(result.data or ()),
        "fixed": [{"name": name, "reason": why} for name, why in result.fixed],
        "kept": {name: units.tolist() for name, units in result.kept.items()},
    }
