"""The printed form of a symmetry."""

import math
from collections.abc import Sequence

from regauge.core.groups import Frozen, Group


def render(
    groups: Sequence[Group],
    frozen: Sequence[Frozen],
    unknown: Sequence[str],
    unused: Sequence[str],
    notes: Sequence[str],
) -> str:
    """A readable table: groups, sizes, kinds, where they act, what is frozen and why."""
    sizes = {group.name: group.size for group in groups}
    rows = [("group", "kind", "size", "families", "acts on")]
    for group in groups:
        copies = math.prod(sizes[base] for base in group.within)
        size = f"{group.size or '?'}" + (f" x{copies}" if group.within else "")
        axes = dict.fromkeys(f"{p.parameter}[{p.axis}]" for p in group.placements)
        rows.append((group.name, group.kind, size, _name_families(group), _shorten(list(axes))))
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    lines = ["  ".join([*(row[k].ljust(widths[k]) for k in range(4)), row[4]]).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in [*widths, 7]))
    order = sum(g.log10_order * math.prod(sizes[b] for b in g.within) for g in groups)
    lines += ["", f"{len(groups)} groups, 10^{order:.1f} discrete elements"]
    if any(group.within for group in groups):
        lines.append("xN: one independent copy for each of the N blocks that it is repeated within")
    if frozen:
        lines += ["", f"frozen axes ({len(frozen)}), and why:"]
        reasons: dict[str, list[str]] = {}
        for row in frozen:
            reasons.setdefault(row.reason, []).append(f"{row.parameter}[{row.axis}]")
        lines += [f"  {reason}: {_shorten(where)}" for reason, where in reasons.items()]
    if unknown:
        title = "operators without a rule (they freeze what they touch; see `regauge.discovery.register_rule`):"
        lines += ["", title, *(f"  {name}" for name in unknown)]
    if unused:
        lines += ["", f"parameters that do not influence the outputs: {_shorten(list(unused))}"]
    return "\n".join([*lines, *(line for note in notes for line in ("", note))])


def _name_families(group: Group) -> str:
    if group.keeps_ones:
        return "rotation, ones kept"
    if group.is_proper:
        return "angle" if group.size == 2 else "rotation, no reflection"
    if group.matrix != "none":
        return {"orthogonal": "rotation", "linear": "matrix"}[group.matrix]
    parts = ["order"] if group.is_permuted else []
    for count, word in ((group.scales, "scale"), (group.signs, "sign"), (group.shifts, "shift")):
        if count:
            parts.append(word if count == 1 else f"{count} {word}s")
    return " ".join(parts) or "blocks only"


def _shorten(items: list[str], limit: int = 4) -> str:
    if len(items) <= limit:
        return ", ".join(items)
    return ", ".join(items[:limit]) + f", and {len(items) - limit} more"
