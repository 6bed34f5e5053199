"""The settings of the thesis that introduced flows on weights, from its text and code, for comparisons."""

from typing import Any, Literal

from regauge.flow.flow_config import FlowConfig
from regauge.flow.nets import Metanetwork
from regauge.flow.priors import PlainGaussian
from regauge.flow.representation import Representation
from regauge.flow.times import BetaTime
from regauge.training.schedules import Constant
from regauge.weightspace.layers.relational_attention import RelationalAttention

Kind = Literal["euclidean", "geometric"]


def thesis_config(
    kind: Kind = "euclidean", *, head: str | None = None, head_bias: str | None = None, **changes: Any
) -> FlowConfig:
    """Return the settings of the thesis: the net predicts endpoints, early times are favored, and the prior has
    deviation 0.1.

    To sample like the thesis, call `flow.sample(..., solver="thesis")`.

    Args:
        kind: "euclidean" uses weights without changes. "geometric" normalizes the incoming weights of every hidden
            unit, and the whole last layer, to unit spheres. The norm of the last layer is lost.
        head: The name of the last layer's weight, for "geometric".
        head_bias: The name of the last layer's bias, which is divided by the norm of the last layer's weight.
        changes: Settings that differ from the thesis, such as `seconds`, or a smaller `net`.

    Raises:
        ValueError: The thesis has no flow of the kind `kind`, or the flow requires a head.

    References:
        Erdogan (2025), sections 4.4, 6.1 and 6.3; the deviation and the learning rate are from the thesis' code.
    """
    if kind not in ("euclidean", "geometric") or (kind == "geometric") != (head is not None):
        raise ValueError(
            f"kind={kind!r} and head={head!r}: the thesis has 'euclidean' flows, and 'geometric' ones, which need the "
            "name of the last layer's weight"
        )
    is_plain = kind == "euclidean"
    how = Representation("keep") if is_plain else Representation("sphere", head, "unit", head_bias)
    settings = {
        "representation": how,
        "prior": PlainGaussian(0.1),
        "net": Metanetwork(RelationalAttention(), width=64, depth=5),
        "is_aligned": False,
        "predicts": "end",
        "has_gaussian": False,
        "times": BetaTime(1.0, 2.0),
        "balance": 1.0 if is_plain else 0.0,
        "is_standardized": False,
        "lr": 1e-3,
        "weight_decay": 0.0,
        "schedule": Constant(),
        "average": None,
        "batch": 32,
    }
    return FlowConfig(**{**settings, **changes})
