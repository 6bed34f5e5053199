"""The null space of the outputs' Jacobian, compared with the discovered group, for the architectures of
`tests/null_space_nets.py`.

    python benchmarks/null_spaces.py [NAME ...] --out docs/records/null-spaces.jsonl
    python benchmarks/null_spaces.py --table docs/records/null-spaces.jsonl

The first form adds a JSON line for each architecture that the file lacks. The second form prints the table of
docs/completeness.md.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import regauge as rg

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from null_space_nets import CASES


def measure(name: str) -> dict[str, Any]:
    """Compare the null space of one architecture with its group."""
    case, start = CASES[name], time.process_time()
    torch.manual_seed(0)
    module = case.module().eval()
    generator = torch.Generator().manual_seed(0)
    report = rg.discovery.nullity(module, case.inputs(), case.kwargs, outputs=case.outputs, generator=generator)
    return {
        "name": name,
        "family": case.family,
        "parameters": report.parameters,
        "null": report.null,
        "found": report.found,
        "named": dict(report.explained),
        "limit": case.limit,
        "unnamed": report.unexplained - case.limit[1],
        "seconds": time.process_time() - start,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the families as a Markdown table."""
    lines = ["| family | architectures | dimensions that outputs do not see | of the group | named | not named |"]
    lines += ["| --- | ---: | ---: | ---: | --- | ---: |"]
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        named: dict[str, int] = {}
        for row in own:
            for reason, count in [*row["named"].items(), *([row["limit"]] if row["limit"][1] else [])]:
                named[reason] = named.get(reason, 0) + count
        text = "; ".join(f"{count} {reason}" for reason, count in named.items())
        null, found, unnamed = (sum(row[key] for row in own) for key in ("null", "found", "unnamed"))
        lines.append(f"| {family} | {len(own)} | {null} | {found} | {text} | {unnamed} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *CASES], default=[], help="all unless given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return
    done = set()
    if args.out and args.out.exists():
        done = {json.loads(line)["name"] for line in args.out.read_text().splitlines()}
    for name in args.names or CASES:
        if name in done:
            continue
        line = json.dumps(measure(name))
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
