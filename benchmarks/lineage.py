"""Related and unrelated pairs of networks, told apart by `rg.compare` and by what people use instead.

Networks are trained here, on the digits of scikit-learn and on the text of Python's help: MLPs, CNNs with batch
normalization, and small ViT, GPT and Llama style transformers. Related pairs are copies moved by a random element of
the whole group and rounded to bfloat16, fine-tunes on other data for 1, 10 and 100% of a training, networks with 10, 40
and 70% of their entries pruned, means of a network and its fine-tune, and networks trained on other data from the same
start; most of them as stored and moved. Unrelated ones are from other starts, on the same or other data. Students that
were distilled from a start of their own are counted apart: their weights descend from nothing.

Thresholds of verdicts were fixed on the pairs of `--part calibration`, which have no network in common with the others.
Each pair is written as it is done, so that an interrupted run goes on.

`--part uniform` trains 60 MLPs for 60 steps from different starts on the same data, and tests whether the p-values of
all their pairs are uniform.

    python benchmarks/lineage.py FOLDER [--part calibration|test|uniform] [--family MLP]
"""

import argparse
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from lineage_networks import Family, Params, Shelf, families, mean, move, prune
from scipy.stats import kstest
from torch import Tensor

import regauge as rg
from regauge.comparison.independence import measure_independence

SEEDS = {"calibration": ((100,), (100, 101, 102, 103)), "test": ((0, 1), (0, 1, 2, 3, 4, 5))}
"""Seeds of the networks that have descendants, and of all."""
SCORES = ("share", "z_score", "fingerprint", "cosine", "cka", "spectra")


@dataclass(frozen=True)
class Pair:
    """Two networks: whether they are related (None for distilled ones), how, and both."""

    kind: str
    is_related: bool | None
    seeds: tuple[int, int]
    is_moved: bool
    a: Params
    b: Params


def pairs(shelf: Shelf, part: str) -> Iterator[Pair]:
    """All pairs of one family."""
    parents, seeds = SEEDS[part]
    for seed in parents:
        a, tuned = shelf("base", seed), shelf("fine-tuned", seed, 1.0)
        children = {
            "copy": a,
            **{f"fine-tuned {amount:.0%}": shelf("fine-tuned", seed, amount) for amount in (0.01, 0.1, 1.0)},
            **{f"pruned {share:.0%}": prune(a, share) for share in (0.1, 0.4, 0.7)},
            "merged": mean(a, tuned),
            "same start, other data": shelf("same start, other data", seed),
        }
        for kind, b in children.items():
            if kind != "copy":
                yield Pair(kind, True, (seed, seed), False, a, b)
            yield Pair(kind, True, (seed, seed), True, a, move(shelf.family, b, seed))
        yield Pair("distilled", None, (seed, seed), False, a, shelf("distilled", seed))
        for other in seeds:
            if other not in parents:
                child = shelf("same start, other data", seed)
                yield Pair("other start, other data", False, (other, seed), False, shelf("base", other), child)
    for one, other in itertools.combinations(seeds, 2):
        yield Pair("other start, same data", False, (one, other), False, shelf("base", one), shelf("base", other))


def examine(family: Family, pair: Pair) -> dict[str, object]:
    """All scores of a pair; larger is more alike."""
    a, b = ({n: t.float() if t.is_floating_point() else t for n, t in p.items()} for p in (pair.a, pair.b))
    began = time.process_time()
    generator = torch.Generator().manual_seed(1000 * pair.seeds[0] + pair.seeds[1])
    found = rg.compare(a, b, family.symmetry, generator=generator)
    assert found.fingerprint_distance is not None
    return {
        "family": family.name,
        "kind": pair.kind,
        "is_related": pair.is_related,
        "is_moved": pair.is_moved,
        "seeds": pair.seeds,
        "verdict": found.verdict,
        "seconds": time.process_time() - began,
        "stored": found.distance / found.norm,
        "modulo": found.orbit_distance / found.norm,
        "p_value": found.p_value,
        "share": found.share_after,
        "beyond": found.share_beyond_chance,
        "z_score": found.z_score,
        "fingerprint": -found.fingerprint_distance,
        "cosine": cosine(a, b),
        "cka": cka(family, a, b),
        "spectra": -spectral_distance(a, b),
    }


def matrices(params: Params) -> dict[str, Tensor]:
    """Tensors of two axes and more, as matrices."""
    return {n: t.flatten(1) for n, t in params.items() if t.is_floating_point() and t.ndim > 1}


def cosine(a: Params, b: Params) -> float:
    """The mean cosine of matrices as they are stored."""
    left, right = matrices(a), matrices(b)
    values = [torch.cosine_similarity(left[n].flatten(), right[n].flatten(), dim=0) for n in left]
    return float(torch.stack(values).mean())


def spectral_distance(a: Params, b: Params) -> float:
    """The mean relative distance of the singular values of all matrices."""
    left, right = matrices(a), matrices(b)
    values = []
    for name in left:
        x, y = (torch.linalg.svdvals(one[name]) for one in (left, right))
        values.append((x - y).norm() / x.norm())
    return float(torch.stack(values).mean())


def cka(family: Family, a: Params, b: Params) -> float:
    """The mean linear centered kernel alignment of what linear layers and convolutions put out for the test data."""

    def activations(params: Params) -> list[Tensor]:
        seen: list[Tensor] = []
        layers = [m for m in family.module.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
        hooks = [m.register_forward_hook(lambda _m, _i, out: seen.append(out.flatten(1))) for m in layers]
        with torch.no_grad():
            torch.func.functional_call(family.module, params, (family.test[0][:100],))
        for hook in hooks:
            hook.remove()
        return [x - x.mean(0) for x in seen]

    values = []
    for x, y in zip(activations(a), activations(b), strict=True):
        left, right = x @ x.T, y @ y.T
        values.append((left * right).sum() / (left.norm() * right.norm()))
    return float(torch.stack(values).mean())


def area(related: list[float], unrelated: list[float]) -> float:
    """The probability that a related pair has the larger score, ties counted half."""
    x, y = torch.tensor(related, dtype=torch.float64), torch.tensor(unrelated, dtype=torch.float64)
    gaps = x.unsqueeze(1) - y
    return float((gaps > 0).double().mean() + (gaps == 0).double().mean() / 2)


def report(rows: list[dict[str, object]]) -> None:
    """Print the areas under the curve by kind, verdicts, and whether p-values are uniform."""
    unrelated = [row for row in rows if row["is_related"] is False]
    labels = sorted({(str(row["kind"]), bool(row["is_moved"])) for row in rows if row["is_related"] is not False})
    print("| pairs | n |", " | ".join(SCORES), "| verdicts |")
    print("| --- | --- |", " | ".join("---" for _ in SCORES), "| --- |")
    for kind, is_moved in labels:
        own = [row for row in rows if row["kind"] == kind and row["is_moved"] == is_moved]
        areas = [area([row[s] for row in own], [row[s] for row in unrelated]) for s in SCORES]  # type: ignore[misc]
        name = f"{kind}, moved" if is_moved else kind
        print("|", name, "|", len(own), "|", " | ".join(f"{x:.3f}" for x in areas), "|", verdicts(own), "|")
    for kind in ("other start, same data", "other start, other data"):
        own = [row for row in unrelated if row["kind"] == kind]
        print("|", kind, "|", len(own), "|", " | ".join("" for _ in SCORES), "|", verdicts(own), "|")
    for flag, label in ((True, "related"), (False, "unrelated")):
        beyond = [float(row["beyond"]) for row in rows if row["is_related"] is flag and row["beyond"] is not None]  # type: ignore[arg-type]
        print(f"\nshares beyond chance, {label}: {min(beyond):.3f} to {max(beyond):.3f} of {len(beyond)} pairs")
    scores = [float(row["z_score"]) for row in unrelated]  # type: ignore[arg-type]
    print(f"z-scores of unrelated pairs: {min(scores):.1f} to {max(scores):.1f}")
    p_values = [float(row["p_value"]) for row in unrelated]  # type: ignore[arg-type]
    test = kstest(p_values, "uniform")
    print(
        f"p-values of {len(p_values)} unrelated pairs: Kolmogorov-Smirnov {test.statistic:.3f}, p = {test.pvalue:.2f}"
    )


def check_uniform(family: Family) -> None:
    """Print how many p-values of networks that were trained alike lie below some levels."""
    networks = [family.train(family.initialize(5000 + k), 0, k, 60) for k in range(60)]
    generator, p_values = torch.Generator().manual_seed(0), []
    names = [name for name in networks[0] if name not in family.symmetry.buffers]
    for a, b in itertools.combinations(networks, 2):
        tensors = {name: (a[name], b[name]) for name in names}
        found = measure_independence(tensors.__getitem__, family.symmetry, names, generator=generator, draws=99)
        assert found is not None
        p_values.append(found.p_value)
    below = {level: sum(p <= level for p in p_values) / len(p_values) for level in (0.01, 0.05, 0.1, 0.25, 0.5, 0.75)}
    print(f"{len(p_values)} pairs, shares below levels: {below}; {kstest(p_values, 'uniform')}")


def verdicts(rows: list[dict[str, object]]) -> str:
    """How often each verdict was given."""
    return ", ".join(f"{verdict} {n}" for verdict, n in Counter(str(row["verdict"]) for row in rows).most_common())


def main() -> None:
    """Examine the pairs that are not done yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=[*SEEDS, "uniform"], default="test")
    parser.add_argument("--family", choices=list(families()), default=None)
    options = parser.parse_args()
    if options.part == "uniform":
        check_uniform(families()[options.family or "MLP"])
        return
    file = options.folder / f"{options.part}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(row["family"], row["kind"], row["is_moved"], *row["seeds"]) for row in rows}
    for name, family in families().items():
        if options.family not in (None, name):
            continue
        for pair in pairs(Shelf(family, options.folder), options.part):
            if (name, pair.kind, pair.is_moved, *pair.seeds) not in done:
                rows.append(examine(family, pair))
                with file.open("a") as out:
                    print(json.dumps(rows[-1]), file=out, flush=True)
    report(rows)


if __name__ == "__main__":
    main()
