"""Streamed alignment finds the result of alignment in memory, with less memory, from files on the disk."""

import importlib
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coverings import covering
from streamed_cases import UNLIMITED, pair_of, require_same
from torch import Tensor

import regauge as rg
from regauge.alignment.streamed.match import StreamedResult, align_streamed
from regauge.alignment.streamed.plan import can_be_blocked, make_plan
from regauge.alignment.streamed.source import Total, part_cost
from regauge.alignment.streamed.state import State, load_state, save_state
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.writing import save
from regauge.cli.main import main
from regauge.core.act import resolve
from regauge.core.element import PARTS
from regauge.core.families import inner_products
from regauge.core.groups import Group, Placement
from regauge.nets.mlp import mlp
from regauge.nets.transformer import Llama

ONE_WAY = [
    "mlp_tanh",
    "mlp_sine",
    "mlp_linear",
    "rnn_tanh",
    "resnet20_batch_B",
    "gpt",
]
"""Methods that are tested with one treatment of scales each. Other methods are tested with all three."""


@pytest.mark.parametrize(
    ("name", "scales"),
    [(name, scales) for name in ("mlp_relu", "cnn_flatten", "llama") for scales in ("balance", "recompute", "keep")]
    + [(name, ("balance", "recompute", "keep")[k % 3]) for k, name in enumerate(ONE_WAY)],
)
def test_streaming_finds_what_matching_in_memory_finds(name: str, scales: str, tmp_path: Path) -> None:
    """Networks are matched as stored; tests/test_streamed_representatives.py tests representatives."""
    pair, method = pair_of(name, tmp_path), rg.WeightMatching(scales=scales)  # type: ignore[arg-type]
    expected = rg.align(*pair.params, replace(pair.symmetry, translations=(), gains=()), method=method)
    whole = pair.plan(UNLIMITED, scales)
    parts = pair.plan(whole.peak - 1, scales)
    assert not whole.spread
    assert parts.spread
    assert parts.peak < whole.peak
    for plan in (whole, parts):
        found = align_streamed(*pair.files, plan, method)
        require_same(found.element, expected.element)
        assert found.is_converged
        assert found.objective == pytest.approx(expected.objective, rel=1e-7)
        assert found.initial == pytest.approx(expected.initial, abs=1e-7 * abs(expected.objective))


NOISE = {"near": 0.02, "far": 1.0}
BLOCKED = ("mlp_relu", "mlp_tanh", "cnn_flatten", "llama", "gpt", "resnet20_batch_B")


@pytest.mark.parametrize(
    ("name", "noise"),
    covering(BLOCKED, NOISE, of=2),
)
def test_working_sets_in_blocks_give_the_same(name: str, noise: str, tmp_path: Path) -> None:
    pair, method = pair_of(name, tmp_path, NOISE[noise]), rg.WeightMatching()
    plan = pair.smaller()
    sets = [replace(one, is_blocked=can_be_blocked(pair.symmetry, one)) for one in plan.sets]
    assert any(one.is_blocked for one in sets)
    expected = align_streamed(*pair.files, plan, method)
    found = align_streamed(*pair.files, replace(plan, sets=tuple(sets)), method)
    require_same(found.element, expected.element)
    assert found.history == pytest.approx(expected.history, rel=1e-12)
    assert found.initial == pytest.approx(expected.initial, rel=1e-12)
    assert found.is_converged


@pytest.mark.parametrize("name", ["resnet20_batch_B", "torch_transformer", "mlp_relu"])
def test_streaming_leaves_nothing_of_a_random_element(name: str, tmp_path: Path) -> None:
    """The element includes scales that transform running statistics."""
    pair = pair_of(name, tmp_path)
    a, symmetry = pair.params[0], pair.symmetry
    save(symmetry.act(symmetry.random(torch.Generator().manual_seed(3), PARTS), a), tmp_path / "moved.safetensors")
    with Checkpoint.open(tmp_path / "moved.safetensors") as moved:
        found = align_streamed(pair.files[0], moved, pair.smaller(), rg.WeightMatching())
        result = symmetry.act(found.element, moved.params)
    for n in (n for n in symmetry.sites if n not in symmetry.buffers):
        assert float((result[n] - a[n]).norm()) <= 1e-6 * float(a[n].norm())


@pytest.mark.parametrize("name", ["mlp_relu", "mlp_sine", "siren", "torch_transformer", "resnet20_layer_B", "rnn_relu"])
def test_unrelated_networks_climb_monotonically_and_never_below_the_identity(name: str, tmp_path: Path) -> None:
    pair = pair_of(name, tmp_path, noise=1)
    plan = pair.smaller()
    found = align_streamed(*pair.files, plan, rg.WeightMatching())
    assert found.objective >= found.initial
    for earlier, later in itertools.pairwise(found.history):
        assert later >= earlier - 1e-9 * abs(earlier)


def test_the_objective_is_that_of_the_moved_network(tmp_path: Path) -> None:
    pair = pair_of("llama", tmp_path, noise=1)
    found = align_streamed(*pair.files, pair.smaller(), rg.WeightMatching(scales="keep"))
    moved = pair.symmetry.act(found.element, pair.params[1])
    total = sum(
        float((pair.params[0][n] * moved[n]).sum()) for n in pair.symmetry.sites if n not in pair.symmetry.buffers
    )
    assert found.objective == pytest.approx(total)


class _InterruptError(Exception):
    pass


def test_an_interrupted_alignment_goes_on_from_its_file(tmp_path: Path) -> None:
    pair = pair_of("mlp_linear", tmp_path)
    plan = pair.smaller()
    method = rg.WeightMatching(max_sweeps=4)
    expected = align_streamed(*pair.files, plan, method)
    assert len(expected.history) == 4
    state: State | None = None
    path, stops = tmp_path / "progress.safetensors", 0
    result: StreamedResult | None = None
    while result is None:

        def keep(state: State) -> None:
            save_state(state, path)
            raise _InterruptError

        try:
            result = align_streamed(*pair.files, plan, method, state=state, keep=keep)
        except _InterruptError:
            stops, state = stops + 1, load_state(path, pair.symmetry)
            if stops == 5:
                result = align_streamed(*pair.files, plan, method, state=state)
    assert stops == 5
    require_same(result.element, expected.element)
    assert result.objective == pytest.approx(expected.objective)


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    pair = pair_of("mlp_relu", tmp_path)
    broken = {**pair.params[1], "2.weight": pair.params[1]["2.weight"].clone()}
    broken["2.weight"][0, 0] = torch.nan
    save(broken, tmp_path / "b.safetensors", overwrite=True)
    files = (pair.files[0], Checkpoint.open(tmp_path / "b.safetensors"))
    for scales in ("keep", "balance"):
        method = rg.WeightMatching(scales=scales)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"'2\.weight' of .*b\.safetensors holds NaN or Inf in 1 of"):
            align_streamed(*files, pair.smaller(), method)


def test_a_plan_that_cannot_hold_so_little_says_how_much_it_needs(tmp_path: Path) -> None:
    pair = pair_of("llama", tmp_path)
    with pytest.raises(ValueError, match=r"but only 0\.001 GB are allowed"):
        pair.plan(10**6)


def _signed_group() -> Group:
    """Return signs like those of a residual stream with two norms: shared signs, and signs of each norm."""
    rows = {"writer": (1, 0, 0), "gain1": (1, 1, 0), "reader1": (0, 1, 0), "gain2": (1, 0, 1), "reader2": (0, 0, 1)}
    return Group("g", 4, tuple(Placement(name, 0, sign=sign) for name, sign in rows.items()), signs=3)


def test_a_total_is_the_maximum_over_all_orders_and_all_signs() -> None:
    group, generator = _signed_group(), torch.Generator().manual_seed(0)
    names = [place.parameter for place in group.placements]
    a, b = ({n: torch.randn(4, 3, generator=generator, dtype=torch.float64) for n in names} for _ in range(2))
    sites = {n: resolve((group,), n, (4, 3)) for n in names}

    def load(name: str) -> tuple[Tensor, Tensor]:
        return a[name], b[name]

    total = Total(group, shared=(0,))
    for part, own in ((["writer"], ()), (["gain1", "reader1"], (1,)), (["gain2", "reader2"], (2,))):
        total.add(part_cost(group, {name: sites[name] for name in part}, load), own)
    value, gain = total.closest()
    assert value.perm is not None
    assert value.sign is not None

    products = {p.parameter: inner_products(group, a[p.parameter], b[p.parameter]) for p in group.placements}
    patterns = list(itertools.product((1, -1), repeat=3))

    def worth(i: int, j: int, patterns: list[tuple[int, ...]]) -> float:
        factor = {p.parameter: p.sign for p in group.placements}
        return max(
            sum(
                float(m[i, j]) * torch.tensor(s).pow(torch.tensor(factor[n])).prod().item() for n, m in products.items()
            )
            for s in patterns
        )

    orders = itertools.permutations(range(4))
    best = max(sum(worth(i, j, patterns) for i, j in enumerate(order)) for order in orders)
    here = [(1, *rest) for rest in itertools.product((1, -1), repeat=2)]  # parts have chosen their own signs already
    assert gain == pytest.approx(best - sum(worth(i, i, here) for i in range(4)))
    chosen = [worth(i, int(value.perm[i]), [p for p in patterns if p[0] == int(value.sign[0, i])]) for i in range(4)]
    assert sum(chosen) == pytest.approx(best)


def test_the_plan_bounds_the_memory(tmp_path: Path, resident: Callable[[str], int]) -> None:
    with torch.device("meta"):
        module = Llama(5000, width=96, layers=3, heads=6, kv_heads=3).eval()
    symmetry = rg.discover(module, (torch.zeros(2, 4, dtype=torch.long, device="meta"),))
    generator = torch.Generator().manual_seed(0)
    for letter in "ab":
        params = {n: torch.randn(t.shape, generator=generator) for n, t in module.state_dict().items()}
        save(params, tmp_path / f"{letter}.safetensors")
    del params
    files = (Checkpoint.open(tmp_path / "a.safetensors"), Checkpoint.open(tmp_path / "b.safetensors"))
    symmetry = symmetry.bind(files[0].on_meta())
    dtypes = {name: entry.dtype for name, entry in files[0].stored.items()}
    whole = make_plan(symmetry, [dtypes, dtypes], memory=UNLIMITED, balances=())
    plan = make_plan(symmetry, [dtypes, dtypes], memory=whole.peak - 1, balances=())
    assert plan.spread
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    align_streamed(*files, plan, rg.WeightMatching(scales="keep", max_sweeps=1))
    held = resident("VmHWM") - before
    assert held <= plan.peak


BLOCKS = """
import re, sys
from pathlib import Path
import regauge as rg
from regauge.alignment.streamed.match import align_streamed
from regauge.alignment.streamed.plan import make_plan
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.memory_limit import resident

files = [Checkpoint.open(Path(path)) for path in sys.argv[2:]]
symmetry = rg.Symmetry.from_json(Path(sys.argv[1]).read_text()).bind(files[0].on_meta())
dtypes = {name: entry.dtype for name, entry in files[0].stored.items()}
whole = make_plan(symmetry, [dtypes, dtypes], memory=UNLIMITED, balances=())
plan = make_plan(symmetry, [dtypes, dtypes], memory=whole.peak - 1, balances=())
assert [one.is_blocked for one in plan.sets] == [True]
assert plan.peak < whole.peak / 2
Path("/proc/self/clear_refs").write_text("5")
base = resident()
found = align_streamed(*files, plan, rg.WeightMatching(scales="keep"))
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
assert found.objective > 100 * abs(found.initial)
print(int(peak[1]) * 1024 - base, plan.peak)
"""


@pytest.mark.usefixtures("resident")
def test_the_plan_bounds_the_memory_of_blocks(tmp_path: Path) -> None:
    """The test runs in a separate process, in which no memory of other tests is free or reclaimed."""
    with torch.device("meta"):
        module = mlp(1024, 3072, 1024, activation=torch.tanh)
    symmetry = rg.discover(module, (torch.zeros(2, 1024, device="meta"),))
    (tmp_path / "symmetry.json").write_text(symmetry.to_json())
    generator = torch.Generator().manual_seed(0)
    for letter in "ab":
        params = {n: torch.randn(t.shape, generator=generator) for n, t in module.state_dict().items()}
        save(params, tmp_path / f"{letter}.safetensors")
    script = BLOCKS.replace("UNLIMITED", str(UNLIMITED))
    names = ("symmetry.json", "a.safetensors", "b.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", script, *names], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    held, planned = map(int, done.stdout.split())
    assert 0.9 * 4 * 3072**2 < held <= planned  # The matrix of costs alone has 4 * 3072**2 bytes.


COMMAND = """
import re, sys
from pathlib import Path
import regauge.checkpoints.job, regauge.cli.align, regauge.cli.merge
from regauge.cli.main import main
from regauge.checkpoints.memory_limit import resident
regauge.checkpoints.job.FileJob.fits = False
base = resident()
main(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print("held", int(peak[1]) * 1024 - base)
"""
LARGER = """
import torch
from regauge.nets.mlp import mlp
from regauge.nets.transformer import Llama


def model():
    return Llama(12000, width=192, layers=1, heads=6, kv_heads=3), torch.zeros(2, 4, dtype=torch.long)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory")
@pytest.mark.parametrize("command", ["align", "merge --rule karcher"])
def test_a_command_holds_no_more_than_it_tells(command: str, tmp_path: Path) -> None:
    """The measurement includes everything that is imported and traced since the start."""
    (tmp_path / "larger_nets.py").write_text(LARGER)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in Llama(12000, width=192, layers=1, heads=6, kv_heads=3).state_dict().items()}
    for letter in "ab":
        save({n: torch.randn(s, generator=generator) for n, s in shapes.items()}, tmp_path / f"{letter}.safetensors")
    pair = ["a.safetensors", "b.safetensors", "-o", "out.safetensors", "--model", "larger_nets.py:model"]
    arguments = [sys.executable, "-c", COMMAND, *command.split(), *pair, "--memory", "2GB"]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = re.search(r"at most (\d+) MB, (\d+(?:\.\d+)?) MB of them already", done.stdout)
    assert told is not None, done.stdout
    held = re.search(r"held (\d+)", done.stdout)
    assert held is not None
    assert float(told[2]) > 10
    assert int(held[1]) <= 1e6 * (float(told[1]) + 1)


def test_transformers_takes_the_output_as_it_is(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    for seed, letter in enumerate("ab"):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / letter, max_shard_size="8KB")
    main(["align", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "out")])
    b, out = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("b", "out"))
    tokens = torch.arange(12).reshape(2, 6)
    assert out.dtype == torch.bfloat16
    assert {p.name for p in (tmp_path / "b").iterdir()} <= {p.name for p in (tmp_path / "out").iterdir()}
    assert not torch.equal(out.model.layers[0].mlp.up_proj.weight, b.model.layers[0].mlp.up_proj.weight)
    torch.testing.assert_close(out.float()(tokens).logits, b.float()(tokens).logits, rtol=0, atol=0.02)


def test_large_blocks_are_compared_by_the_products_of_their_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair = pair_of("llama", tmp_path, noise=0.3)
    blocks = importlib.import_module("regauge.alignment.engine.nested_blocks")
    expected = rg.align(*pair.params, pair.symmetry)
    monkeypatch.setattr(blocks, "COMPRESSED", 0)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(1, 3, 4, 9, generator=generator, dtype=torch.float64) for _ in range(2))
    group = Group("g", 4, (Placement("w", 0),))
    flat_a, flat_b = blocks.pair_blocks(a, b, resolve((group,), "w", (4, 9)), is_permuted=True)
    assert flat_a.shape == flat_b.shape == (9, 4, 4)
    direct = torch.einsum("ucd,ved->uvce", a[0], b[0]).flatten(0, 1)
    torch.testing.assert_close(flat_a @ flat_b.mT, direct)
    require_same(rg.align(*pair.params, pair.symmetry).element, expected.element)
