"""Families of twenty networks with a known tree, and merges of three networks, analyzed by
`rg.comparison.compare_many`.

In a "random" family, each network continues the training of a random earlier network, for 10 to 60 steps on one of two
halves of the data. A "mixed" family has a chain of depth three, merged LoRAs, pruned and quantized networks, averages
of two networks, a transformed copy and, for language models, an extended vocabulary. Networks of every kind in a
"mixed" family have children. Each network is then transformed by a random element of the whole group and rounded to
bfloat16.

A parent is correct if it is the true parent or a copy of it. Networks with the same history are copies, for example two
networks that are pruned in the same way. For an average, all parents must be correct. The control is the minimum
spanning tree of the distances between the networks before they were transformed; its branches have no direction.
"Cosine" is the cosine between the steps of two trainings. The estimator and its constants were chosen on families with
seeds 0 to 2.

A merge of three has the shares .5, .3 and .2 of three fine-tunes of one base. Parents, base and merge are transformed.
The threshold of averages was fixed on seeds 0, 1 and 2.

    OMP_NUM_THREADS=1 python benchmarks/lineage_family.py FOLDER > docs/records/lineage-family.jsonl
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from lineage_histories import History, Workshop, family_after
from lineage_networks import Family, Params, families, move

import regauge as rg
from regauge.comparison import Lineage, compare_many
from regauge.comparison.trees import span

COUNT, SHARES, SEEDS = 20, (0.5, 0.3, 0.2), (3, 4, 5)
CASES = (
    *(("MLP", kind, seed) for kind in ("random", "mixed") for seed in (31, 32)),
    ("CNN", "random", 31),
    ("GPT", "mixed", 33),
    ("CNN", "mixed", 33),
    *(("MLP", kind, 33) for kind in ("random", "mixed")),
    ("CNN", "mixed", 34),
    ("GPT", "mixed", 34),
)
"""Architectures and kinds of families, with their seeds."""
STEPS = {6: "lora", 8: "prune", 10: "round", 11: "round", 13: "mix", 15: "copy", 16: "lora", 17: "prune", 18: "mix"}
"""The networks of a mixed family that are not fine-tunes, by the way in which they are made."""
CHAIN = 3
"""The depth of the chain with which a mixed family begins."""


def draw_family(name: str, kind: str, seed: int) -> tuple[dict[str, History], dict[str, tuple[str, ...]]]:
    """Return the histories of the networks of a family, and their parents."""
    generator = torch.Generator().manual_seed(7 * seed + 1)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    special = {} if kind == "random" else STEPS | ({14: "extend"} if name == "GPT" else {})
    histories: dict[str, History] = {"00": [["train", 1000 + seed, 0, seed]]}
    parents: dict[str, tuple[str, ...]] = {"00": ()}
    for k in range(1, COUNT):
        number = k - 1 if special and k <= CHAIN else pick(0, k)
        parent, step = f"{number:02}", special.get(k, "tune")
        before, own = histories[parent], list[list[Any]]()
        parents[f"{k:02}"] = (parent,)
        if step == "tune":
            own = [["tune", pick(10, 60) / 200, pick(0, 2), 100 * seed + k]]
        elif step == "lora":
            own = [["lora", 4, pick(30, 80) / 200, pick(0, 2), 100 * seed + k]]
        elif step == "prune":
            own = [["prune", (0.2, 0.4)[pick(0, 2)]]]
        elif step == "round":
            own = [["round", 8 if k == 10 else 4]]
        elif step == "extend":
            own = [["extend", 3, 55]]
        elif step == "mix":
            second = pick(0, k - 1)
            other = f"{second + (second >= number):02}"
            if any(word == "extend" for word, *_ in [*before, *histories[other]]):
                parent, other = "01", "02"
            before, own = histories[parent], [["mix", 0.5, histories[other]]]
            parents[f"{k:02}"] = (parent, other)
        histories[f"{k:02}"] = [*before, *own]
    return histories, parents


def compare_moved(owners: dict[str, Family], networks: dict[str, Params], seed: int) -> Lineage:
    """Return the lineage of networks after random transformations."""
    moved = {
        name: {n: t.float() if t.is_floating_point() else t for n, t in move(owners[name], one, seed + k).items()}
        for k, (name, one) in enumerate(networks.items())
    }

    def compare(a: str, b: str) -> rg.comparison.Comparison:
        return rg.compare(moved[a], moved[b], owners[a].symmetry, draws=9, exact=True)

    return compare_many(list(moved), compare, read=moved.__getitem__)


def family_row(name: str, kind: str, seed: int, folder: Path) -> dict[str, Any]:
    """Return a family, and the share of its tree that is found."""
    histories, parents = draw_family(name, kind, seed)
    shop = Workshop(name, folder)
    networks = {one: shop(history) for one, history in histories.items()}
    found = compare_moved({one: family_after(name, h) for one, h in histories.items()}, networks, 50)
    first = dict[str, str]()
    copies = {one: first.setdefault(json.dumps(history), one) for one, history in histories.items()}
    mixes = {one.child: {copies[parent] for parent in one.parents} for one in found.averages}
    above = {one.child: one for tree in found.trees for one in tree}
    twins = {frozenset((one.parent, one.child)) for one in above.values() if one.is_copy}
    right = set[str]()
    for child, own in parents.items():
        truth = {copies[parent] for parent in own}
        if copies[child] != child or any(step == "extend" for step, *_ in histories[child][-1:]):
            same = [own[0], *(one for one in copies if copies[one] == copies[child])]
            ok = any(frozenset((child, one)) in twins for one in same)
        elif len(own) > 1:
            ok = mixes.get(child) == truth
        else:
            ok = child in above and {copies.get(above[child].parent, "")} == truth and child not in mixes
        right |= {child} if ok else set()
    certain = {one.child for one in above.values() if one.is_certain}
    flat = {one: _flat(params, networks["00"]) for one, params in networks.items()}
    tunes = [flat[c] - flat[own[0]] for c, own in parents.items() if histories[c][-1][0] == "tune"]
    steps = torch.nn.functional.normalize(torch.stack(tunes), dim=1)
    cosines = (steps @ steps.T)[~torch.eye(len(steps), dtype=torch.bool)]
    return {
        "what": "family",
        "family": name,
        "kind": kind,
        "seed": seed,
        "families": len(found.families),
        "cosine": round(float(cosines.mean()), 3),
        "parents": sum(map(bool, parents.values())),
        "right": len(right),
        "certain": len(certain),
        "wrong": len(certain - right),
        "control": len(_nearest(flat) & {frozenset((c, *own)) for c, own in parents.items() if len(own) == 1}),
        "roots": [tree[-1].parent for tree in found.trees],
        "missed": sorted(child for child, own in parents.items() if own and child not in right),
    }


def _flat(params: Params, like: Params) -> torch.Tensor:
    """Return the entries that a network has in common with another network, without running statistics."""
    names = [n for n, t in like.items() if t.is_floating_point() and "running" not in n]
    return torch.cat([params[n][tuple(map(slice, like[n].shape))].flatten() for n in names]).double()


def _nearest(points: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    """Return the branches of the minimum spanning tree."""
    names, stacked = [*points], torch.stack([*points.values()])
    return {frozenset((names[a], names[b])) for a, b in span(-torch.cdist(stacked, stacked).numpy())}


def merge_row(family: Family, seed: int) -> dict[str, Any]:
    """Return a merge of three fine-tunes, and the shares that are found."""
    base = family.train(family.initialize(2000 + seed), 0, seed, 200)
    parents = [family.train(base, k % 2, 7000 + 10 * seed + k, 120) for k in range(3)]
    merge = {
        n: sum(share * one[n] for share, one in zip(SHARES, parents, strict=True)) if t.is_floating_point() else t
        for n, t in base.items()
    }
    networks = {"base": base, **{f"parent {k}": one for k, one in enumerate(parents)}, "merge": merge}
    found = compare_moved(dict.fromkeys(networks, family), networks, 900)  # type: ignore[arg-type]
    shares = {
        name: w
        for one in found.averages
        if one.child == "merge"
        for name, w in zip(one.parents, one.weights, strict=True)
    }
    return {"what": "merge", "family": family.name, "seed": seed, "shares": {n: round(w, 3) for n, w in shares.items()}}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the tables in docs/measurements/comparison.md."""
    heads = ("family", "kind", "seed", "cosine", "parents", "right", "certain", "wrong", "control", "root")
    lines = [f"| {' | '.join(heads)} |", "| --- | --- |" + " ---: |" * 7 + " --- |"]
    for one in (row for row in rows if row["what"] == "family"):
        cells = [*(one[name] for name in heads[:-1]), ", ".join(one["roots"])]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| family | seed | shares of the merge |", "| --- | ---: | --- |"]
    for one in (row for row in rows if row["what"] == "merge"):
        shares = ", ".join(f"{name} {weight:.2f}" for name, weight in one["shares"].items())
        lines.append(f"| {one['family']} | {one['seed']} | {shares} |")
    return lines


def main() -> None:
    """Print a row for each family and each merge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the networks are kept")
    parser.add_argument("--cases", nargs="+", default=[":".join(map(str, one)) for one in CASES])
    parser.add_argument("--no-merges", action="store_true")
    given = parser.parse_args()
    for name, kind, seed in (one.split(":") for one in given.cases):
        print(json.dumps(family_row(name, kind, int(seed), given.folder)), flush=True)
    for name in () if given.no_merges else ("MLP", "CNN"):
        for seed in SEEDS:
            print(json.dumps(merge_row(families()[name], seed)), flush=True)


if __name__ == "__main__":
    main()
