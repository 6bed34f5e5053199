"""Sentences about the dtypes of stored networks, where they differ."""

from collections.abc import Sequence

from regauge.checkpoints.checkpoint import Checkpoint


def list_dtypes(networks: Sequence[Checkpoint]) -> str | None:
    """The dtypes of the floating-point tensors of each network, for a sentence; None where all have the same."""
    kinds = {}
    for network in networks:
        found = {one.dtype for one in network.stored.values() if one.dtype.is_floating_point}
        kinds[network.label] = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found))
    return None if len(set(kinds.values())) <= 1 else "; ".join(f"{label} in {own}" for label, own in kinds.items())


def dtype_notes(networks: Sequence[Checkpoint]) -> tuple[str, ...]:
    """A sentence about the dtype of a merged network that takes over the files of the first one, where they differ."""
    first, *_ = networks
    listed = list_dtypes(networks)
    if listed is None or first.form.dtype is not None:
        return ()
    return (f"the networks differ in dtype ({listed}); the result has those of {first.label}, and --dtype chooses",)
