"""Independent networks that were aligned to A, and true relatives of A, distinguished by `rg.compare`.

Independent networks that learned from the same data and were aligned are the hardest negatives for a verdict, because
alignment chose the order of their units. In this benchmark, the second network of an unrelated pair is aligned by
weight matching, activation matching or Sinkhorn, or only in every second group. Further second networks are aligned and
trained further on other data, aligned and pruned, or aligned and averaged with other networks. Relatives are copies,
fine-tunes up to three times as long as the training, and pruned, rounded, noisy and averaged networks. Each relative is
compared as stored, and transformed by a random element of the group.

The architectures and data are those of `benchmarks/lineage.py`, and a narrow MLP on the digits. Thresholds were chosen
on `--part chosen` (three architectures, four seeds). `--part judged` has further architectures and only other seeds.

    python benchmarks/aligned_strangers.py FOLDER --part chosen
    python benchmarks/aligned_strangers.py FOLDER --part judged

docs/records/aligned-strangers.jsonl contains the rows of both parts, from which the tables in
docs/measurements/comparison.md are made.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lineage import read, round_to_digits
from lineage_networks import STEPS, Family, Params, Shelf, families, mean, move, prune
from lineage_scores import span, spectral_distance
from torch import Tensor
from torch.nn.functional import cross_entropy

import regauge as rg
from regauge.nets.mlp import mlp

PARTS = {
    "chosen": (("MLP", "CNN", "Llama"), (200, 201, 202, 203)),
    "judged": (("MLP", "narrow MLP", "CNN", "ViT", "GPT", "Llama"), (300, 301, 302, 303)),
}
"""Architectures and seeds. Each seed is compared with the next seed, and the first two seeds have descendants."""
PARTLY = "aligned in part"
STRANGE, RELATED, DISTANT = "stranger", "relative", "distant"
"""The kind of a pair: independent, related, or so distant that the weights may contain no evidence."""


@dataclass(frozen=True)
class Pair:
    """Two networks, with the way in which the second network was made, and its relation to the first network."""

    kind: str
    relation: str
    seeds: tuple[int, int]
    a: Params
    b: Params


@dataclass(frozen=True)
class Population:
    """Networks of one architecture, and networks that are derived from them."""

    shelf: Shelf

    @cached_property
    def family(self) -> Family:
        """The architecture of the networks."""
        return self.shelf.family

    @cached_property
    def task(self) -> rg.Task:
        """The data for matching activations."""
        inputs, targets = self.family.halves[0]
        return rg.Task(self.family.module, [(inputs[:200], targets[:200])], criterion=loss)

    def align(self, a: Params, b: Params, method: Any, *, is_partly: bool = False) -> Params:
        """Return B aligned to A, only in every second group if requested."""
        symmetry, chance = self.family.symmetry, torch.Generator().manual_seed(0)
        task = None if isinstance(method, rg.WeightMatching) else self.task
        found = rg.align(a, b, symmetry, method=method, task=task, generator=chance)
        element, blank = found.element, found.symmetry.identity()
        for group in found.symmetry.groups[1::2] if is_partly else ():
            element = element.replace(group.name, blank[group.name])
        return found.symmetry.act(element, b)

    def tune(self, b: Params, seed: int, amount: float) -> Params:
        """Continue training on the other half of the data, for a share of a whole training."""
        return self.family.train(b, 1, seed + 3000, max(1, round(amount * STEPS)))

    def strangers(self, seeds: tuple[int, ...]) -> Iterator[Pair]:
        """Return independent pairs."""
        for k, one in enumerate(seeds):
            other = seeds[(k + 1) % len(seeds)]
            a, b, third = (self.shelf("base", seed) for seed in (one, other, seeds[(k + 2) % len(seeds)]))
            near = self.align(a, b, rg.WeightMatching())
            made = {
                "as trained": b,
                "weight matching": near,
                "activation matching": self.align(a, b, rg.ActivationMatching()),
                "Sinkhorn": self.align(a, b, rg.Sinkhorn(steps=30)),
                PARTLY: self.align(a, b, rg.WeightMatching(), is_partly=True),
                "aligned, trained on 10%": self.tune(near, other, 0.1),
                "aligned, trained on 100%": self.tune(near, other, 1.0),
                "aligned, pruned 40%": prune(near, 0.4),
                "two aligned, averaged": mean(near, self.align(a, third, rg.WeightMatching())),
                "three aligned, averaged": self.center(a, [seed for seed in seeds if seed != one]),
            }
            for kind, network in made.items():
                yield Pair(kind, STRANGE, (one, other), a, network)

    def center(self, a: Params, seeds: list[int]) -> Params:
        """Return the mean of several networks, each aligned to A."""
        networks = [self.align(a, self.shelf("base", seed), rg.WeightMatching()) for seed in seeds]
        total = networks[0]
        for k, network in enumerate(networks[1:], 1):
            total = mix(total, network, k / (k + 1))
        return total

    def relatives(self, seeds: tuple[int, ...]) -> Iterator[Pair]:
        """Return related pairs."""
        for k, seed in enumerate(seeds[:2]):
            a = self.shelf("base", seed)
            other = self.align(a, self.shelf("base", seeds[k + 2]), rg.WeightMatching())
            tuned, long = self.tune(a, seed, 1.0), self.tune(a, seed, 3.0)
            near = {
                "fine-tuned 10%": self.tune(a, seed, 0.1),
                "fine-tuned 100%": tuned,
                "fine-tuned 300%": long,
                "pruned 70%": prune(a, 0.7),
                "rounded to 4 bits": rounded(a, 4),
                "noise of half the size": noisy(a, 0.5, seed),
                "averaged with its fine-tune": mean(a, tuned),
                "averaged with an aligned stranger": mean(a, other),
            }
            yield Pair("copy, moved", RELATED, (seed, seed), a, move(self.family, a, seed))
            for kind, network in near.items():
                yield Pair(kind, RELATED, (seed, seed), a, network)
                yield Pair(f"{kind}, moved", RELATED, (seed, seed), a, move(self.family, network, seed))
            far = {
                "pruned 90%": prune(a, 0.9),
                "noise of twice the size": noisy(a, 2.0, seed),
                "a fifth of a merge": mix(a, other, 0.2),
            }
            for kind, network in far.items():
                yield Pair(kind, DISTANT, (seed, seed), a, network)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy over all examples, or over all tokens of the examples."""
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def rounded(params: Params, bits: int) -> Params:
    """Return a network in which each row of each matrix is rounded to the number of levels that `bits` allow."""
    result = dict(params)
    for name, tensor in params.items():
        if tensor.ndim > 1:
            step = tensor.flatten(1).abs().amax(1) / (2 ** (bits - 1) - 1)
            step = step.clamp_min(1e-9).reshape(-1, *[1] * (tensor.ndim - 1))
            result[name] = (tensor / step).round() * step
    return result


def noisy(params: Params, share: float, seed: int) -> Params:
    """Return a network with normal noise on every tensor, as a share of the tensor's standard deviation."""
    source = torch.Generator().manual_seed(seed)
    result = dict(params)
    for name, tensor in params.items():
        if tensor.is_floating_point():
            noise = share * tensor.std(correction=0) * torch.randn(tensor.shape, generator=source)
            result[name] = (tensor + noise).clamp_min(1e-3) if name.endswith("running_var") else tensor + noise
    return result


def mix(a: Params, b: Params, share: float) -> Params:
    """Return the weighted mean of two networks, given the share of the first network."""
    return {n: share * t + (1 - share) * b[n] if t.is_floating_point() else t for n, t in a.items()}


def examine(family: Family, pair: Pair) -> dict[str, Any]:
    """Return the evidence on which a verdict may rest."""
    a, b = ({n: t.float() if t.is_floating_point() else t for n, t in p.items()} for p in (pair.a, pair.b))
    found = rg.compare(a, b, family.symmetry)
    return {
        "family": family.name,
        "kind": pair.kind,
        "relation": pair.relation,
        "seeds": pair.seeds,
        "verdict": found.verdict,
        "before": found.share_before,
        "share": found.share_after,
        "beyond": found.share_beyond_chance,
        "p_value": found.p_value,
        "z_score": found.z_score,
        "spectra": spectral_distance(a, b),
        "products": kept_similarity(a, b, family.symmetry),
    }


def kept_similarity(a: Params, b: Params, symmetry: rg.Symmetry) -> float | None:
    """Return the similarity of products of columns along axes that no group permutes, such as inputs and tokens.

    The similarity is the mean correlation, over matrices, of all inner products of two different columns. No reordering
    of units changes these inner products.
    """
    values = []
    for name, shape in symmetry.shapes.items():
        if len(shape) == 2 and name not in symmetry.buffers:
            moved = {place.axis for group in symmetry.groups for place in group.placements if place.parameter == name}
            for axis in {0, 1} - moved:
                x, y = (one[name].movedim(axis, 0) for one in (a, b))
                above = torch.ones(len(x), len(x)).triu(1) > 0
                pair = torch.stack([(x @ x.T)[above], (y @ y.T)[above]])
                values.append(float(torch.corrcoef(pair)[0, 1]))
    return sum(values) / len(values) if values else None


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a table: for each kind of pair, the statistics of verdicts, and the number of times each
    verdict was given.
    """
    heads = ("pairs", "n", "beyond chance", "z-score", "verdicts")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        counts = {verdict: sum(row["verdict"] == verdict for row in own) for verdict in {r["verdict"] for r in own}}
        verdicts = ", ".join(
            f"{verdict} {n}" for verdict, n in sorted(counts.items(), key=lambda one: (-one[1], one[0]))
        )
        cells = (kind, str(len(own)), span(own, "beyond", 3), span(own, "z_score", 1), verdicts)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def margins(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a second table: for each architecture, the evidence that separates strangers from relatives,
    and the evidence that does not.
    """
    heads = ["part", "architecture", "strangers", "relatives", "beyond chance, strangers", "relatives"]
    heads += ["spectra, strangers", "distant ones", "inner products, strangers", "distant ones"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for part, family in dict.fromkeys((row["part"], row["family"]) for row in rows):
        own = [row for row in rows if (row["part"], row["family"]) == (part, family)]
        strangers, near, far = ([r for r in own if r["relation"] == one] for one in (STRANGE, RELATED, DISTANT))
        cells = [part, family, str(len(strangers)), str(len(near))]
        cells += [f"up to {max(row['beyond'] for row in strangers):.3f}"]
        cells += [f"from {min(row['beyond'] for row in near if row['beyond'] is not None):.3f}"]
        for score in ("spectra", "products"):
            cells += [span(strangers, score, 2), span(far, score, 2)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return the tables of docs/measurements/comparison.md, line by line."""
    return [*table([row for row in rows if row["part"] == "judged"]), "", *margins(rows)]


def all_families() -> dict[str, Family]:
    """Return the families of the lineage benchmark, and a narrow MLP on the digits."""
    known = families()
    wide = known["MLP"]
    narrow = Family("narrow MLP", mlp(64, 32, 32, 10).eval(), wide.lr, wide.halves, wide.test)
    return {**known, "narrow MLP": narrow}


def main() -> None:
    """Evaluate all missing pairs, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=[*PARTS], default="judged")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "aligned-strangers.jsonl"
    names, seeds = PARTS[options.part]
    for name in names:
        population = Population(Shelf(all_families()[name], options.folder))
        done = {(row["family"], row["kind"], *row["seeds"]) for row in read(file)}
        for pairs in (population.strangers(seeds), population.relatives(seeds)):
            for pair in pairs:
                if (name, pair.kind, *pair.seeds) not in done:
                    row = {"part": options.part} | examine(population.family, pair)
                    with file.open("a") as out:
                        print(json.dumps({k: round_to_digits(v) for k, v in row.items()}), file=out, flush=True)
    print("\n".join(lines_of(read(file))))


if __name__ == "__main__":
    main()
