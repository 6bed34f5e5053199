"""Networks without some units, compared with whole networks, for `benchmarks/lineage.py --part widths`.

`rg.prune` removes a quarter or half of the units of each group (hidden units, channels, heads) by their magnitude. The
pruned network is compared with the original network in three forms: as stored, transformed by a random element of the
whole group, and trained further on other data. In unrelated pairs, the second network has another initialization and is
pruned in the same way.
"""

import itertools
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from lineage_networks import STEPS, Family, Params, Shelf, move
from lineage_scores import cka, span, verdicts, weighted_area
from torch import Tensor

import regauge as rg

REMOVED = (0.25, 0.5)
"""Shares of the units of each group that are removed."""
TUNED = (0.1, 1.0)
"""Lengths of further training after pruning, as shares of a whole training."""
SAME, OTHER = "other start, same data", "other start, other data"
SCORES = {"share": "share explained", "fingerprint": "fingerprint", "cka": "linear CKA"}
"""Scores that are defined for networks of different widths, with the names of their columns."""


@dataclass(frozen=True)
class Narrow:
    """A network without some units.

    Attributes:
        family: The architecture, which runs the network.
        params: The tensors of the network.
        kept: The remaining units of each group that was cut.
    """

    family: Family
    params: Params
    kept: Mapping[str, Tensor]


def narrow(family: Family, params: Params, share: float) -> Narrow:
    """Remove a share of the units of each group."""
    inputs, targets = (part[:100] for part in family.test)
    task, criterion = rg.Task(family.module, [(inputs, targets)]), rg.pruning.Magnitude()
    pruned = rg.prune(params, family.symmetry, share=share, criterion=criterion, task=task)
    assert pruned.module is not None
    return Narrow(replace(family, module=pruned.module.eval()), pruned.params, pruned.kept)


def narrow_rows(
    shelf: Shelf, parents: Collection[int], seeds: Collection[int], done: Collection[tuple[Any, ...]]
) -> Iterator[dict[str, Any]]:
    """Yield the missing rows of one architecture."""
    family = shelf.family
    for share in REMOVED:
        for seed in parents:
            a, small = shelf("base", seed), narrow(family, shelf("base", seed), share)
            for amount in (0.0, *TUNED):
                kind = f"fine-tuned {amount:.0%}" if amount else "as pruned"
                todo = [is_moved for is_moved in (False, True) if (share, kind, is_moved, seed, seed) not in done]
                b = small.params
                if amount and todo:
                    b = small.family.train(b, 1, seed + 1000, max(1, round(amount * STEPS)))
                for is_moved in todo:
                    moved = move(small.family, b, seed) if is_moved else b
                    row = {"removed": share, "kind": kind, "is_related": True, "is_moved": is_moved}
                    yield row | examine(family, (seed, seed), a, replace(small, params=moved))
        pairs = [(SAME, one, other) for one, other in itertools.combinations(seeds, 2)]
        pairs += [(OTHER, one, other) for one in seeds if one not in parents for other in parents]
        known = dict[tuple[str, int], Narrow]()
        for kind, one, other in pairs:
            if (share, kind, False, one, other) not in done:
                if (kind, other) not in known:
                    start = "base" if kind == SAME else "same start, other data"
                    known[kind, other] = narrow(family, shelf(start, other), share)
                second = known[kind, other]
                row = {"removed": share, "kind": kind, "is_related": False, "is_moved": False}
                yield row | examine(family, (one, other), shelf("base", one), second)


def examine(family: Family, seeds: tuple[int, int], a: Params, second: Narrow) -> dict[str, Any]:
    """Return all scores of a pair. Larger scores mean more similar networks."""
    b = {n: t.float() if t.is_floating_point() else t for n, t in second.params.items()}
    began = time.process_time()
    generator = torch.Generator().manual_seed(1000 * seeds[0] + seeds[1])
    found = rg.compare(a, b, family.symmetry, generator=generator)
    seconds = time.process_time() - began
    assert found.fingerprint_distance is not None
    met = [torch.isin(own, second.kept[name]) for name, (own, _) in found.units.items() if own.ndim == 1]
    return {
        "family": family.name,
        "seeds": seeds,
        "verdict": found.verdict,
        "seconds": seconds,
        "compared": found.compared,
        "units": float(torch.cat(met).double().mean()) if seeds[0] == seeds[1] else None,
        "modulo": found.orbit_distance / found.norm,
        "p_value": found.p_value,
        "z_score": found.z_score,
        "share": found.share_after,
        "beyond": found.share_beyond_chance,
        "fingerprint": -found.fingerprint_distance,
        "cka": cka(family.test[0][:100], (family.module, a), (second.family.module, b)),
    }


def narrow_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of two tables: areas under the curve and verdicts by kind, and numbers by architecture."""
    heads = ["units removed", "pairs", "n", "units found", *SCORES.values(), "verdicts"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for share in REMOVED:
        some = [row for row in rows if row["removed"] == share]
        unrelated = [row for row in some if not row["is_related"]]
        for kind, is_moved in dict.fromkeys((row["kind"], row["is_moved"]) for row in some if row["is_related"]):
            own = [row for row in some if row["kind"] == kind and row["is_moved"] == is_moved]
            cells = [f"{share:.0%}", f"{kind}{', moved' * is_moved}", str(len(own)), span(own, "units", 3)]
            cells += [f"{weighted_area(own, unrelated, score):.3f}" for score in SCORES]
            lines.append(f"| {' | '.join(cells)} | {verdicts(own)} |")
        for kind in (SAME, OTHER):
            own = [row for row in unrelated if row["kind"] == kind]
            lines.append(f"| {share:.0%} | {kind} | {len(own)} | {'| ' * (1 + len(SCORES))}| {verdicts(own)} |")
    heads = ["architecture", "units removed", "values compared", "beyond chance, fine-tuned and moved", "unrelated"]
    heads += ["z-score, as stored", "unrelated"]
    lines += ["", f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for family, share in itertools.product(dict.fromkeys(row["family"] for row in rows), REMOVED):
        own = [row for row in rows if row["family"] == family and row["removed"] == share]
        related, unrelated = ([row for row in own if row["is_related"] is flag] for flag in (True, False))
        stored, moved = ([row for row in related if row["is_moved"] is flag] for flag in (False, True))
        cells = [span(moved, "beyond", 3), span(unrelated, "beyond", 3)]
        cells += [span(stored, "z_score", 1), span(unrelated, "z_score", 1)]
        lines.append(f"| {family} | {share:.0%} | {own[0]['compared']:.2f} | {' | '.join(cells)} |")
    return lines
