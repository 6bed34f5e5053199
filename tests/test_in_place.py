"""Operators that write into an operand are replaced if possible, and the program computes the function of the
module.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from regauge.discovery import trace as tracing


def half_written(y: Tensor) -> Tensor:
    y[:, :2].relu_()
    return y


REPLACED: dict[str, Callable[[Tensor], Tensor]] = {
    "a new tensor": lambda y: y.relu_(),
    "one after the other": lambda y: y.relu_().add_(1.5).mul_(y.new_tensor([1.0, 2.0, 3.0, 4.0])),
    "read before": lambda y: y.mean() + (y * 2).sigmoid_(),
    "a view that alone is read": lambda y: y.flatten(0, 1).tanh_(),
    "what is the same tensor": lambda y: torch.atleast_2d(y).relu_() + y,
    "behind a map over examples": lambda y: torch.vmap(lambda row: row.sigmoid())(y).mul_(2.0),
    "dropout": lambda y: fn.dropout(y, 0.5, training=False, inplace=True).exp(),
}
KEPT: dict[str, Callable[[Tensor], Tensor]] = {
    "a part of what is read": half_written,
    "another dtype": lambda y: y.add_(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)) / 3,
}


class Writing(nn.Module):
    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(3, 4), write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.linear(x))


class WritingInput(Writing):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.write(x)) + x.sum()


@pytest.mark.parametrize(
    ("kind", "write", "traces"),
    [
        *(pytest.param(Writing, write, 1, id=name) for name, write in REPLACED.items()),
        *(pytest.param(Writing, write, 2, id=name) for name, write in KEPT.items()),
        pytest.param(WritingInput, lambda x: x.relu_(), 2, id="an input"),
    ],
)
def test_the_program_computes_what_the_module_does(
    kind: type[Writing], write: Callable[[Tensor], Tensor], traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, decomposed = 1, tracing._decomposed

    def counted(*args: object) -> object:
        nonlocal count
        count += 1
        return decomposed(*args)

    monkeypatch.setattr(tracing, "_decomposed", counted)
    torch.manual_seed(0)
    module, x = kind(write).eval(), torch.randn(2, 3)
    program = tracing.trace(module, (x,), {})
    assert count == traces
    known = module.state_dict()
    places = [node.name for node in program.graph.graph.nodes if node.op == "placeholder"]
    values = [known[program.states[name]] if name in program.states else program.held.get(name, x) for name in places]
    *_, found = torch.fx.Interpreter(program.graph).run(*(value.clone() for value in values))
    torch.testing.assert_close(found, module(x.clone()))
