"""A symmetry as a picture: every axis with a group has its dot, and threads do not cover one another."""

import re
from collections import defaultdict
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
import torch
from page_cases import many_groups
from symmetries import BY_HAND
from torch import nn

import regauge as rg
from regauge.cli.main import main
from regauge.core.groups import Frozen
from regauge.report.symmetry_page import symmetry_page
from regauge.report.thread_layout import ThreadLayout, lay_out


def layout_of(symmetry: rg.Symmetry) -> ThreadLayout:
    return lay_out(symmetry.groups, symmetry.shapes, symmetry.frozen, symmetry.readers)


def found() -> rg.Symmetry:
    """Return a traced network with a frozen input and a frozen output."""
    torch.manual_seed(0)
    first = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Tanh())
    return rg.discover(nn.Sequential(*first, nn.Flatten(), nn.Linear(54, 5)).eval(), torch.randn(2, 3, 7, 7))


CASES = {**BY_HAND, "many": many_groups(30), "traced": found()}


@pytest.mark.parametrize("name", CASES)
def test_every_placement_has_a_dot_in_the_band_of_its_layer(name: str) -> None:
    symmetry = CASES[name]
    layout = layout_of(symmetry)
    drawn = {thread.group.name: thread for thread in layout.threads}
    assert drawn.keys() == {group.name for group in symmetry.groups}
    for group in symmetry.groups:
        marks = {(mark.parameter, mark.axis): mark for mark in drawn[group.name].marks}
        assert marks.keys() == {(place.parameter, place.axis) for place in group.placements}
        for (parameter, axis), mark in marks.items():
            layer, _, own = parameter.rpartition(".")
            assert layout.bands[mark.band].name == layer
            threads = layout.bands[mark.band].parameters[own][axis].threads
            assert group.name in {layout.threads[k].group.name for k in threads}
            assert mark.is_read == ((parameter, axis) in symmetry.readers)
    on_axes = {
        (f"{band.name}.{own}".lstrip("."), axis.number): axis.reasons
        for band in layout.bands
        for own, axes in band.parameters.items()
        for axis in axes
    }
    for row in symmetry.frozen:
        assert row.reason in on_axes[row.parameter, row.axis]


@pytest.mark.parametrize("name", CASES)
def test_threads_in_one_lane_have_no_band_in_common(name: str) -> None:
    lanes = defaultdict(list)
    for thread in (layout := layout_of(CASES[name])).threads:
        lanes[thread.lane].append(thread.ends)
    for ends in lanes.values():
        for (_, bottom), (top, _) in zip(sorted(ends), sorted(ends)[1:], strict=False):
            assert bottom < top
    assert sorted(lanes) == list(range(layout.lanes))


@pytest.mark.parametrize("name", CASES)
def test_a_symmetry_draws_itself(name: str) -> None:
    symmetry = CASES[name]
    (axes,) = symmetry.plot().axes
    layout = layout_of(symmetry)
    assert [text.get_text() for text in axes.get_yticklabels()] == [band.name or "model" for band in layout.bands]
    dots = sorted(
        (round(float(x)), round(float(y)))
        for line in axes.lines
        if line.get_marker() == "o"
        for x, y in line.get_xydata()
    )
    assert {*dots} == {(thread.lane, mark.band) for thread in layout.threads for mark in thread.marks}


def test_nothing_is_not_drawn() -> None:
    nothing = rg.Symmetry.from_axes({"w": (None,)}).bind({"w": torch.zeros(3)})
    with pytest.raises(ValueError, match="the symmetry has no groups and no frozen axes: there is nothing to draw"):
        nothing.plot()


def test_the_page_names_every_group_and_every_reason() -> None:
    symmetry = CASES["traced"]
    page = symmetry_page(symmetry, "nets.py:net")
    threads = re.findall(r'<a id="t(\d+)".*?<title>(.*?)</title>', page, re.DOTALL)
    assert [int(number) for number, _ in threads] == list(range(len(symmetry.groups)))
    told = [unescape(text) for _, text in threads]
    for group in symmetry.groups:
        (own,) = (text for text in told if text.startswith(f"{group.name}: {group.kind}, {group.size} units"))
        assert all(f"{place.parameter}[{place.axis}]" in own for place in group.placements)
    for row in symmetry.frozen:
        assert f"is frozen: {row.reason}" in unescape(page)
    assert f"There are 10<sup>{symmetry.log10_order:,.1f}</sup> discrete transformations" in page
    # Without sizes there is no number of transformations, and sizes are question marks.
    unsized = symmetry_page(rg.Symmetry.from_axes({"w": ("h", None), "v": (None, "h")}), "by hand")
    assert "discrete transformations" not in unsized
    assert ">?</a>" in unsized


def test_names_and_reasons_are_no_markup() -> None:
    symmetry = rg.Symmetry.from_axes({"<b>.w": ("<i>", None), "v": (None, "<i>")})
    symmetry = symmetry.bind({"<b>.w": torch.zeros(3, 2), "v": torch.zeros(2, 3)})
    symmetry = replace(symmetry, frozen=(Frozen("v", 0, 2, '"><script>'),))
    page = symmetry_page(symmetry, "<model>")
    assert "<script" not in page
    assert "<model>" not in page
    assert "&lt;b&gt;" in page
    symmetry.plot()


def test_the_command_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    net = "nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (torch.randn(2, 4),)"
    (tmp_path / "nets.py").write_text(f"import torch\nfrom torch import nn\n\n\ndef net():\n    return {net}\n")
    main(["discover", "nets.py:net", "--page", "page.html", "-o", "net.json"])
    assert "written: page.html" in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page == symmetry_page(rg.Symmetry.from_json((tmp_path / "net.json").read_text()), "nets.py:net")
    assert "The symmetry of nets.py:net" in page
    for name, message in (("page.html", "exists"), ("page.txt", ".html")):
        with pytest.raises(SystemExit):
            main(["discover", "nets.py:net", "--page", name])
        assert message in capsys.readouterr().err
