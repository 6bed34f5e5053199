"""The picture of strips."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from regauge.inr.rendering.mesh import Mesh
from regauge.inr.rendering.points import PointCloud
from regauge.inr.rendering.strips import Picture, Strip
from regauge.inr.representation import Signal
from regauge_papers.strips_figure import strips_figure

CORNERS = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0, 0.5, 0], [0, 0, 0.5]], dtype=torch.float64)
FACES = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]])
PICTURES: dict[Signal, Picture] = {
    "image": torch.full((3, 4, 1), 0.5),
    "signed": Mesh(CORNERS, FACES),
    "unsigned": PointCloud(CORNERS, wanted=9, draws=20),
}


def strip(signal: Signal, names: tuple[str, ...] = ("A", ".50", "B")) -> Strip:
    counts = None if signal == "image" else np.arange(4 * len(names)).reshape(len(names), 4)
    return Strip(signal, signal, names, (0.5,) * len(names), (PICTURES[signal],) * len(names), counts)


@pytest.mark.parametrize("signal", PICTURES)
def test_each_network_has_a_picture_and_a_histogram(signal: Signal, tmp_path: Path) -> None:
    figure = strips_figure([strip(signal)] * 2)
    assert len(figure.axes) == (6 if signal == "image" else 12)
    assert [text.get_text() for text in figure.texts[:3]] == ["A", ".50", "B"]
    figure.savefig(tmp_path / "strips.png", dpi=30)


def test_a_cross_stands_where_no_surface_is() -> None:
    pictures = {
        "signed": (PICTURES["signed"], None),
        "unsigned": (PICTURES["unsigned"], PointCloud(CORNERS[:0], 9, 20)),
    }
    rows = [Strip(signal, signal, ("A", "B"), (0.5, math.inf), pictures[signal], None) for signal in pictures]  # type: ignore[arg-type]
    figure = strips_figure(rows)
    assert sum(text.get_text() == "not finite" for text in figure.texts) == 2
    assert len(figure.axes[1].lines) == len(figure.axes[3].lines) == 1, "a cross for each missing surface"
    assert not figure.axes[0].lines
    assert figure.texts[-1].get_text().startswith("A cross: no surface was found.")


def test_strips_of_different_networks_are_refused() -> None:
    with pytest.raises(ValueError, match="networks of different names"):
        strips_figure([strip("image"), strip("image", ("A", "B"))])
    with pytest.raises(ValueError, match="no strips to draw"):
        strips_figure([])
