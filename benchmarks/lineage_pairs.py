"""300 pairs of networks with known histories, judged by `rg.compare` and by other methods.

There are fifty pairs of each of six architectures: MLPs, CNNs with batch normalization, ViTs, GPT style and Llama style
networks, and mixtures of experts. The list of pairs is made before any network is trained, and the classes of pairs
follow from histories alone:

- copies: transformed by the whole group, by parts of the group, or several times, and stored in formats of lower
  precision,
- descendants: trained further for 1 to 200% of a training, pruned, merged, rounded, with a merged LoRA, with rows for
  new symbols or classes, or with a block dropped or doubled and trained further for 10%; each is compared as stored and
  transformed,
- siblings: trained separately from one initialization or one base,
- students: distilled, starting from another initialization,
- strangers (unrelated networks): with other initializations, but with the same configuration and order of data; as
  stored, transformed, aligned to the first network, partly aligned, aligned and trained further, extended, or with a
  block dropped,
- attacks by somebody who knows the test: descendants with noise, in a merge with an aligned stranger, or trained away
  from the weights of their parent; and strangers that are means of three networks aligned to A, or were trained to
  reproduce the outputs of A's blocks.

    python benchmarks/lineage_pairs.py FOLDER --list > docs/records/lineage-pairs.jsonl
    python benchmarks/lineage_pairs.py FOLDER               # makes, compares, writes FOLDER/lineage-verdicts.jsonl
    python benchmarks/lineage_pairs.py FOLDER --table FILE  # the tables of docs/measurements/comparison.md

`--first` gives the seed of the first network. Each pair is written as soon as it is compared, and an interrupted run
continues. `lineage_peers.py` computes the columns of other methods.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lineage import read, round_to_digits
from lineage_histories import FAMILIES, LANGUAGE, History, Workshop, blocks_of, family_after
from lineage_peers import fingerprint_similarity, kit_scores, match_blocks, match_rows
from lineage_scores import cka, cosine, verdicts
from scipy.stats import binomtest, kstest

import regauge as rg
from regauge.comparison.verdicts import LINE, SIBLINGS

RELATED = ("identical", "same network in another gauge", "descended")
SAME = RELATED[:2]
HALF, WHOLE = 0.5, "whole group"
CLASSES = ("copy", "descendant", "sibling", "student", "stranger", "thief", "framer")
SCORES = {
    "beyond": "regauge, share beyond chance",
    "fingerprint": "regauge, fingerprint",
    "awm": "AWM",
    "rows": "independence, rows of weights",
    "blocks": "independence, MATCH",
    "kit": "provenance kit, weights",
    "gate": "provenance kit, with its gate",
    "cosine": "cosine",
    "cka": "CKA",
}
"""Scores of a pair, which are larger for related pairs, with their names in the table."""
OWN = {"beyond": 0.3, "rows": 3.0, "blocks": 3.0, "kit": 0.75, "gate": 0.75}
"""The thresholds that scores define. For tests, the threshold is a p-value of 0.001."""


def pairs(family: str, first: int) -> Iterator[dict[str, Any]]:
    """Return the fifty pairs of a family."""
    number = 0

    def line(kind: str, group: str, a: History, b: History) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {"id": f"{family} {number}", "family": family, "class": group, "kind": kind, "a": a, "b": b}

    def base(seed: int, half: int = 0, order: int = 0) -> History:
        return [["train", first + seed, half, order]]

    parts: dict[str, Any] = {
        WHOLE: ["float32", None],
        "whole group, bfloat16": ["bfloat16", None],
        "orders and signs": ["float32", ["permutation", "sign"]],
        "scales and matrices": ["float32", ["scale", "shift", "linear"]],
        "three times": ["float32", None, 3],
    }
    last = "whole group, float16" if family == "MLP" else "translations and rotations"
    parts[last] = ["float16", None] if family == "MLP" else ["float32", ["translation", "rotation"]]
    for k, (kind, settings) in enumerate(parts.items()):
        yield line(kind, "copy", base(k % 3), [*base(k % 3), ["move", k, *settings]])
    heal = ["tune", 0.1, 1, 2000]
    changes: dict[str, Any] = {
        "trained on 1%": lambda _: [["tune", 0.01, 1, 1001]],
        "trained on 10%": lambda _: [["tune", 0.1, 1, 1002]],
        "trained on 100%": lambda _: [["tune", 1.0, 1, 1003]],
        "trained on 200%": lambda _: [["tune", 2.0, 1, 1004]],
        "pruned 50%": lambda _: [["prune", 0.5]],
        "merged": lambda own: [["tune", 1.0, 1, 1005], ["mix", HALF, [*own, ["tune", 1.0, 0, 1006]]]],
        "rounded to 4 bits": lambda _: [["round", 4]],
        "LoRA merged": lambda _: [["lora", 4, 0.5, 1, 1007]],
        "extended": lambda _: [["extend", 8 if family in LANGUAGE else 3, 77], heal],
        "block dropped": lambda _: [["drop", 1], heal],
        "block doubled": lambda _: [["double", 1], heal],
    }
    for k, (kind, change) in enumerate(changes.items()):
        for is_moved in (False, True):
            own = base((k + is_moved) % 3)
            child = [*own, *change(own), *([["move", 100 + k, "bfloat16", None]] if is_moved else [])]
            yield line(kind + ", moved" * is_moved, "descendant", own, child)
    for is_moved in (False, True):
        end = [["move", 200, "bfloat16", None]] if is_moved else []
        own = base(int(is_moved))
        yield line("one initialization" + ", moved" * is_moved, "sibling", own, [*base(int(is_moved), 1, 5), *end])
        one, other = [*own, ["tune", HALF, 0, 1008]], [*own, ["tune", HALF, 1, 1009]]
        yield line("one base" + ", moved" * is_moved, "sibling", one, [*other, *end])
    for seed in (0, 1):
        yield line("distilled", "student", base(seed), [["distill", base(seed), first + 20 + seed, 3]])
    for k, (kind, rest) in enumerate(strangers(base, family).items()):
        yield line(kind, "stranger", base(k % 3), [*base(10 + k % 3), *rest(base(k % 3))])
    moved = ["move", 300, "bfloat16", None]
    near = [*base(10), ["align", base(0), "weights", False]]
    yield line("noise of 30%, moved", "thief", base(0), [*base(0), ["noise", 0.3, 9], moved])
    mixed = [*base(0), ["mix", HALF, near], moved]
    yield line("half of a merge with an aligned stranger, moved", "thief", base(0), mixed)
    yield line("trained away, moved", "thief", base(1), [*base(1), ["tune away", 1.0, 1, 1010], moved])
    two, three = ([*base(seed), ["align", base(0), "weights", False]] for seed in (11, 12))
    yield line("mean of three aligned", "framer", base(0), [*near, ["mix", HALF, two], ["mix", 2 / 3, three]])
    yield line("trained to A's blocks", "framer", base(1), [["mimic", base(1), first + 30, 4]])


def strangers(base: Any, family: str) -> dict[str, Any]:
    """Return the steps that transform a network with another initialization, given the first network."""
    return {
        "as trained": lambda _: [],
        "as trained, again": lambda _: [],
        "moved": lambda _: [["move", 400, "bfloat16", None]],
        "aligned by weights": lambda own: [["align", own, "weights", False]],
        "aligned by activations": lambda own: [["align", own, "activations", False]],
        "aligned in part": lambda own: [["align", own, "weights", True]],
        "aligned, trained on 10%": lambda own: [["align", own, "weights", False], ["tune", 0.1, 1, 1011]],
        "aligned, trained on 100%": lambda own: [["align", own, "weights", False], ["tune", 1.0, 1, 1012]],
        "aligned, pruned 50%": lambda own: [["align", own, "weights", False], ["prune", 0.5]],
        "extended": lambda _: [["extend", 8 if family in LANGUAGE else 3, 78], ["tune", 0.1, 1, 1013]],
        "block dropped": lambda _: [["drop", 1], ["tune", 0.1, 1, 1014]],
    }


def examine(pair: Mapping[str, Any], shop: Workshop) -> dict[str, Any]:
    """Return the verdict on a pair, and all scores."""
    a, b = ({n: t.float() if t.is_floating_point() else t for n, t in shop(pair[k]).items()} for k in ("a", "b"))
    sides = [(family_after(shop.name, pair[k]), own) for k, own in (("a", a), ("b", b))]
    began = time.process_time()
    found = rg.compare(a, b, sides[0][0].symmetry)
    seconds = time.process_time() - began
    rows = match_rows(a, b)
    return {
        **{name: pair[name] for name in ("id", "family", "class", "kind")},
        "verdict": found.verdict,
        "seconds": seconds,
        "beyond": 1.0 if found.verdict in SAME else found.share_beyond_chance,
        "fingerprint": None if found.fingerprint_distance is None else -found.fingerprint_distance,
        "stored": found.distance / found.norm,
        "modulo": found.orbit_distance / found.norm,
        "compared": found.compared,
        "p_value": found.p_value,
        "z_score": found.z_score,
        "lean": found.lean,
        "awm": fingerprint_similarity(a, b),
        "rows": rows,
        "blocks": match_blocks(*sides) if shop.name in ("Llama", "Mixture") else None,
        **(kit_scores(*sides) if shop.name in LANGUAGE else {"kit": None, "gate": None}),
        "cosine": cosine(a, b),
        "cka": cka(sides[0][0].test[0][:100], (sides[0][0].module, a), (sides[1][0].module, b), blocks_of),
    }


def is_positive(row: Mapping[str, Any]) -> bool | None:
    """Return whether a pair is related; None for pairs that no rate counts."""
    return {"copy": True, "descendant": True, "stranger": False}.get(row["class"])


def is_right(row: Mapping[str, Any]) -> bool | None:
    """Return whether a verdict agrees with the history; None if no verdict is expected."""
    verdict, kind = row["verdict"], row["class"]
    if kind == "copy":
        return verdict in SAME
    if kind in ("descendant", "sibling", "thief"):
        return verdict == "descended"
    return None if kind == "student" else verdict not in (*RELATED, "undecided")


def class_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return verdicts by class and kind, as the lines of a table."""
    lines = ["| class | pairs | n | right | verdicts |", "| --- | --- | ---: | ---: | --- |"]
    kinds = dict.fromkeys((row["class"], row["kind"]) for row in rows)
    for group, kind in sorted(kinds, key=lambda one: CLASSES.index(one[0])):
        own = [row for row in rows if (row["class"], row["kind"]) == (group, kind)]
        known = [right for row in own if (right := is_right(row)) is not None]
        lines.append(f"| {group} | {kind} | {len(own)} | {sum(known) if known else ''} | {verdicts(own)} |")
    return lines


def f1(hits: float, related: int, false: float) -> float:
    """Return the harmonic mean of precision and recall, given numbers of pairs."""
    return 2 * hits / (related + hits + false) if hits else 0.0


def f1_interval(hits: int, related: int, false: int, others: int) -> tuple[float, float]:
    """Return an interval of F1, computed from the exact 95% intervals of recall and of the rate of false
    accusations.
    """
    recall, accused = (binomtest(k, n).proportion_ci() for k, n in ((hits, related), (false, others)))
    return (
        f1(recall.low * related, related, accused.high * others),
        f1(recall.high * related, related, accused.low * others),
    )


def counts(rows: list[dict[str, Any]]) -> tuple[int, int, int, int]:
    """Return the numbers of found related pairs, of all related pairs, of accused strangers, and of all strangers."""
    related, others = ([row for row in rows if is_positive(row) is flag] for flag in (True, False))
    # After a whole further training "undecided" is no error, but it finds nothing either.
    long = ("trained on 100", "trained on 200")
    related = [row for row in related if row["verdict"] != "undecided" or not row["kind"].startswith(long)]
    found, accused = (sum(row["verdict"] in RELATED for row in some) for some in (related, others))
    return found, len(related), accused, len(others)


def area(related: list[float], others: list[float]) -> float:
    """Return the probability that a related pair has the larger score, where ties count half."""
    gaps = torch.tensor(related, dtype=torch.float64).unsqueeze(1) - torch.tensor(others, dtype=torch.float64)
    return float((gaps > 0).double().mean() + (gaps == 0).double().mean() / 2)


def score_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return, as lines of a table, the area under the curve of each score, and F1 at its own threshold and at the best
    threshold for these pairs.
    """
    heads = ["score", "architectures", "related", "strangers", "area", "moved", "not moved", "F1", "best F1"]
    lines = [f"| {' | '.join([*heads, 'aligned strangers accused'])} |", "| --- | --- |" + " ---: |" * 8]
    for score, name in SCORES.items():
        known = [row for row in rows if row.get(score) is not None]
        related, others = ([row for row in known if is_positive(row) is flag] for flag in (True, False))
        strange = [row[score] for row in others]
        threshold, best = best_threshold([row[score] for row in related], strange)
        own = f"{f1_at(OWN[score], related, others, score):.3f}" if score in OWN else ""
        threshold = OWN.get(score, threshold)
        moved = [row[score] for row in related if row["class"] == "copy" or row["kind"].endswith("moved")]
        still = [row[score] for row in related if not (row["class"] == "copy" or row["kind"].endswith("moved"))]
        aligned = [row[score] >= threshold for row in others if row["kind"].startswith("aligned")]
        families = [family for family in FAMILIES if any(row["family"] == family for row in known)]
        areas = " | ".join(f"{area(some, strange):.3f}" for some in ([*moved, *still], moved, still))
        label = "all" if len(families) == len(FAMILIES) else ", ".join(families)
        cells = f"{len(related)} | {len(others)} | {areas} | {own} | {best:.3f} | {sum(aligned)} of {len(aligned)}"
        lines.append(f"| {name} | {label} | {cells} |")
    return lines


def f1_at(cut: float, related: list[dict[str, Any]], others: list[dict[str, Any]], score: str) -> float:
    """Return F1 of a score at a threshold."""
    hits, false = (sum(row[score] >= cut for row in some) for some in (related, others))
    return f1(hits, len(related), false)


def best_threshold(related: list[float], others: list[float]) -> tuple[float, float]:
    """Return the threshold with the largest F1 on the evaluated pairs, and this F1."""
    options = [
        (f1(sum(x >= cut for x in related), len(related), sum(x >= cut for x in others)), cut)
        for cut in {*related, *others}
    ]
    best, threshold = max(options)
    return threshold, best


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rates by architecture, and the rates of a control that calls every pair related, as the lines of a
    table.
    """
    heads = ["architecture", "related", "found", "strangers", "accused", "F1", "95%", "all related: F1", "s a pair"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for family in (*dict.fromkeys(row["family"] for row in rows), "all"):
        own = [row for row in rows if family in ("all", row["family"])]
        found, related, accused, others = counts(own)
        low, high = f1_interval(found, related, accused, others)
        seconds = sum(row["seconds"] for row in own) / len(own)
        numbers = f"{f1(found, related, accused):.3f} | {low:.3f} to {high:.3f} | {f1(related, related, others):.3f}"
        lines.append(f"| {family} | {related} | {found} | {others} | {accused} | {numbers} | {seconds:.2f} |")
    return lines


def kinship_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the answers for siblings and for descendants of the same shapes, as the lines of a table."""
    heads = ["pairs", "n", "one from the other", "both from a third", "open", "size of the lean"]
    lines = [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * 5]
    for group, kind in dict.fromkeys((row["class"], row["kind"].removesuffix(", moved")) for row in rows):
        own = [r for r in rows if (r["class"], r["kind"].removesuffix(", moved")) == (group, kind)]
        sizes = [abs(row["lean"]) for row in own if row.get("lean") is not None and row["verdict"] == "descended"]
        if group in ("descendant", "sibling") and sizes:
            line, third = sum(x >= LINE for x in sizes), sum(x <= SIBLINGS for x in sizes)
            span = f"{min(sizes):.2f} to {max(sizes):.2f}"
            lines.append(f"| {kind} | {len(sizes)} | {line} | {third} | {len(sizes) - line - third} | {span} |")
    return lines


def p_value_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the p-values of strangers that were not aligned, as the lines of a table."""
    lines = ["| strangers | n | p ≤ 0.05 | p ≤ 0.5 | D | p of D |", "| --- |" + " ---: |" * 5]
    own = [r for r in rows if r["class"] == "stranger" and not r["kind"].startswith("aligned")]
    for name in ("as stored", "moved"):
        some = [row for row in own if (row["kind"] == "moved") == (name == "moved")]
        found = [row["p_value"] for row in some if row["p_value"] is not None]
        test = kstest(found, "uniform")
        shares = " | ".join(f"{sum(p <= level for p in found) / len(found):.2f}" for level in (0.05, 0.5))
        lines.append(f"| {name} | {len(found)} | {shares} | {test.statistic:.2f} | {test.pvalue:.2f} |")
    return lines


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return the tables of docs/measurements/comparison.md that have rows, line by line."""
    tables = [make(rows) for make in (summary, class_table, score_table, kinship_table, p_value_lines)]
    return [line for table in tables if len(table) > 2 for line in ("", *table)][1:]


def main() -> None:
    """Evaluate all missing pairs, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=500)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print("\n".join(lines_of(read(options.table))))
        return
    if options.list:
        for family in FAMILIES:
            for pair in pairs(family, options.first):
                print(json.dumps(pair))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "lineage-verdicts.jsonl"
    done = {row["id"] for row in read(file)}
    for family in FAMILIES if options.family is None else (options.family,):
        shop = Workshop(family, options.folder)
        for pair in pairs(family, options.first):
            if pair["id"] not in done:
                row = {key: round_to_digits(value) for key, value in examine(pair, shop).items()}
                with file.open("a") as out:
                    print(json.dumps(row), file=out, flush=True)
    print("\n".join(lines_of(read(file))))


if __name__ == "__main__":
    main()
