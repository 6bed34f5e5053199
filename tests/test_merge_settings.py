"""Numbers that differ between tensors: gradients over the depth, parts of names, and their text form."""

import math

import pytest

from regauge.merging import Setting
from regauge.merging.settings import find_depths, read_number, read_numbers


@pytest.mark.parametrize(
    ("text", "name", "depth", "expected"),
    [
        ("0.5", "anything", 0.3, 0.5),
        ("0,1", "x", 0.0, 0.0),
        ("0,1", "x", 0.25, 0.25),
        ("0,1", "x", 1.0, 1.0),
        ("1,0.5,0", "x", 0.25, 0.75),
        ("1,0.5,0", "x", 0.5, 0.5),
        ("-1,1e-1", "x", 1.0, 0.1),
        ("mlp=0.5/attn=0,1/0.3", "layers.1.mlp.up", 0.9, 0.5),
        ("mlp=0.5/attn=0,1/0.3", "layers.1.attn.q", 0.75, 0.75),
        ("mlp=0.5/attn=0,1/0.3", "norm", 0.0, 0.3),
        ("up=1/mlp=2/3", "mlp.up", 0.0, 1.0),
        ("a=b=1/2", "xa=by", 0.0, 1.0),
    ],
)
def test_a_setting_has_a_number_for_each_tensor(text: str, name: str, depth: float, expected: float) -> None:
    setting = Setting.parse(text)
    assert setting.at(name, depth) == pytest.approx(expected, abs=1e-15)
    assert Setting.parse(str(setting)) == setting
    assert eval(repr(setting)) == setting


@pytest.mark.parametrize("text", ["", "x", "mlp=1", "mlp/1", "=1/2", "1,,2", "nan", "0,inf", "1/2", "mlp=/1", "1;2"])
def test_what_is_no_setting_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be read; write a number|is empty; give a part|one finite number"):
        Setting.parse(text)


def test_numbers_stay_numbers() -> None:
    assert read_number("0.5") == 0.5
    assert read_number("0,1") == Setting((0.0, 1.0))
    assert read_numbers(["0.1"]) == 0.1
    assert read_numbers(["0.1", "a=1/0"]) == (0.1, Setting((0.0,), (("a", (1.0,)),)))
    with pytest.raises(ValueError, match="one finite number at least"):
        Setting(())
    with pytest.raises(ValueError, match="one finite number at least"):
        Setting((math.nan,))


def test_depth_is_found_from_the_names() -> None:
    """The depth is defined as in mergekit: from 0 in the first layer to 1 in the last, 0 outside of layers, and 1 in a
    single layer.
    """
    names = {
        "model.embed_tokens.weight": 0,
        "lm_head.weight": 0,
        **{f"model.layers.{k}.mlp.experts.{e}.up_proj.weight": k / 4 for k in range(5) for e in (0, 9)},
        "decoder.block.0.layer.1.wi.weight": 0,
        "decoder.block.2.layer.0.wi.weight": 1,
        "decoder.block.1.layer.2.wi.weight": 0.5,
        "vision.layers.0.norm": 1,
        "resnet.layer1.conv.weight": 0,
        "0.weight": 0,
        "2.bias": 0.5,
        "12": 1,
    }
    assert find_depths(names) == names
    assert find_depths([]) == {}
