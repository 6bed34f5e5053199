"""Tensors of modules in files: every entry is tracked, and written files can be read again."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regauge.checkpoints.names.boxes import cut, whole
from regauge.checkpoints.names.conversion import Blank, conversion_of
from regauge.checkpoints.names.rearranging import RearrangementError, Rearranging

SHAPES = ((4, 6), (8, 3), (2, 3, 4), (24,), (1, 6, 4), (6, 2, 2, 1))


def rearrange(x: Tensor, y: Tensor, steps: list[int]) -> Tensor:
    """Rearrange two tensors of 24 entries in ways that libraries use, chosen by numbers."""
    parts = [x, y]
    for step in steps:
        one = parts.pop(0)
        kind, step = step % 8, step // 8
        if kind == 0:
            one = one.reshape(SHAPES[step % len(SHAPES)]) if one.numel() == 24 else one.flatten()
        elif kind == 1:
            one = one.transpose(step % one.ndim, (step // 4) % one.ndim)
        elif kind == 2:
            one = one.contiguous().permute(*reversed(range(one.ndim)))
        elif kind == 3 and one.shape[step % one.ndim] > 1:
            parts += one.chunk(2, dim=step % one.ndim)
            continue
        elif kind == 4 and parts and parts[0].shape == one.shape:
            one = torch.stack([one, parts.pop(0)], dim=step % (one.ndim + 1))
        elif kind == 5 and parts and parts[0].numel():
            one = torch.cat([one.flatten(), parts.pop(0).flatten()])
        elif kind == 6 and one.shape[0] > 1:
            at = 1 + step % (one.shape[0] - 1)
            parts += [one[:at], one[at:]]
            continue
        elif kind == 7 and one.shape[-1] % 2 == 0:
            one = one.reshape(*one.shape[:-1], 2, -1).transpose(-1, -2).reshape(one.shape)
        parts.append(one)
    return torch.cat([part.flatten() for part in parts])


@given(st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_entries_are_followed_through_any_rearrangement(steps: list[int]) -> None:
    """Rearranging the indices themselves gives the same result as the boxes, in both directions and for any rows."""
    values = {"x": torch.arange(24), "y": torch.arange(100, 124)}
    blanks = {name: Blank((24,), torch.int64) for name in values}
    expected = rearrange(values["x"], values["y"], steps).view(12, 4)
    mode = Rearranging()
    with mode:
        made = rearrange(mode.blank("x", blanks["x"]), mode.blank("y", blanks["y"]), steps).view(12, 4)
    conversion = conversion_of(blanks, {"z": ((12, 4), mode.boxes(made))}, (), ())

    def read(name: str, rows: tuple[int, int] | None) -> Tensor:
        return values[name] if rows is None else values[name][rows[0] : rows[1]]

    assert torch.equal(conversion.make("z", read), expected)
    assert torch.equal(conversion.make("z", read, rows=(3, 8)), expected[3:8])
    for name, tensor in values.items():
        assert torch.equal(conversion.take_apart(name, {"z": expected}.__getitem__), tensor)


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (lambda x: 2 * x, "aten.mul"),
        (lambda x: x[::2], "sliced with steps"),
        (lambda x: x.expand(2, 24), "expand"),
        (lambda x: x + x, "aten.add"),
    ],
)
def test_computations_are_refused_by_name(compute: Any, why: str) -> None:
    mode = Rearranging()
    with mode, pytest.raises(RearrangementError, match=why):
        compute(mode.blank("x", Blank((24,), torch.float32)))


def test_parts_that_are_lost_are_refused() -> None:
    boxes = whole("x", 24)
    with pytest.raises(ValueError, match="takes over only a part of 'x'"):
        conversion_of({"x": Blank((24,), torch.float32)}, {"z": ((12,), cut(boxes, 0, 12))}, (), ())
    with pytest.raises(ValueError, match="hold a part of 'z' only"):
        conversion_of({"x": Blank((24,), torch.float32)}, {"z": ((30,), boxes)}, (), ())


def test_large_tensors_take_no_memory() -> None:
    """Stacking and fusing the experts of a model of full size makes one box for each tensor, without values."""
    blank = Blank((14336, 4096), torch.bfloat16)
    mode = Rearranging()
    with mode:
        parts = [[mode.blank(f"{kind}{e}", blank) for e in range(8)] for kind in ("gate", "up")]
        fused = torch.cat([torch.stack(own) for own in parts], dim=1).transpose(1, 2).contiguous()
    boxes = mode.boxes(fused)
    assert len(boxes) == 16
    assert sum(box.numel for box in boxes) == 16 * math.prod(blank.shape)
