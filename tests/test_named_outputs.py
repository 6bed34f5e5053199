"""Outputs by name: the reason of a frozen axis names the output, and an ignored output freezes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regauge as rg

FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mapping": lambda state, logits: {"state": state, "logits": logits},
    "pair": lambda state, logits: (state, [logits]),
    "tensor": lambda _, logits: logits,
    "one field": lambda _, logits: {"logits": logits},
}


class Encoder(nn.Module):
    """Two layers that also return the intermediate state, in one of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.outer, self.form = nn.Linear(4, 6), nn.Linear(6, 3), form

    def forward(self, x: Tensor) -> Any:
        state = torch.tanh(self.inner(x))
        return FORMS[self.form](state, self.outer(state))


def reasons(form: str, **options: Any) -> dict[str, str]:
    symmetry = rg.discover(Encoder(form), torch.randn(5, 4), **options)
    return {row.parameter: row.reason for row in symmetry.frozen if row.axis == 0}


@pytest.mark.parametrize(
    ("form", "inner", "outer"),
    [
        ("mapping", "output state of the model", "output logits of the model"),
        ("pair", "output 0 of the model", "output 1 of the model"),
        ("tensor", None, "output of the model"),
        ("one field", None, "output of the model"),
    ],
)
def test_reasons_name_the_output_if_there_are_several(form: str, inner: str | None, outer: str) -> None:
    found = reasons(form)
    assert found.get("inner.weight") == inner
    assert found["outer.weight"] == outer


@pytest.mark.parametrize("outputs", ["logits", ("logits",), lambda output: output["logits"]])
def test_outputs_that_do_not_count_freeze_nothing(outputs: Any) -> None:
    found = reasons("mapping", outputs=outputs)
    assert found == {"outer.weight": "output of the model", "outer.bias": "output of the model"}


class Writing(nn.Module):
    """A layer that also overwrites its input, which a trace counts as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.only(x)
        x.zero_()
        return logits


def test_an_input_that_the_model_writes_is_no_named_output() -> None:
    symmetry = rg.discover(Writing(), torch.randn(5, 4))
    assert {row.reason for row in symmetry.frozen if row.axis == 0} == {"output of the model"}
