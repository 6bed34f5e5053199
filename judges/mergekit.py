"""mergekit's recipes on regauge: its examples, the merges of its tests, and recipes that cover its documentation.

    PEERS=FOLDER .venv/bin/python judges/mergekit.py [PIECE-OF-A-NAME ...]

Both merge by the same recipe, regauge with `align: false`, as mergekit aligns nothing. A case passes if every tensor of
the output has the same name, shape and dtype, and differs by at most 1e-6 of its Euclidean length. Outputs in half
precision are compared with what mergekit makes in float32, within half a step of their dtype: there mergekit computes
in half precision, while regauge rounds once. Outputs of random methods are compared by the share of entries that they
change, and by how much. What mergekit refuses must be refused. A test of mergekit passes if its own assertions hold for
the output of regauge.
"""

import ast
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers
import yaml
from judge import Case, Failed, Peer, judge, sentence
from mergekit_recipes import RECIPES, REFUSED, make_models
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from regauge.checkpoints.output import Output
from regauge.merging import merge_recipe

PEER = Peer(
    "mergekit",
    "https://github.com/arcee-ai/mergekit",
    "a6e402884ba9bc30da7f23e8304a35f19485de95",
    ("mergekit==0.1.5", "peft==0.21.2", "accelerate==1.15.0", "immutables==0.21", "click", "pydantic", "networkx"),
    ("transformers", "pydantic", "click"),
)
TOLERANCE = 1e-6
HALF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
RANDOM = ("dare_linear", "dare_ties", "della", "della_linear")
SUITES = ("test_basic_merges.py", "test_tokenizer.py", "test_chat_template.py")
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]


FILTER_WISE = (
    "recipe: model_stock, filter_wise",
    "test_basic_merges.py::TestBasicMerges::test_model_stock_filterwise_merge",
    "test_basic_merges.py::TestBasicMerges::test_model_stock_filterwise_VLM_merge",
)
EXPLAINED = {
    "recipe: task_arithmetic, weights that cancel, normalize": (
        "a mean with weights that sum to zero is not defined: regauge refuses it, mergekit returns the sum"
    ),
    **dict.fromkeys(
        FILTER_WISE,
        "rows whose task vectors are at obtuse angles: the ratio of Jang et al. is for angles below 90 degrees; "
        "regauge keeps the base there, mergekit moves away from the models",
    ),
}
"""Sentences for cases that do not pass."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    place = Path(tempfile.mkdtemp(prefix="judge-mergekit-"))
    import mergekit.merge  # that of the wheel, before the checkout is in the path for its tests

    assert not Path(mergekit.__file__ or "").is_relative_to(checkout)
    sys.path.insert(0, str(checkout))
    make_models(place)
    os.chdir(place)
    for path in sorted((checkout / "examples").glob("*.yml")):
        yield Case(f"example {path.name}", lambda path=path: merge_both(_small(path.read_text())))
    for name, text in RECIPES.items():
        yield Case(f"recipe: {name}", lambda text=text: merge_both(text))
    for name, text in REFUSED.items():
        yield Case(f"refused: {name}", lambda text=text: refuse_both(text))
    for suite in SUITES:
        tree = ast.parse((checkout / "tests" / suite).read_text())
        for group in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")):
            for test in (node for node in group.body if isinstance(node, ast.FunctionDef)):
                if test.name.startswith("test_"):
                    item = f"{checkout / 'tests' / suite}::{group.name}::{test.name}"
                    yield Case(f"{suite}::{group.name}::{test.name}", lambda item=item: run_test(item))


def merge_both(text: str) -> str | None:
    """Merge a recipe with both, and compare; what holds instead of equality is returned."""
    with tempfile.TemporaryDirectory(dir=".") as place:
        theirs = _theirs(text, Path(place, "theirs"))
        try:
            ours = _ours(text, Path(place, "ours"))
        except Exception as error:
            raise Failed(f"refused by regauge: {sentence(error)}") from error
        return compare(text, ours, theirs, Path(place))


def refuse_both(text: str) -> str | None:
    """Let both refuse a recipe."""
    with tempfile.TemporaryDirectory(dir=".") as place:
        try:
            _theirs(text, Path(place, "theirs"))
        except (Exception, SystemExit):
            pass
        else:
            raise Failed("mergekit merges this")
        try:
            _ours(text, Path(place, "ours"))
        except ValueError as error:
            return f"refused by both; regauge: {sentence(error)}"
        raise Failed("mergekit refuses this, regauge does not")


def run_test(item: str) -> str | None:
    """Run a test of mergekit on outputs of regauge, which are compared with those of mergekit, too."""
    import tests.common  # of the checkout

    notes: dict[str, None] = {}
    refused: list[str] = []

    def run(config: Any, out_path: str, options: Any = None, config_source: Any = None) -> None:
        text = config.to_yaml()
        with tempfile.TemporaryDirectory(dir=".") as place:
            try:
                theirs = _theirs(text, Path(place, "theirs"))
            except Exception:
                try:
                    _ours(text, Path(place, "ours"))
                except ValueError as error:
                    refused.append(f"refused by both; regauge: {sentence(error)}")
                    raise
                raise Failed("mergekit refuses this, regauge does not") from None
            ours = _ours(text, Path(place, "ours"))
            notes.update({note: None for note in [compare(text, ours, theirs, Path(place))] if note})
            shutil.copytree(ours, out_path, dirs_exist_ok=True)
            if not load(theirs).keys() <= load(ours).keys():  # mergekit looks for names of modules
                save_file(
                    {name: one.clone() for name, one in by_modules(ours).items()}, f"{out_path}/model.safetensors"
                )
                notes["written under the names of modules, which this test looks for"] = None

    kept, tests.common.run_merge = tests.common.run_merge, run
    caught = _Caught()
    try:
        arguments = [item, "-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={Path(item).anchor}"]
        code = pytest.main([*arguments, "--import-mode=importlib"], plugins=[caught])
    finally:
        tests.common.run_merge = kept
    if code and not (refused and refused[-1].endswith(caught.reason or "?")):
        raise Failed(caught.reason or f"pytest ends with {code}")
    return "; ".join([*notes, *refused]) or None


class _Caught:
    """A plugin of pytest that keeps the reason of a failure."""

    reason: str | None = None

    def pytest_exception_interact(self, call: Any) -> None:
        error = call.excinfo.value
        self.reason = str(error) if isinstance(error, Failed) else sentence(error)


def compare(text: str, ours: Path, theirs: Path, place: Path) -> str | None:
    """Raise `Failed` where the outputs differ by more than they may."""
    a, b, recipe = load(ours), load(theirs), yaml.safe_load(text)
    if not b.keys() <= a.keys():  # mergekit writes names of modules, where files have others
        a = by_modules(ours)
    left = len(a.keys() - b.keys())
    if not b.keys() <= a.keys():
        raise Failed(f"other tensors: {sorted(a.keys() ^ b.keys())[:4]}")
    note = _compare_tokens(a, b, ours, theirs)
    if left:
        note = f"mergekit leaves out {left} tensors that the models have, and regauge merges them"
    shapes = [name for name in b if a[name].shape != b[name].shape]
    if shapes:
        raise Failed(f"{shapes[0]} has shape {tuple(a[shapes[0]].shape)}, that of mergekit {tuple(b[shapes[0]].shape)}")
    other = [name for name in b if a[name].dtype != b[name].dtype]
    asked = recipe.get("out_dtype", recipe.get("dtype"))
    if other and all(a[name].dtype == getattr(torch, str(asked), None) for name in other):
        note = f"mergekit writes {b[other[0]].dtype} although the recipe says {asked}"
    elif other:
        raise Failed(f"{other[0]} is {a[other[0]].dtype}, that of mergekit {b[other[0]].dtype}")
    if recipe["merge_method"] in RANDOM and "density" in text:
        return _compare_random(recipe, a, b)
    if any(a[name].dtype in HALF for name in b):
        wide = {**recipe, "dtype": "float32", "out_dtype": "float32"}
        b = load(_theirs(yaml.safe_dump(wide), place / "wide"))
        _compare_tokens(a, b, ours, place / "wide")
        note = (f"{note}; " if note else "") + "half precision: within half a step of what mergekit makes in float32"
    far = {name: _distance(a[name], b[name]) for name in b}
    limit = {name: HALF.get(a[name].dtype, TOLERANCE) for name in b}
    wrong = [name for name in far if not far[name] <= limit[name]]
    if wrong:
        worst = max(wrong, key=lambda name: far[name])
        raise Failed(f"{len(wrong)} of {len(far)} tensors differ, {worst} by {far[worst]:.2g} of its length")
    return note


def by_modules(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by the names that modules of transformers give them."""
    config = transformers.AutoConfig.from_pretrained(str(folder))
    model = getattr(transformers, config.architectures[0])
    return dict(model.from_pretrained(str(folder), dtype="auto").state_dict())


def load(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


def _compare_tokens(a: dict[str, Tensor], b: dict[str, Tensor], ours: Path, theirs: Path) -> str | None:
    """Bring rows of embeddings to the order of the others' tokens, and compare templates by what they render."""
    if not all((folder / "tokenizer.json").is_file() for folder in (ours, theirs)):
        return None
    mine, other = (transformers.AutoTokenizer.from_pretrained(str(folder)) for folder in (ours, theirs))
    texts = [_rendered(one) for one in (mine, other)]
    note = None
    if texts[0] != texts[1]:
        if _squeezed(texts[0]) != _squeezed(texts[1]):
            raise Failed(f"the chat template renders {texts[0]!r}, that of mergekit {texts[1]!r}")
        note = "the chat templates render alike but for spaces, where regauge has those of the models' own format"
    known, wanted = mine.get_vocab(), other.get_vocab()
    if known.keys() != wanted.keys():
        raise Failed(f"other tokens: {sorted(known.keys() ^ wanted.keys())[:4]}")
    if known == wanted:
        return note
    rows = {wanted[token]: known[token] for token in wanted}
    for name in a:
        if ("embed_tokens" in name or "lm_head" in name) and name in b and a[name].shape == b[name].shape:
            order = torch.tensor([rows.get(k, k) for k in range(len(a[name]))])
            a[name] = a[name][order]
    return "rows are compared token by token: the numbers of added tokens differ, as mergekit's order is that of a set"


def _rendered(tokenizer: Any) -> str | None:
    if not tokenizer.chat_template:
        return None
    return str(tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True))


def _squeezed(text: str | None) -> str:
    return "".join((text or "").split())


def _compare_random(recipe: dict[str, Any], a: dict[str, Tensor], b: dict[str, Tensor]) -> str:
    base = load(Path(recipe["base_model"]))
    base = base if b.keys() <= base.keys() else by_modules(Path(recipe["base_model"]))
    shares, sums = [], []
    for found in (a, b):
        change = torch.cat([(found[name].double() - base[name].double()).flatten() for name in b])
        shares.append(float((change.abs() > 1e-6).double().mean()))
        sums.append(float(change.abs().sum()))
    if abs(shares[0] - shares[1]) > 0.02 or abs(sums[0] / sums[1] - 1) > 0.06:
        raise Failed(
            f"changes {shares[0]:.3f} of the entries by {sums[0]:.4g}, mergekit {shares[1]:.3f} by {sums[1]:.4g}"
        )
    return f"random: {shares[0]:.3f} of the entries change, {shares[1]:.3f} in mergekit"


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) if b.numel() else 0.0


def _theirs(text: str, out: Path) -> Path:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import MergeOptions, run_merge

    options = MergeOptions(
        random_seed=0, quiet=True, write_model_card=False, lora_merge_cache=str(out.parent / "merged"), device="cpu"
    )
    run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), str(out), options)
    return out


def _ours(text: str, out: Path) -> Path:
    recipe = Path(f"{out.name}.yml")
    recipe.write_text(text + "\nregauge: {align: false}\n")
    merge_recipe(recipe, Output(out, overwrite=True))
    return out


def _small(text: str) -> str:
    """An example with small models in the place of those that it names."""
    recipe = yaml.safe_load(text)
    models: dict[str, str] = {}

    def rename(node: Any) -> Any:
        if isinstance(node, dict):
            for key, value in node.items():
                if key in ("model", "base_model"):
                    models.setdefault(value, ("deep_one", "deep_two", "deep_three", "deep_base")[len(models)])
                    node[key] = models[value]
                else:
                    rename(value)
        elif isinstance(node, list):
            for one in node:
                rename(one)
        return node

    return yaml.safe_dump(rename(recipe), sort_keys=False)


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
