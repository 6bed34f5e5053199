"""Tables of scale pairs of other tools, tried by `rg.gauging.audit` on tiny models, and by the tool's own code."""

import copy
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from judge import HERE, Failed
from torch import Tensor, nn

import regauge as rg
from regauge.gauging import Finding, ScalePair, audit
from regauge.gauging.mappings import scale_pairs

HOLDS, BROKEN = 1e-9, 1e-5
"""Relative changes of outputs: of a pair that regauge calls exact, and of one that the tool's code shows to be none (it
has steps in float32)."""
BEFORE_BLOCKS = ("language_model", "model", "transformer", "thinker", "visual", "vision_tower", "text_model", "decoder")
"""Parts of names that files and classes of transformers do not share."""


class Tool(Protocol):
    """A tool that scales layers by a table.

    Attributes:
        table: The rows of the table.
    """

    table: Sequence[ScalePair]

    def prepare(self, model: nn.Module) -> None:
        """Change a model as the tool does before it scales; its outputs stay."""

    def resolve(self, row: int, model: nn.Module) -> Iterable[ScalePair]:
        """The pairs of modules that the tool makes of a row; `ValueError` where it cannot."""

    def scale(self, pair: ScalePair, model: nn.Module, factors: Tensor) -> None:
        """Scale a pair by the tool's own code."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model of transformers with random values, saved to a folder."""

    model: rg.hub.Model
    folder: str

    def again(self) -> nn.Module:
        """The model anew in float64, with what the folder holds."""
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        return type(self.model.module).from_pretrained(self.folder, dtype=torch.float64, **plain).eval()

    def files(self) -> list[str]:
        """The names of tensors in the folder."""
        return list(rg.Checkpoint.open(self.folder))

    def run(self, module: nn.Module) -> list[Tensor]:
        """Run a module, and return its outputs in float64."""
        args, kwargs = _wide(copy.deepcopy((self.model.inputs, dict(self.model.kwargs or {}))))
        with torch.no_grad():
            found = torch.utils._pytree.tree_leaves(module(*args, **kwargs))
        return [one.clone() for one in found if isinstance(one, Tensor) and one.is_floating_point()]


def make_tiny(architecture: str, folder: str, sizes: Mapping[str, Any] = MappingProxyType({})) -> Tiny:
    """A tiny model of a class of transformers, of other sizes where given; gains and biases are random, too."""
    import transformers

    sys.path.append(str(HERE.parent / "benchmarks"))
    from census_models import NotBuilt, open_transformers, small_configuration, tiny

    torch.manual_seed(0)
    kind = getattr(transformers, architecture).config_class
    try:
        model = open_transformers(f"{kind.model_type}/{architecture}", folder)
        config = model.module.config
    except NotBuilt:  # The given sizes may be what it needs.
        config = small_configuration(kind, tiny)
        config.architectures = [architecture]
    if sizes:
        config = type(config)(**config.to_dict() | sizes)
        config.save_pretrained(folder)
        model = rg.open_model(folder, values="always", retrace=True)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += (0.1 if parameter.ndim > 1 else 0.3) * noise
    model.module.save_pretrained(folder)
    return Tiny(model, folder)


def compare(tiny: Tiny, tool: Tool) -> str | None:
    """Raise `Failed` where the verdicts of regauge on a table are not those that the tool's own code shows."""
    model = tiny.model
    kwargs = model.trace().kwargs
    findings = audit(tool.table, tiny.folder, model.symmetry, model.module, model.inputs, kwargs)
    module = tiny.again()
    before = tiny.run(module)
    tool.prepare(module)
    if (far := change(before, tiny.run(module))) > BROKEN:
        raise Failed(f"the tool itself changes the outputs by {far:.2g} when it prepares the model")
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    names = {plain(name): name for name, _ in module.named_modules()}
    notes: dict[str, None] = {}
    broken: dict[str, float] = {}
    for row, pattern in enumerate(tool.table):
        ours = {plain(one.smooth): one for one in findings if one.row == row and one.verdict != "unmatched"}
        try:
            pairs = list(tool.resolve(row, module))
        except ValueError:
            notes["rows that the tool cannot resolve on this model, and regauge can: " + _ending(pattern.smooth)] = None
            pairs = [_renamed(one, names) for one in ours.values()]
        for pair in pairs:
            far = _try(tiny, tool, pair, module, before)
            module.load_state_dict(start)
            finding = ours.pop(plain(pair.smooth), None)
            if finding is None and far is None and not hasattr(module.get_submodule(pair.smooth), "weight"):
                notes[f"a layer without weights is scaled ({_ending(pattern.smooth)}): no modules match"] = None
                continue
            _agree(row, pair, finding, far)
            if far is not None and far > BROKEN:
                broken[_ending(pattern.smooth)] = max(broken.get(_ending(pattern.smooth), 0.0), far)
        left = {one.verdict for one in ours.values()}
        if "holds" in left:
            raise Failed(f"row {row}: the tool leaves out pairs of {_ending(pattern.smooth)} that regauge says hold")
        if "broken" in left:
            notes[f"pairs that the tool leaves out, and that would change the outputs: {_ending(pattern.smooth)}"] = (
                None
            )
    _require_written(model.symmetry, findings)
    if broken:
        rows = ", ".join(f"{row} by {change:.2g}" for row, change in broken.items())
        notes[f"rows that change the outputs, and regauge says what they leave out: {rows}"] = None
    return "; ".join(notes) or None


def _try(tiny: Tiny, tool: Tool, pair: ScalePair, module: nn.Module, before: list[Tensor]) -> float | None:
    """The change of the outputs when the tool scales a pair; None where it cannot."""
    size = module.get_submodule(pair.balance[0]).weight.shape[1]
    drawn = torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    try:
        with torch.no_grad():
            tool.scale(pair, module, torch.exp2(2 * drawn - 1))
    except (RuntimeError, AttributeError):  # Lengths do not agree, or one has no weight.
        return None
    return change(before, tiny.run(module))


def _agree(row: int, pair: ScalePair, finding: Finding | None, far: float | None) -> None:
    where = f"row {row}, {pair.smooth}"
    if finding is None:
        raise Failed(f"regauge does not find {pair.smooth}, which row {row} scales")
    if apart := {*map(plain, finding.balance)} ^ {*map(plain, pair.balance)}:
        raise Failed(f"{where}: other layers behind it, such as {sorted(apart)[0]}")
    wanted = "skipped" if far is None else "holds" if far <= BROKEN else "broken"
    if finding.verdict != wanted:
        raise Failed(f"{where}: outputs change by {far}, and regauge says '{finding.verdict}' ({finding.reason})")
    if finding.verdict == "holds" and not (finding.change or 0.0) <= HOLDS:
        raise Failed(f"{where}: regauge says that it holds, with a change of {finding.change}")
    if finding.verdict == "broken" and not (finding.missing or finding.extra or finding.reason):
        raise Failed(f"{where}: regauge does not say what is missing")


def _require_written(symmetry: rg.Symmetry, findings: Iterable[Finding]) -> None:
    """Raise `Failed` if the table that regauge writes lacks a pair that holds, and it names no family left out."""
    pairs, others = scale_pairs(symmetry)
    known = {(plain(one.smooth), frozenset(map(plain, one.balance))) for one in pairs}
    for one in findings:
        is_own = (plain(one.smooth), frozenset(map(plain, one.balance))) in known
        if one.verdict == "holds" and not is_own and not others:
            raise Failed(f"the table that regauge writes lacks {one.smooth}, which holds")


def _renamed(finding: Finding, names: dict[str, str]) -> ScalePair:
    return ScalePair(names[plain(finding.smooth)], tuple(names[plain(one)] for one in finding.balance))


def _ending(pattern: str) -> str:
    return re.sub(r"\b\d+\b", "N", pattern.removeprefix("re:").strip(".*^$").replace("\\", ""))


def plain(name: str) -> str:
    """A name without what a file and a class of transformers put before the blocks."""
    return ".".join(part for part in name.split(".") if part not in BEFORE_BLOCKS)


def change(first: list[Tensor], second: list[Tensor]) -> float:
    """The largest change of outputs, relative to the largest entry of each."""
    pairs = zip(first, second, strict=True)
    return max(float((b - a).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs)


def _wide(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda one: one.double() if one.is_floating_point() else one, tree)
