"""llm-compressor's tables of layers, and its tests of rotations, on regauge.

    PEERS=FOLDER .venv/bin/python judges/llm_compressor.py [PIECE-OF-A-NAME ...]

A case passes if

- AWQ, SmoothQuant: on a tiny model of the entry of the registry, `rg.gauging.audit` reads the table, finds the layers
  that the modifier resolves, and says of each pair what the modifier's own scaling by random factors does to the
  outputs in float64: it holds (to 1e-9), changes them, or cannot be done; of a pair that changes them it says why;
- SpinQuant: without the centering of embeddings the modifier's network is on the orbit of the model, to 1e-9
  (`orbit_distance`); with it the outputs change, and the network is off the orbit;
- test: `test_apply_correctness` on a tiny Llama with `rg.gauge` in the place of the modifier: outputs stay within 1e-9
  in float64, where its bounds are squared errors of 7e-15 to 8e-3.

Entries whose classes are not in transformers (`NOT_THERE`) have no model to be tried on, and are not run.
"""

import ast
import importlib
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from judge import Case, Failed, NotRun, Peer, absent, judge
from scale_tables import change, compare, make_tiny
from torch import nn

import regauge as rg
from regauge.gauging import ScalePair

PEER = Peer(
    "llm-compressor",
    "https://github.com/vllm-project/llm-compressor",
    "ab1ba3effcafc15746cd6d6ca24cba3f7bd7a582",
    ("compressed-tensors==0.20.0", "loguru==0.7.3", "accelerate==1.15.0"),
    ("pydantic", "tqdm", "transformers"),
)
ABSENT = (
    "datasets", "datasets.load", "datasets.formatting", "datasets.formatting.formatting", "auto_round",
    "auto_round.schemes", "auto_round.export", "pynvml", "peft",
)  # fmt: skip
"""Modules that it imports for data and other compressors."""
NOT_THERE = (
    "ChatGLMForConditionalGeneration", "NanbeigeForCausalLM", "Phi3VForCausalLM", "Qwen2_5OmniModel",
    "Step3p5ForCausalLM",
)  # fmt: skip
SIZES = {"Cohere2MoeForCausalLM": {"rms_norm_eps": 1e-5, "num_shared_experts": 0, "tie_word_embeddings": False}}
"""Settings that the peer demands of a model for its rotations; it unties embeddings itself."""
EXPLAINED = {
    "Awq: Llama4ForConditionalGeneration": (
        "the files of Llama 4 hold all experts of a layer in one tensor, where no expert has a name that the table "
        "could match; the peer splits the tensor before it reads its table"
    )
}
"""Sentences for cases that do not pass."""
MODIFIERS = "llmcompressor.modifiers.transform"
CORRECTNESS = "tests/llmcompressor/modifiers/transform/test_correctness.py"


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    sys.path.insert(0, str(checkout / "src"))
    version: Any = ModuleType("llmcompressor.version")  # written when it is built
    version.version = version.__version__ = ""
    sys.modules["llmcompressor.version"] = version
    with absent(ABSENT):
        awq, smooth = (importlib.import_module(f"{MODIFIERS}.{one}") for one in ("awq", "smoothquant"))
        importlib.import_module(f"{MODIFIERS}.spinquant")
        for one in ("modeling.moe.linearize", "modeling.moe.cohere2_moe", "modeling.offset_norm"):
            importlib.import_module(f"llmcompressor.{one}")
    import loguru

    loguru.logger.remove()
    for tool, awq_like in ((Awq, awq), (SmoothQuant, smooth)):
        mappings = importlib.import_module(f"{awq_like.__name__}.dynamic_mappings")
        tool.base = awq_like.base
        for name in dict.fromkeys([*getattr(mappings, tool.static), *getattr(mappings, tool.dynamic)]):
            yield Case(f"{tool.__name__}: {name}", partial(try_table, mappings, tool, name))
    for name in importlib.import_module(f"{MODIFIERS}.spinquant.mappings").SPINQUANT_MAPPING_REGISTRY:
        yield Case(f"SpinQuant: {name}", partial(try_rotations, name))
    for number, settings in enumerate(_settings(checkout / CORRECTNESS)):
        yield Case(f"test: test_apply_correctness, {number}", partial(try_correctness, *settings))


def _settings(path: Path) -> list[tuple[str, str, str, int | None]]:
    """The modifier, dtype, precision and size of blocks of each case of the peer's test."""
    decorators = (one for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
                  for one in node.decorator_list if isinstance(one, ast.Call))  # fmt: skip
    rows = next(decorators).args[1]
    assert isinstance(rows, ast.List)
    return [(*map(ast.unparse, row.elts[:3]), ast.literal_eval(row.elts[3])) for row in rows.elts]  # type: ignore[attr-defined, misc]


def try_rotations(name: str) -> str | None:
    """Compare the network that the modifier makes with the orbit of the model, with and without centered embeddings."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(name, folder, SIZES.get(name, {}))
        far, changes = {}, {}
        for is_centered in (False, True):
            model = tiny.again()
            if name.startswith("Cohere2Moe"):
                prepare = sys.modules["llmcompressor.modeling.moe.cohere2_moe"].prepare_cohere2_moe_for_spinquant
                experts = importlib.import_module("llmcompressor.modeling.moe.linear_experts").LinearExperts2D
                offloaded = importlib.import_module("compressed_tensors.offload.module")
                # Its modules choose tokens by values, and compare addresses of tensors: a trace has neither.
                with (
                    mock.patch.object(experts, "forward", _every_expert),
                    mock.patch.object(offloaded, "send_tensors", lambda value, **_: value),
                ):
                    symmetry = rg.discover(prepare(tiny.again()), (), dict(tiny.model.kwargs or {}))
                prepare(model)
            else:
                symmetry = tiny.model.symmetry
            before = {n: tensor.clone() for n, tensor in model.state_dict().items()}
            first = tiny.run(model)
            rotate(model, "SpinQuantModifier", torch.float64, None, is_centered=is_centered)
            after = {n: tensor.detach() for n, tensor in model.state_dict().items() if n in before}
            size = float(sum(t.square().sum() for t in before.values() if t.is_floating_point())) ** 0.5
            far[is_centered] = rg.canonical.orbit_distance(before, after, symmetry) / size
            changes[is_centered] = change(first, tiny.run(model))
    if not far[False] <= 1e-9:
        raise Failed(
            f"its network is {far[False]:.2g} of its length off the orbit; outputs change by {changes[False]:.2g}"
        )
    if not (far[True] > 1e-3 and changes[True] > 1e-3):
        raise Failed(f"centered embeddings are {far[True]:.2g} off the orbit; outputs change by {changes[True]:.2g}")
    return f"centered embeddings alone change the outputs by {changes[True]:.2g} of their largest entry"


def _every_expert(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of the peer's experts, with every expert on all tokens."""
    chosen = nn.functional.one_hot(top_k_index, experts.num_experts) * top_k_weights.unsqueeze(-1)
    outputs = torch.stack([experts[k](hidden_states) for k in range(experts.num_experts)], dim=-1)
    return (outputs * chosen.sum(1).unsqueeze(1)).sum(-1)


def try_correctness(modifier: str, dtype: str, precision: str, block: int | None) -> str | None:
    """The test with regauge in the place of the modifier, and what the modifier does."""
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny("LlamaForCausalLM", folder, {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96})
        model = tiny.again().to(getattr(torch, dtype.removeprefix("torch."))).double()
        params = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        first = tiny.run(model)
        generator = torch.Generator().manual_seed(0)
        for method in (rg.gauging.Hadamard(is_kept_always=True), rg.gauging.RandomRotation(is_kept_always=True)):
            moved = rg.gauge(params, tiny.model.symmetry, method=method, generator=generator).params
            if all(torch.equal(moved[name], params[name]) for name in params):
                raise Failed("nothing is rotated")
            model.load_state_dict(moved)
            if not (far := change(first, tiny.run(model))) <= 1e-9:
                raise Failed(f"outputs change by {far:.2g}")
        model.load_state_dict(params)
        rotate(model, modifier, getattr(torch, precision.removeprefix("torch.")), block)
        return f"the modifier changes the outputs by {change(first, tiny.run(model)):.1g} of their largest entry"


def rotate(model: nn.Module, name: str, precision: torch.dtype, block: int | None, *, is_centered: bool = True) -> None:
    """Rotate a model as a modifier does."""
    spin, core = sys.modules[f"{MODIFIERS}"], importlib.import_module("llmcompressor.core")
    modifier = getattr(spin, name)(transform_type="random-hadamard", precision=precision, transform_block_size=block)
    if not is_centered:
        object.__setattr__(modifier, "_center_embeddings", lambda _: None)
    state = core.State(model=model)
    modifier.on_initialize(state)
    modifier.on_calibration_start(state, None)


def try_table(mappings: Any, tool: type["Modifier"], name: str) -> str | None:
    """Compare the verdicts on the table of an architecture with what the modifier does."""
    if name in NOT_THERE:
        raise NotRun("transformers has no class of this name: its code is published with its weights, or it is renamed")
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(name, folder)
        return compare(tiny, tool(list(mappings.get_layer_mappings_from_model(tiny.model.module))))


class Modifier:
    """A modifier of the peer: its code resolves rows, and scales."""

    base: Any

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows
        self.table = [self.pair(row) for row in rows]

    def pair(self, row: Any) -> ScalePair:
        """A row of the table."""
        raise NotImplementedError

    def prepare(self, model: nn.Module) -> None:
        """Make experts single modules, and gains of one plus a weight plain gains, as the peer does at its start."""
        sys.modules["llmcompressor.modeling.moe.linearize"].linearize_moe(model)
        context = sys.modules["llmcompressor.modeling.offset_norm"].norm_calibration_context(model)
        context.__enter__()
        object.__setattr__(model, "judged_in", context)  # It ends with the last reference to it.
        for module in model.modules():
            if isinstance(module, nn.Linear):  # It resolves rows of layers that are to be rounded.
                module.quantization_scheme = None  # type: ignore[assignment]


class Awq(Modifier):
    """The modifier of AWQ."""

    static, dynamic = "AWQ_MAPPING_REGISTRY", "AWQ_DYNAMIC_MAPPING_REGISTRY"

    def pair(self, row: Any) -> ScalePair:
        """A row of the table."""
        return ScalePair(row.smooth_layer, tuple(row.balance_layers))

    def resolve(self, row: int, model: nn.Module) -> Iterable[ScalePair]:
        """The pairs of modules of a row."""
        modifier = SimpleNamespace(mappings=[self.rows[row]])
        self.base.AWQModifier._set_resolved_mappings(modifier, model)
        return [ScalePair(one.smooth_name, tuple(one.balance_names)) for one in modifier._resolved_mappings]

    def scale(self, pair: ScalePair, model: nn.Module, factors: torch.Tensor) -> None:
        """Scale a pair as it does after its search."""
        found = SimpleNamespace(
            smooth_name=pair.smooth,
            smooth_layer=model.get_submodule(pair.smooth),
            balance_layers=[model.get_submodule(one) for one in pair.balance],
            parent=model,
        )
        modifier = SimpleNamespace(
            _resolved_mappings=[found],
            _smooth_activation_stats={pair.smooth: None},
            _parent_args_cache={model: ()},
            _run_samples=lambda _: [torch.ones(1)],
            _compute_best_scale=lambda *_: factors,
            _assert_all_activations_consumed=lambda: None,
        )
        self.base.AWQModifier._apply_smoothing(modifier, model)


class SmoothQuant(Modifier):
    """The modifier of SmoothQuant."""

    static, dynamic = "MAPPINGS_REGISTRY", "SMOOTHQUANT_DYNAMIC_MAPPING_REGISTRY"

    def pair(self, row: Any) -> ScalePair:
        """A row of the table."""
        return ScalePair(row.smooth_layers, tuple(row.balance_layers))

    def resolve(self, row: int, model: nn.Module) -> Iterable[ScalePair]:
        """The pairs of modules of a row."""
        names = {module: name for name, module in model.named_modules()}
        modifier = SimpleNamespace(mappings=[self.rows[row]], ignore=None)
        try:
            found = self.base.SmoothQuantModifier._resolve_mappings(modifier, model)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return [ScalePair(one.smooth_name, tuple(names[other] for other in one.balance_layers)) for one in found]

    def scale(self, pair: ScalePair, model: nn.Module, factors: torch.Tensor) -> None:
        """Scale a pair as it does after its statistics."""
        found = SimpleNamespace(
            smooth_name=pair.smooth,
            smooth_layer=model.get_submodule(pair.smooth),
            balance_layers=[model.get_submodule(one) for one in pair.balance],
        )
        modifier = SimpleNamespace(
            resolved_mappings_=[found],
            scales_={pair.smooth: self.base.SmoothQuantScale(torch.zeros(1), torch.ones(1))},
            _calculate_smoothing_scales=lambda *_: factors,
        )
        self.base.SmoothQuantModifier._apply_smoothing(modifier, model)


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)
