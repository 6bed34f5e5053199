"""Families of twenty networks with a known tree, and merges of three: what `rg.comparison.compare_many` finds of them.

Each network of a family is trained on from a random earlier one, for 10 to 60 steps on one of two halves of the data,
and moved by a random element of the whole group. A branch of the true tree divides the family in two; "splits" are such
divisions by branches between groups of two or more networks. The control joins neighbors by the distances of the
networks before they were moved. "Cosine" is that of the steps of two trainings.

A merge has the shares .5, .3 and .2 of three fine-tunes of one base; parents, base and merge are moved. The threshold
of averages was fixed on seeds 0, 1 and 2.

    OMP_NUM_THREADS=1 python benchmarks/lineage_family.py > docs/records/lineage-family.jsonl
"""

import json
from collections.abc import Iterable
from typing import Any

import torch
from lineage_networks import Family, Params, families, move

import regauge as rg
from regauge.comparison import Lineage, compare_many
from regauge.comparison.trees import join_neighbors

COUNT, SHARES, SEEDS = 20, (0.5, 0.3, 0.2), (3, 4, 5)


def splits(branches: Iterable[tuple[str, str]], names: set[str]) -> set[frozenset[str]]:
    """The divisions of networks by the branches of a tree, each as the side without the first network."""
    pairs = list(branches)
    found = set()
    for cut in pairs:
        side, fresh = {cut[1]}, True
        while fresh:
            fresh = False
            for one, other in (pair for pair in pairs if pair != cut):
                if (one in side) != (other in side):
                    side |= {one, other}
                    fresh = True
        own = frozenset(side & names)
        own = frozenset(names) - own if min(names) in own else own
        if 1 < len(own) < len(names) - 1:
            found.add(own)
    return found


def compare_moved(family: Family, networks: dict[str, Params], seed: int) -> Lineage:
    """The lineage of networks that were moved."""
    moved = {
        name: {n: t.float() if t.is_floating_point() else t for n, t in move(family, one, seed + k).items()}
        for k, (name, one) in enumerate(networks.items())
    }
    return compare_many(list(moved), lambda a, b: rg.compare(moved[a], moved[b], family.symmetry, draws=99, exact=True))


def family_row(family: Family, seed: int) -> dict[str, Any]:
    """A family, and how much of its tree is found."""
    generator = torch.Generator().manual_seed(seed)
    networks, parents = {"00": family.train(family.initialize(1000 + seed), 0, seed, 200)}, dict[str, str]()
    for k in range(1, COUNT):
        number, steps, half = (int(torch.randint(*one, (), generator=generator)) for one in ((k,), (10, 60), (2,)))
        name, parents[f"{k:02}"] = f"{k:02}", f"{number:02}"
        networks[name] = family.train(networks[f"{number:02}"], half, 100 * seed + k, steps)
    names = [n for n, t in networks["00"].items() if t.is_floating_point() and "running" not in n]
    flat = {key: torch.cat([one[n].flatten() for n in names]).double() for key, one in networks.items()}
    stored = torch.stack(list(flat.values()))
    steps = torch.nn.functional.normalize(torch.stack([flat[c] - flat[p] for c, p in parents.items()]), dim=1)
    cosines = (steps @ steps.T)[~torch.eye(COUNT - 1, dtype=torch.bool)]
    own = set(networks)
    true = splits(((p, c) for c, p in parents.items()), own)
    found = compare_moved(family, networks, 50)
    trees = [splits(((one.parent, one.child) for one in tree), own) for tree in found.trees]
    control = join_neighbors(list(networks), torch.cdist(stored, stored).square())
    return {
        "what": "family",
        "family": family.name,
        "seed": seed,
        "families": len(found.families),
        "averages": len(found.averages),
        "splits": len(true),
        "found": sum(len(true & one) for one in trees),
        "control": len(true & splits(((one.parent, one.child) for one in control), own)),
        "cosine": round(float(cosines.mean()), 3),
    }


def merge_row(family: Family, seed: int) -> dict[str, Any]:
    """A merge of three fine-tunes, and the shares that are found."""
    base = family.train(family.initialize(2000 + seed), 0, seed, 200)
    parents = [family.train(base, k % 2, 7000 + 10 * seed + k, 120) for k in range(3)]
    merge = {
        n: sum(share * one[n] for share, one in zip(SHARES, parents, strict=True)) if t.is_floating_point() else t
        for n, t in base.items()
    }
    networks = {"base": base, **{f"parent {k}": one for k, one in enumerate(parents)}, "merge": merge}
    found = compare_moved(family, networks, 900)  # type: ignore[arg-type]
    shares = {
        name: w
        for one in found.averages
        if one.child == "merge"
        for name, w in zip(one.parents, one.weights, strict=True)
    }
    return {"what": "merge", "family": family.name, "seed": seed, "shares": {n: round(w, 3) for n, w in shares.items()}}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of the table in docs/measurements/comparison.md."""
    heads = ("family", "seed", "cosine", "splits", "found", "control", "false averages", "shares of the merge")
    lines = [f"| {' | '.join(heads)} |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"]
    for one, other in zip(rows[::2], rows[1::2], strict=True):
        shares = ", ".join(f"{name} {weight:.2f}" for name, weight in other["shares"].items())
        cells = [one[name] for name in ("family", "seed", "cosine", "splits", "found", "control", "averages")]
        lines.append(f"| {' | '.join(map(str, cells))} | {shares} |")
    return lines


def main() -> None:
    """Print a row for each family and each merge."""
    for name in ("MLP", "CNN"):
        for seed in SEEDS:
            for row in (family_row, merge_row):
                print(json.dumps(row(families()[name], seed)), flush=True)


if __name__ == "__main__":
    main()
