"""Networks between which others lie: of one architecture, finite, and of one structure."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from regauge.core.params import equal_names, require_alike
from regauge.core.task import Task, arguments
from regauge.discovery.statistics import find_structure


def require_comparable(networks: Sequence[Mapping[str, Tensor]], judge: object) -> None:
    """Raise unless networks are of one architecture and finite, and have one structure where a task says what that is.

    Tensors that are equal in all of them may hold Inf, as masks do.

    Raises:
        ValueError: They are not; the sentence names a tensor.
    """
    first = networks[0]
    equal = equal_names(networks)
    require_alike(*networks, structure=equal)
    if not isinstance(judge, Task):
        return
    different = [name for name, _ in judge.module.named_buffers() if name in first and name not in equal]
    structure = find_structure(judge.module, *arguments(next(iter(judge.batches))[0]), different) if different else ()
    if structure:
        raise ValueError(
            f"the networks differ in {structure[0]!r}, which is structure that no training changes, such as a mask, "
            "and a network between them would have that of neither; align them first, give networks of "
            "one structure, or judge them by a function instead of a task"
        )
