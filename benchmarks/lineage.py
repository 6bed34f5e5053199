"""Pairs of networks on which thresholds of `rg.compare` were fixed, and measurements of its components.

The pairs that evaluate verdicts are in `lineage_pairs.py`.

This benchmark trains networks on the digits of scikit-learn and on the text of Python's help: MLPs, CNNs with batch
normalization, and small transformers in the style of ViT, GPT and Llama. Related pairs are of five kinds: copies that
are transformed by a random element of the whole group and rounded to bfloat16; fine-tunes on other data for 1, 10 and
100% of a training; networks with 10, 40 and 70% of their entries pruned; means of a network and its fine-tune; and
networks trained on other data from the same initialization. Most related pairs are compared as stored and after a
random transformation. Unrelated networks have different initializations, on the same or other data. Students that were
distilled from a separate initialization are counted separately, because their weights do not descend from the teacher's
weights.

Thresholds of verdicts were fixed on the pairs of `--part calibration`, which share no network with other pairs. Each
pair is written as soon as it is compared, so an interrupted run continues with the next pair.

`--part uniform` tests whether p-values are uniform, on pairs that share no network. Each network has a separate
initialization and is trained for 60 steps. In every second pair, both networks learned from the same half of the data.

    python benchmarks/lineage.py FOLDER [--part calibration|uniform|noise|widths] [--family MLP]

`--part noise` adds noise to the CNN of seed 0 and transforms it by a random element.

    python benchmarks/lineage.py FOLDER --part noise

`--part widths` compares networks with smaller networks. `rg.prune` removes a quarter or half of the units of each
group, and some of the smaller networks are trained further; see `lineage_widths.py`.

    python benchmarks/lineage.py FOLDER --part widths

docs/records contains the output of these parts, from which the tables in docs/measurements/comparison.md are made.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lineage_networks import Family, Params, Shelf, families, mean, move, prune
from lineage_scores import cka, cosine, span, spectral_distance
from lineage_widths import narrow_rows, narrow_table
from scipy.stats import kstest

import regauge as rg
from regauge.comparison.independence import measure_independence

SEEDS = {
    "calibration": ((100,), (100, 101, 102, 103)),
    "widths": ((0, 1), (0, 1, 2, 3)),
}
"""Seeds of the networks that have descendants, and of all networks."""
UNRELATED = ("other start, same data", "other start, other data")
UNIFORM = {"MLP": 100, "CNN": 30, "ViT": 12, "GPT": 12, "Llama": 12}
"""The number of pairs without common networks whose p-values are tested for uniformity."""
NOISE = (0.01, 0.1, 0.5, 1, 2)
"""Standard deviations of noise, as shares of the standard deviation of each tensor."""


@dataclass(frozen=True)
class Pair:
    """Two networks, the kind of their relation, and whether they are related (None for distilled networks)."""

    kind: str
    is_related: bool | None
    seeds: tuple[int, int]
    is_moved: bool
    a: Params
    b: Params


def pairs(shelf: Shelf, part: str) -> Iterator[Pair]:
    """Return all pairs of one family."""
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


def examine(family: Family, pair: Pair) -> dict[str, Any]:
    """Return all scores of a pair. Larger scores mean more similar networks."""
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
        "cka": cka(family.test[0][:100], (family.module, a), (family.module, b)),
        "spectra": -spectral_distance(a, b),
    }


def ranges(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: for each architecture, the scores of all pairs on which verdicts rest."""
    lines = [
        "| architecture | related | unrelated | beyond chance, moved | unrelated | z-score, as stored | unrelated |"
    ]
    lines.append("| --- " * 7 + "|")
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        related, unrelated = ([row for row in own if row["is_related"] is flag] for flag in (True, False))
        stored, moved = ([row for row in related if row["is_moved"] is flag] for flag in (False, True))
        cells = [
            *(str(len(some)) for some in (related, unrelated)),
            *(span(some, "beyond", 3) for some in (moved, unrelated)),
            *(span(some, "z_score", 1) for some in (stored, unrelated)),
        ]
        lines.append(f"| {family} | {' | '.join(cells)} |")
    return lines


def uniform_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table about p-values of disjoint pairs: shares below levels, and tests of uniformity."""
    levels = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75)
    lines = [f"| architecture | pairs | {' | '.join(f'p ≤ {x}' for x in levels)} | D | p of D |"]
    lines.append("| --- " * (4 + len(levels)) + "|")
    for family in (*dict.fromkeys(row["family"] for row in rows), "all"):
        found = [row["p_value"] for row in rows if family in ("all", row["family"])]
        below = " | ".join(f"{sum(p <= level for p in found) / len(found):.3f}" for level in levels)
        test = kstest(found, "uniform")
        lines.append(f"| {family} | {len(found)} | {below} | {test.statistic:.3f} | {test.pvalue:.2f} |")
    return lines


def noise_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table about noise."""
    heads = ("noise", "verdict", "share explained", "beyond chance", "accuracy", "distance of fingerprints")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in rows:
        numbers = " | ".join(f"{row[name]:.3f}" for name in ("share", "beyond", "accuracy", "fingerprint"))
        lines.append(f"| {row['noise']} | {row['verdict']} | {numbers} |")
    return lines


def noisy(family: Family, shelf: Shelf, known: int) -> Iterator[dict[str, Any]]:
    """Return a network with normal noise, as a share of each tensor's standard deviation, transformed by the whole
    group.
    """
    a, source = shelf("base", 0), torch.Generator().manual_seed(0)
    inputs, labels = family.test
    for share in NOISE[known:]:
        noise = {n: torch.randn(t.shape, generator=source) for n, t in a.items() if t.is_floating_point()}
        b = a | {n: a[n] + share * a[n].std(correction=0) * own for n, own in noise.items()}
        b = {n: b[n].clamp_min(0) if n.endswith("running_var") else t for n, t in b.items()}
        with torch.no_grad():
            hits = torch.func.functional_call(family.module, b, (inputs,)).argmax(1) == labels
        moved = family.symmetry.act(family.symmetry.random(torch.Generator().manual_seed(1)), b)
        found = rg.compare(a, moved, family.symmetry)
        yield {
            "family": family.name,
            "noise": share,
            "verdict": found.verdict,
            "share": found.share_after,
            "beyond": found.share_beyond_chance,
            "accuracy": float(hits.float().mean()),
            "fingerprint": found.fingerprint_distance,
        }


def disjoint(family: Family, known: int) -> Iterator[dict[str, Any]]:
    """Return the p-values of pairs that share no network, beginning after a number of known pairs."""
    for k in range(known, UNIFORM[family.name]):
        halves, seeds = (0, k % 2), (10_000 + 2 * k, 10_001 + 2 * k)
        a, b = (family.train(family.initialize(s), half, s, 60) for s, half in zip(seeds, halves, strict=True))
        names = [name for name in family.symmetry.shapes if name not in family.symmetry.buffers]
        tensors = {name: (a[name], b[name]) for name in names}
        generator = torch.Generator().manual_seed(k)
        found = measure_independence(tensors.__getitem__, family.symmetry, names, generator=generator)
        assert found is not None
        kind = UNRELATED[halves[1]]
        yield {"family": family.name, "kind": kind, "seeds": seeds, "p_value": found.p_value, "z_score": found.z_score}


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows that an earlier run wrote."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def main() -> None:
    """Evaluate all missing pairs, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=[*SEEDS, "uniform", "noise"], default="calibration")
    parser.add_argument("--family", choices=list(families()), default=None)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / f"{options.part}.jsonl"
    rows = read(file)
    for name, family in families().items():
        if options.family in (None, name):
            for row in new_rows(family, options, [row for row in rows if row["family"] == name]):
                rows.append({key: round_to_digits(value) for key, value in row.items()})
                with file.open("a") as out:
                    print(json.dumps(rows[-1]), file=out, flush=True)
    rows = [row for name in families() for row in rows if row["family"] == name]
    print("\n".join(lines_of(options.part, rows)))


def round_to_digits(value: Any) -> Any:
    """Return a number rounded to six digits, and any other value unchanged."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def lines_of(part: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the tables of docs/measurements/comparison.md for one part, line by line."""
    if part == "widths":
        return narrow_table(rows)
    if part == "uniform":
        return uniform_table(rows)
    return noise_table(rows) if part == "noise" else ranges(rows)


def new_rows(family: Family, options: argparse.Namespace, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the missing rows of one architecture."""
    if options.part == "uniform":
        yield from disjoint(family, len(known))
        return
    if options.part == "noise":
        if family.name == "CNN":
            yield from noisy(family, Shelf(family, options.folder), len(known))
        return
    if options.part == "widths":
        parents, seeds = SEEDS["widths"]
        removed = {(row["removed"], row["kind"], row["is_moved"], *row["seeds"]) for row in known}
        yield from narrow_rows(Shelf(family, options.folder), parents, seeds, removed)
        return
    done = {(row["kind"], row["is_moved"], *row["seeds"]) for row in known}
    for pair in pairs(Shelf(family, options.folder), options.part):
        if (pair.kind, pair.is_moved, *pair.seeds) not in done:
            yield examine(family, pair)


if __name__ == "__main__":
    main()
