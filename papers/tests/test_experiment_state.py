"""Interrupted trainings of experiments: the same call continues them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from progress import Recorded
from torch import nn

from regauge.core.params import Params
from regauge.core.progress import Advance
from regauge.nets.classification import ClassifierConfig
from regauge.training import SGD
from regauge_papers.experiment import Run
from regauge_papers.populations import Population, networks, small_images


class Stop(Exception):
    pass


@pytest.mark.parametrize("is_bfloat16", [False, True])
def test_networks_of_experiments_continue_and_leave_no_state(
    is_bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regauge_papers.experiment.multiplies_bfloat16", lambda device: True)
    monkeypatch.setattr("regauge.checkpoints.state_file.SECONDS", 0.0)  # a state is always due
    training = ClassifierConfig(epochs=3, batch=20, optimizer=SGD(0.1, momentum=0.9))
    layers = (nn.Flatten(), nn.Linear(784 if small_images() == "MNIST" else 64, 8), nn.ReLU(), nn.Linear(8, 10))
    population = Population(
        small_images(), "MLP", lambda: nn.Sequential(*layers), training, 60, is_bfloat16=is_bfloat16
    )

    def run(folder: str, progress: Callable[..., Advance]) -> list[Params]:
        one = Run("smoke", 0, tmp_path / folder, progress)
        return networks(population, population.read(one), one, range(2))

    def told(label: str, total: float) -> Advance:
        shares = []

        def advance(amount: float = 1, /, *, loss: float | None = None) -> None:
            shares.append(amount)
            if sum(shares) > 1.5:  # in the second of the two networks
                raise Stop

        return advance

    expected = run("whole", Recorded())
    with pytest.raises(Stop):
        run("stopped", told)
    names = [path.name for path in (tmp_path / "stopped").rglob("*.state.safetensors")]
    assert len(names) == 1
    found = run("stopped", Recorded())
    assert not list(tmp_path.rglob("*.state.safetensors"))
    for a, b in zip(expected, found, strict=True):
        assert all(torch.equal(a[name], tensor) for name, tensor in b.items())
