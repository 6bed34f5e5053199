"""Removal of prefixes that training adds to tensor names, if the model lacks these prefixes."""

import logging
import re
from collections.abc import Collection, Iterable

from regauge.checkpoints.checkpoint import Checkpoint

WRAPPED = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""A pattern of names that torch.compile, FSDP and activation checkpointing insert for wrapped modules."""
LEADING = ("module.", "model.", "net.", "network.", "ema_model.", "student.", "_forward_module.")
"""Prefixes that DataParallel, Lightning and user wrappers add to all names."""
LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
"""A pattern of the layer index in a tensor's name."""
LOG = logging.getLogger(__name__)


def unwrap(checkpoint: Checkpoint, wanted: Collection[str]) -> Checkpoint:
    """Return a checkpoint under the names of a model or of another checkpoint, if the names differ only by prefixes.

    Outputs are written under the names of the files. A log message states which prefix was removed.
    """
    stored, asked = set(checkpoint.stored), set(wanted)
    if checkpoint.is_adapter or not asked or asked <= stored or stored <= asked:
        return checkpoint
    own, theirs = _bare(checkpoint.stored), _bare(wanted)
    known = {bare: name for name, bare in theirs.items()}
    bare = set(own.values())
    if len(bare) < len(own) or len(known) < len(theirs) or not (bare <= known.keys() or known.keys() <= bare):
        return checkpoint
    if own.keys() == bare and theirs.keys() == known.keys():  # names differ in more than prefixes
        return checkpoint
    renamed = {known.get(bare, bare): name for name, bare in own.items()}
    first, name = next((new, old) for new, old in renamed.items() if new != old)
    from regauge.checkpoints.names.conversion import Conversion
    from regauge.checkpoints.names.converted import Converted

    result = Converted(checkpoint, Conversion(renamed)).written_as(checkpoint.form)
    note = f"{checkpoint.label}: names such as {name!r} are read as {first!r}, the name in the model"
    LOG.info(f"{note}; the output keeps the names of the file")
    return result


def _bare(names: Iterable[str]) -> dict[str, str]:
    """Map each name to the name without wrappers, and without a prefix in `LEADING` that all names share."""
    found = {name: WRAPPED.sub("", name) for name in names}
    while True:
        shared = next((p for p in LEADING if all(bare.startswith(p) for bare in found.values())), None)
        if shared is None:
            return found
        found = {name: bare.removeprefix(shared) for name, bare in found.items()}
