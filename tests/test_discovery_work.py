"""The work of discovery grows linearly with the depth of a network, measured by counts and not by time."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import regauge as rg
from regauge.discovery import actable
from regauge.discovery.translations import search
from regauge.nets.transformer import GPT, Llama

NETS: dict[str, Callable[[int], nn.Module]] = {
    "GPT": lambda depth: GPT(11, 6, width=8, layers=depth, heads=2),
    "Llama": lambda depth: Llama(11, width=8, layers=depth, heads=2),
}


@pytest.mark.parametrize("name", NETS)
def test_work_grows_with_depth_and_not_faster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a deep network, each layer needs the same number of operator effects, and no further trial of an action."""
    counts: Counter[str] = Counter()

    def counted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            counts[kind] += 1
            return function(*args)

        return call

    effects = {one: counted("effects", rule) for one, rule in search.EFFECTS.items()}
    monkeypatch.setattr(search, "EFFECTS", effects)
    monkeypatch.setattr(actable._Part, "failures", counted("trials", actable._Part.failures))
    found: list[Counter[str]] = []
    for depth in (3, 6, 12):
        counts.clear()
        with torch.device("meta"):
            net = NETS[name](depth)
        rg.discover(net, torch.zeros(2, 5, dtype=torch.long))
        found.append(counts.copy())
    small, middle, large = found
    assert large["effects"] - middle["effects"] == 2 * (middle["effects"] - small["effects"]) <= 2 * 3 * 119
    assert small["trials"] == middle["trials"] == large["trials"] <= 13
