"""The symmetry of any model: trace it, tie its axes, solve for what may act on them."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from regauge.core.outputs import Outputs
from regauge.core.symmetry import Symmetry
from regauge.discover.emit import frozen_axes, groups_of
from regauge.discover.interpret import interpret
from regauge.discover.registry import registered_rules
from regauge.discover.slots import write_out
from regauge.discover.solve import solve
from regauge.discover.trace import trace

MAX_PASSES = 8
"""Passes over the graph: each may find fused axes (query, key, value) that should be taken apart."""


def discover(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    outputs: Outputs = None,
    verify: bool | None = None,
) -> Symmetry:
    program = trace(module, tuple(example_inputs), dict(example_kwargs or {}), outputs)
    unrolled: frozenset[tuple[str, int]] = frozenset()
    for _ in range(MAX_PASSES):
        builder, params = interpret(program, unrolled, registered_rules())
        if builder.requests <= unrolled:
            break
        unrolled |= builder.requests
    slots = write_out(builder.records, params)
    groups = groups_of(solve(slots), slots, program.aliases)
    used = {place.name for place in slots.places.values()}
    return Symmetry(
        groups,
        dict(program.shapes),
        frozen_axes({n: v for n, v in params.items() if n in used}, groups),
        tuple(builder.unknown),
        tuple(sorted(n for n in params if n not in used and params[n].ndim)),
        buffers=tuple(n for n, _ in module.named_buffers(remove_duplicate=False) if n in program.shapes),
    )
