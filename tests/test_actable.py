"""Every symmetry that `discover` returns can act. As its last step, discovery tries each group, and freezes a group
that fails, with the reason.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import regauge as rg
from regauge.core.groups import Group, Placement
from regauge.discovery.actable import LARGE_PARAMETER, cannot_act

Spoil = Callable[[tuple[Group, ...]], tuple[Group, ...]]
ROWS = torch.randn(3, 4)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def out_of_range(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    first, *rest = groups
    places = (replace(first.placements[0], start=1), *first.placements[1:])
    return (replace(first, placements=places), *rest)


def the_same_twice(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    return (*groups, Group("again", 3, (Placement("0.weight", 0),)))


def half_of_each(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    """Apply two matrices to pairs that overlap by one entry."""
    one = Group("one", 2, (Placement("0.weight", 1),), is_permuted=False, matrix="orthogonal")
    return (*groups, one, replace(one, name="other", placements=(Placement("0.weight", 1, start=1),)))


def base_elsewhere(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    base = Group("base", 2, (Placement("4.weight", 0),), is_permuted=False, is_base=True)
    inner = Group("inner", 4, (Placement("0.weight", 1, sign=(1,)),), within=("base",), signs=1, is_permuted=False)
    deeper = replace(inner, name="deeper", size=2, within=("base", "inner"))
    return (*groups, base, inner, deeper)


SPOILED: dict[Spoil, tuple[set[str], str]] = {
    out_of_range: ({"0"}, "needs indices up to 6"),
    the_same_twice: ({"again"}, "both move the same entries"),
    half_of_each: ({"other"}, "both move the same entries"),
    base_elsewhere: ({"inner", "deeper"}, "does not cover '0.weight'"),
}


@pytest.mark.parametrize("is_meta", [False, True])
@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
def test_a_group_that_cannot_act_is_frozen(spoil: Spoil, is_meta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[rg.discover.__module__]
    found, names = module.groups_of, set[str]()

    def spoiled(*args: Any) -> tuple[Group, ...]:
        groups = spoil(found(*args))
        names.update(group.name for group in groups)
        return groups

    monkeypatch.setattr(module, "groups_of", spoiled)
    with torch.device("meta" if is_meta else "cpu"):
        model = net()
    symmetry = rg.discover(model, (ROWS,), verify=False)
    cut, reason = SPOILED[spoil]
    assert {group.name for group in symmetry.groups} == names - cut
    assert any(reason in row.reason and "report this model" in row.reason for row in symmetry.frozen)
    assert any(reason in note for note in symmetry.notes)
    real = net()
    symmetry.act(symmetry.random(torch.Generator().manual_seed(0)), real.state_dict())
    rg.Symmetry.from_json(symmetry.to_json())


def test_a_large_model_on_the_meta_device_is_tried_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        inner = [part for _ in range(3) for part in (nn.Linear(9000, 9000), nn.ReLU())]
        large = nn.Sequential(nn.Linear(8, 9000), nn.ReLU(), *inner, nn.Linear(9000, 2))
    sizes = []
    drawn = torch.randn

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = drawn(*args, **kwargs)
        sizes.append(result.numel())
        return result

    monkeypatch.setattr(torch, "randn", watched)
    symmetry = rg.discover(large, (torch.empty(2, 8),))
    assert [group.size for group in symmetry.groups] == [9000] * 4
    assert 0 < max(sizes) <= LARGE_PARAMETER


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (8, 4)])
def test_differential_attention_can_act(heads: tuple[int, int]) -> None:
    """Heads are divided into two halves. Of the angles per half and the angles per frequency, only one kind can be a
    group.
    """
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    torch.manual_seed(0)
    config = DiffLlamaConfig(
        vocab_size=40,
        hidden_size=8 * heads[0],
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        max_position_embeddings=16,
    )
    model, tokens = DiffLlamaForCausalLM(config).eval(), {"input_ids": torch.randint(0, 40, (2, 5))}
    symmetry = rg.Symmetry.from_json(rg.discover(model, tokens, verify=False).to_json())
    check = symmetry.verify(model, (), tokens, generator=torch.Generator().manual_seed(0))
    assert check.ok, str(check)
    angles = [group for group in symmetry.groups if group.name.endswith(".angles")]
    assert [symmetry[group.within[-1]].size for group in angles] == [4]
    assert not cannot_act(symmetry)
