"""Tensors of populations that random elements move row by row."""

from collections.abc import Sequence
from functools import reduce

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from regauge.core.moving.moved_tensors import MovedTensor
from regauge.core.moving.random_draws import Drawn, ElementRun, portions

ROW_VALUES_AT_ONCE = 1 << 17
"""Values that are moved at once, which a cache holds."""
LONG = 64
"""Least length of rows that are gathered by network and row; shorter ones are taken from all rows laid end to end."""
WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers of so many bytes, as which numpy sees any value."""


def move_rows(
    tensor: MovedTensor,
    networks: Num[Tensor, "models *shape"],
    shares: Sequence[ElementRun],
    drawn: Drawn,
    factors: Float[Tensor, "elements factors"] | None,
    shifts: Float[Tensor, "elements shifts"] | None,
) -> None:
    """Move one tensor of networks in place, each batch of a share by its elements."""
    step = min(max(share.elements for share in shares), max(1, ROW_VALUES_AT_ONCE // (tensor.size * tensor.run)))
    unmoved = tensor.unmoved(torch.zeros(step, dtype=torch.int32))
    behind = [1] * (networks.ndim - 1 - len(tensor.shape))
    for share, some, start in portions(shares, step):
        size = some.stop - some.start
        places = torch.empty(size, *tensor.shape, dtype=torch.int32)
        tensor.place(drawn.displacements[some], unmoved, places)
        by = shift = None
        if factors is not None and tensor.factors:
            by = torch.empty(size, *tensor.shape, dtype=factors.dtype)
            tensor.multiply(factors[some], by)
            by = by.view(*by.shape, *behind).to(networks.device)
        if shifts is not None and tensor.shifts:
            shift = reduce(torch.add, [term.of(shifts[some]) for term in tensor.shifts])
            shift = shift.view(*shift.shape, *behind).to(networks.device)
        for first, n in share.networks(some, start):
            home = networks[first : first + n]
            made = _take_rows(home.reshape(n, tensor.size, tensor.run), places[:n].view(n, -1)).view(home.shape)
            if by is None:
                home.copy_(made)
            else:
                torch.mul(made, by[:n], out=home)
            if shift is not None:
                home += shift[:n]


def _take_rows(x: Num[Tensor, "models rows run"], places: Int[Tensor, "models rows"]) -> Num[Tensor, "models rows run"]:
    """Return rows `x[model, places[model]]`; numpy copies rows that do not follow one another several times as fast."""
    models, whole = torch.arange(len(x)).unsqueeze(1), WHOLE.get(x.itemsize)
    if x.device.type != "cpu" or whole is None:
        return x[models.to(x.device), places.to(x.device)]
    there = x.view(whole).numpy()
    if x.shape[2] >= LONG:
        taken = there[models.numpy(), places.numpy()]
    else:
        flat = (places + models * x.shape[1]).view(-1).numpy()
        taken = there.reshape(-1, x.shape[2]).take(flat, 0, mode="clip")
    return torch.from_numpy(taken).view(x.dtype)
