"""A census of architectures: the verified result of discovery for each model, or the error message of a refusal.

    python benchmarks/census.py --out FILE [--source transformers ...] [--packages FOLDER] [--shard 0/4]
    python benchmarks/census.py --table FILE ...

The command writes one JSON line for each model, and skips models that are already in the file, so a stopped run can be
continued. Each model runs in a separate process, forked after the imports, with a limit of time and of memory. The
second form prints a table of the uses of models, and a table of the reasons for refusals.

There are six kinds of answers. "discovered": the symmetry holds in float64 under random elements other than those of
`discover`'s own check. "refused": a `ValueError` with a message. "wrong": an element changes the outputs. "error": any
other exception. "limit": time or memory was exceeded. "not built": the package cannot build or run the configuration of
this census, so the model is not counted.
"""

import argparse
import itertools
import json
import os
import re
import resource
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from census_diffusers import diffusers_names, make_diffusers
from census_models import (
    Made,
    NotBuilt,
    family,
    make_segmentation,
    make_timm,
    make_torchvision,
    make_vit,
    open_transformers,
    segmentation_names,
    timm_names,
    torchvision_names,
    transformers_names,
    vit_names,
)

import regauge as rg
from regauge.discovery import TraceError

SOURCES: dict[str, tuple[Callable[[], Iterator[str]], Callable[[str], Made] | None]] = {
    "transformers": (transformers_names, None),
    "timm": (timm_names, make_timm),
    "torchvision": (torchvision_names, make_torchvision),
    "vit-pytorch": (vit_names, make_vit),
    "segmentation": (segmentation_names, make_segmentation),
    "diffusers": (diffusers_names, make_diffusers),
}
"""For each source, a function that yields names, and a function that makes a model. Models of transformers are opened
from folders."""

KINDS = ("discovered", "refused", "wrong", "error", "limit")
"""Kinds of answers for models that run, in the order of the table's columns."""


def judge(source: str, name: str) -> dict[str, Any]:
    """Discover and verify one model in this process."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        row: dict[str, Any] = {"source": source, "family": family(source, name), "name": name}
        started = time.process_time()
        try:
            if SOURCES[source][1] is None:
                model = open_transformers(name, folder)
                row["parameters"] = sum(p.numel() for p in model.blank.parameters())
                started = time.process_time()
                symmetry = model.symmetry
                module, inputs, kwargs = model.module, model.inputs, dict(model.kwargs or {})
            else:
                module, inputs, kwargs = SOURCES[source][1](name)
                row["parameters"] = sum(p.numel() for p in module.parameters())
                started = time.process_time()
                symmetry = rg.discover(module, inputs, kwargs)
        except NotBuilt as error:
            return row | {"kind": "not built", "sentence": _sentence(error)}
        except (TraceError, ValueError) as error:
            return row | {"kind": "refused", "sentence": _sentence(error), "seconds": _since(started)}
        row["seconds"] = _since(started)
        generator = torch.Generator().manual_seed(1)
        try:
            check = symmetry.verify(module, inputs, kwargs, generator=generator, each_group=False)
        except ValueError as error:  # Outputs are infinite by design, such as scores of what is padded.
            return row | {"kind": "refused", "sentence": _sentence(error)}
        row |= {"kind": "discovered" if check.ok else "wrong", "error": float(f"{check.max_error:.1e}")}
        if not check.ok:
            row["sentence"] = str(check)[:400]
        frozen: dict[str, int] = {}
        for axis in symmetry.frozen:
            frozen[axis.reason[:120]] = frozen.get(axis.reason[:120], 0) + 1
        row |= {
            "groups": len(symmetry.groups),
            "translations": sum(family.size for family in symmetry.translations),
            "families": len(symmetry.translations),
            "frozen": len(symmetry.frozen),
            "reasons": dict(sorted(frozen.items(), key=lambda item: -item[1])[:4]),
        }
        return row


def _since(started: float) -> float:
    return round(time.process_time() - started, 2)


def _sentence(error: BaseException) -> str:
    """Return the kind and the message of an exception, without the folders of this machine."""
    text = " ".join(str(error).split())
    for folder in sorted(filter(None, [*sys.path, tempfile.gettempdir()]), key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return f"{type(error).__name__}: {text}"[:400]


def in_process(source: str, name: str, seconds: float, gigabytes: float) -> dict[str, Any]:
    """Evaluate one model in a forked process with limits."""
    named = {"source": source, "family": family(source, name), "name": name}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.setpgid(0, 0)
        limit = int(gigabytes * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + int(seconds), used + int(seconds)))
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        try:
            row = judge(source, name)
        except MemoryError as error:
            row = {**named, "kind": "limit", "sentence": _sentence(error)}
        except BaseException as error:
            kind = "limit" if "memory" in str(error).lower() else "error"
            trail = traceback.format_exc()[-1500:]
            row = {**named, "kind": kind, "sentence": _sentence(error), "trail": trail}
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(row))
        os._exit(0)
    os.close(writing)

    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        return {**named, "kind": "limit", "sentence": f"more than {seconds:g} CPU s, or killed"}
    return json.loads(text)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the last row of each model in a file. An incomplete last line is skipped."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return list({(row["source"], row["name"]): row for row in rows}.values())


def branch(source: str, name: str) -> str:
    """Return the use of a model, given its source and its class."""
    if source != "transformers":
        return source
    tasks = (
        (r"CausalLM|LMHead", "language models"),
        (r"MaskedLM|Sequence|PreTraining|QuestionAnswering", "encoders of text"),
        (r"CTC|Audio|Speech|Wav|Spectro|Codec|Vocoder", "sound"),
        (r"Conditional|ImageText|Multimodal", "text from text, images or sounds"),
        (r"Image|Vision|Video|Depth|Semantic|Detection|Segment", "images"),
    )
    found = next((task for words, task in tasks if re.search(words, name.split("/")[1])), "others")
    return f"transformers: {found}"


REASONS = (
    ("depends on the values", "what runs depends on values of a tensor"),
    ("are known that reach", "no example inputs are known that reach every part"),
    ("NaN or Inf", "outputs are infinite, and nothing can be checked"),
    ("index returns depends", "a shape depends on values of a tensor"),
    ("no example inputs", "no example inputs are known on which this configuration runs"),
)
"""Words in the error messages of refusals, each with the reason for the refusal."""


def table(rows: list[dict[str, Any]]) -> str:
    """Return three Markdown tables: the share of the plan that was run, the answers by use, and the reasons for
    refusals.
    """
    plans, rows = ([row for row in rows if (row["kind"] == "planned") == wanted] for wanted in (True, False))
    judged = [row for row in rows if row["kind"] != "not built"]
    lines = ["| source | models planned | run | families planned | run |", "| --- | ---: | ---: | ---: | ---: |"]
    for plan in plans:
        own = [row["family"] for row in rows if row["source"] == plan["source"]]
        lines.append(f"| {plan['source']} | {plan['models']} | {len(own)} | {plan['families']} | {len(set(own))} |")
    models, families = (sum(plan[what] for plan in plans) for what in ("models", "families"))
    count = len({(row["source"], row["family"]) for row in rows})
    lines += [f"| all | {models} | {len(rows)} | {families} | {count} |", ""]
    lines += ["| models | families | judged | right | refused | wrong | errors | limits | median CPU s | not built |"]
    lines += ["| --- " + "| ---: " * 9 + "|"]
    for one in [*sorted({branch(row["source"], row["name"]) for row in rows}), "all"]:
        own = [row for row in rows if one in ("all", branch(row["source"], row["name"]))]
        ran = [row for row in own if row in judged]
        shares = [f"{_share(row['kind'] == kind for row in ran)}" for kind in KINDS]
        seconds = [row["seconds"] for row in ran if row["kind"] == "discovered"]
        median = f"{statistics.median(seconds):.1f}" if seconds else ""
        families = len({(row["source"], row["family"]) for row in own})
        cells = [one, families, len(ran), *shares, median, len(own) - len(ran)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| answer | reason | families |", "| --- | --- | --- |"]
    found: dict[tuple[str, str], set[str]] = {}
    for row in judged:
        if row["kind"] != "discovered":
            found.setdefault((row["kind"], reason(row["sentence"])), set()).add(row["family"])
    for kind, why in sorted(found):
        lines.append(f"| {kind} | {why} | {', '.join(sorted(found[kind, why]))} |")
    return "\n".join(lines)


def reason(sentence: str) -> str:
    """Return the reason that an error message states, in few words."""
    return next((short for words, short in REASONS if words in sentence), sentence[:80])


def _share(holds: Iterable[bool]) -> str:
    found = list(holds)
    return f"{sum(found)} ({sum(found) / len(found):.0%})" if any(found) else "0"


def main() -> int:
    """Evaluate models, or print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines; models that it has already are skipped")
    parser.add_argument("--table", type=Path, nargs="*", help="print the tables of such files")
    parser.add_argument("--source", nargs="*", default=["transformers"], choices=list(SOURCES))
    parser.add_argument("--packages", type=Path, help="a folder with further packages, from pip install --target")
    parser.add_argument("--shard", default="0/1", help="K/N: every N-th model from the K-th")
    parser.add_argument("--again", nargs="*", default=[], help="kinds of answers whose models are judged once more")
    parser.add_argument("--only", nargs="*", help="parts of the names of models; judged in this process, printed")
    parser.add_argument("--seconds", type=float, default=60, help="CPU seconds for one model, building included")
    parser.add_argument("--gigabytes", type=float, default=8, help="memory for one model")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if not (args.out or args.table or args.only):
        parser.error("say where the answers go with --out FILE, or name --table or --only")
    if args.table:
        print(table([row for path in args.table for row in read(path)]))
        return 0
    torch.set_num_threads(1)
    if args.packages:
        sys.path.append(str(args.packages))
        _torchvision_operators()
    # What `torch.export` imports at its first call is imported before the fork: it is not counted, and done once.
    rg.discover(torch.nn.Linear(2, 2), (torch.zeros(2, 2),))
    models = planned(args.source)
    if args.only:
        for source, name in models:
            if any(part in name for part in args.only):
                print(json.dumps(judge(source, name)), flush=True)
        return 0
    if not args.out.exists():
        args.out.write_text("".join(json.dumps(plan(source)) + "\n" for source in args.source))
    part, count = map(int, args.shard.split("/"))
    rows = {(row["source"], row["name"]): row for row in read(args.out)}
    done = {key for key, row in rows.items() if row["kind"] not in args.again}
    left = [one for one in models[part::count] if one not in done]
    for k, (source, name) in enumerate(left, 1):
        row = in_process(source, name, args.seconds, args.gigabytes)
        with args.out.open("a") as file:
            file.write("\n" * is_cut(args.out) + json.dumps(row) + "\n")
        print(f"{k} of {len(left)}: {source} {name}: {row['kind']}", flush=True)
    return 0


def plan(source: str) -> dict[str, Any]:
    """Return the number of models and of families of a source, as a row."""
    names = list(SOURCES[source][0]())
    families = {family(source, name) for name in names}
    return {"source": source, "name": "", "kind": "planned", "models": len(names), "families": len(families)}


def planned(sources: list[str]) -> list[tuple[str, str]]:
    """Return all models of some sources: first one model of each family, then a second model of each family, and so
    on.
    """
    turns: dict[tuple[str, str], int] = {}

    def turn(source: str, name: str) -> int:
        key = source, family(source, name)
        turns[key] = turns.get(key, 0) + 1
        return turns[key]

    lists = [[(turn(source, name), source, name) for name in SOURCES[source][0]()] for source in sources]
    mixed = [one for several in itertools.zip_longest(*lists) for one in several if one is not None]
    return [(source, name) for _, source, name in sorted(mixed, key=lambda one: one[0])]


def is_cut(path: Path) -> bool:
    """Return whether the last line of a file is incomplete."""
    text = path.read_bytes() if path.exists() else b""
    return bool(text) and not text.endswith(b"\n")


def _torchvision_operators() -> None:
    """Declare operators that torchvision expects at import, if its GPU library cannot be loaded."""
    for name in ("nms", "qnms"):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", signature)


if __name__ == "__main__":
    sys.exit(main())
