"""Families of twenty networks with a known tree, and merges of three: what `rg.comparison.compare_many` finds of them.

Each network of a family is trained on from an earlier one, for 10 to 60 steps on one of two halves of the data, and
moved by a random element of the whole group. The earlier one is any ("random"), one of the last four ("recent"), or the
one above it in a binary tree. A branch of the true tree divides the family in two; "splits" are such divisions by
branches between groups of two or more networks. The control joins neighbors by the distances of the networks before
they were moved. "Cosine" is that of the steps of two trainings. The models of `grow_tree` and its limit of certain
branches were chosen on other families, with seeds 0 to 5.

A merge has the shares .5, .3 and .2 of three fine-tunes of one base; parents, base and merge are moved. The threshold
of averages was fixed on seeds 0, 1 and 2.

    OMP_NUM_THREADS=1 python benchmarks/lineage_family.py > docs/records/lineage-family.jsonl
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from lineage_networks import Family, Params, families, move

import regauge as rg
from regauge.comparison import Lineage, compare_many
from regauge.comparison.trees import Branch, join_neighbors

COUNT, SHARES, SEEDS = 20, (0.5, 0.3, 0.2), (3, 4, 5)
FAMILIES = (("random", 6), ("random", 7))
"""Kinds of families, with their seeds."""


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


def family_row(family: Family, kind: str, seed: int) -> dict[str, Any]:
    """A family, and how much of its tree is found."""
    generator = torch.Generator().manual_seed(seed)
    networks, parents = {"00": family.train(family.initialize(1000 + seed), 0, seed, 200)}, dict[str, str]()
    for k in range(1, COUNT):
        earlier = {"random": (0, k), "recent": (max(0, k - 4), k), "binary": ((k - 1) // 2, (k + 1) // 2)}[kind]
        number, steps, half = (int(torch.randint(*one, (), generator=generator)) for one in (earlier, (10, 60), (2,)))
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
    drawn = [split for tree in found.trees for split in splits(ends(tree), own)]
    certain = [split for tree in found.trees for split in splits(ends(without_doubt(tree)), own)]
    control = join_neighbors(list(networks), torch.cdist(stored, stored).square())
    return {
        "what": "family",
        "family": family.name,
        "kind": kind,
        "seed": seed,
        "families": len(found.families),
        "averages": len(found.averages),
        "splits": len(true),
        "drawn": [len(true & {*drawn}), len({*drawn} - true)],
        "certain": [len(true & {*certain}), len({*certain} - true)],
        "roots": [tree[-1].child for tree in found.trees],
        "control": len(true & splits(((one.parent, one.child) for one in control), own)),
        "cosine": round(float(cosines.mean()), 3),
    }


def ends(tree: Iterable[Branch]) -> list[tuple[str, str]]:
    return [(one.parent, one.child) for one in tree]


def without_doubt(tree: Iterable[Branch]) -> list[Branch]:
    """A tree whose branches that are not certain are taken out: what hangs on them hangs on their parent."""
    tree = list(tree)
    above = {one.child: one.parent for one in tree if not one.is_certain}

    def keeper(name: str) -> str:
        return keeper(above[name]) if name in above else name

    return [replace(one, parent=keeper(one.parent)) for one in tree if one.is_certain]


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
    """The lines of the tables in docs/measurements/comparison.md."""
    heads = ("family", "kind", "seed", "cosine", "splits", "certain", "wrong", "drawn", "wrong", "control", "root")
    lines = [f"| {' | '.join(heads)} |", "| --- | --- |" + " ---: |" * 8 + " --- |"]
    for one in (row for row in rows if row["what"] == "family"):
        numbers = [one[name] for name in ("family", "kind", "seed", "cosine", "splits")]
        cells = [*numbers, *one["certain"], *one["drawn"], one["control"], ", ".join(one["roots"])]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| family | seed | shares of the merge |", "| --- | ---: | --- |"]
    for one in (row for row in rows if row["what"] == "merge"):
        shares = ", ".join(f"{name} {weight:.2f}" for name, weight in one["shares"].items())
        lines.append(f"| {one['family']} | {one['seed']} | {shares} |")
    return lines


def main() -> None:
    """Print a row for each family and each merge."""
    for name in ("MLP", "CNN"):
        for kind, seed in FAMILIES:
            print(json.dumps(family_row(families()[name], kind, seed)), flush=True)
        for seed in SEEDS:
            print(json.dumps(merge_row(families()[name], seed)), flush=True)


if __name__ == "__main__":
    main()
