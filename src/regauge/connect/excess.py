"""The height of a loss above the straight line between the losses of the ends."""

from collections.abc import Mapping, Sequence


def excess_of(rows: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
    """Return `loss(t) - ((1 - t) loss(0) + t loss(1))` for rows with "t" and "loss"; it is zero at both ends."""
    first, last = rows[0]["loss"], rows[-1]["loss"]
    inner = [row["loss"] - ((1 - row["t"]) * first + row["t"] * last) for row in rows[1:-1]]
    return (0.0, *inner, 0.0)
