"""A database of the fingerprints of 10,000 networks: the CPU seconds for building, opening and searching the database.

The networks are MLPs 30-16-16-2 with random weights, each in a separate file. The searched network is a copy of one of
them with 2% noise, transformed by a random element of the whole group.

    python benchmarks/database.py FOLDER [--networks 10000]

The record in docs/records/database.jsonl is the output of this command.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

import regauge as rg
from regauge.checkpoints.checkpoint import load
from regauge.checkpoints.writing import save
from regauge.comparison import Database
from regauge.nets.mlp import mlp

Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return the result of a function, and its CPU seconds."""
    began = time.process_time()
    result = work()
    return result, round(time.process_time() - began, 4)


def main() -> None:
    """Make the networks and the database, search the database, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--networks", type=int, default=10_000)
    options = parser.parse_args()
    module, generator = mlp(30, 16, 16, 2).eval(), torch.Generator().manual_seed(0)
    symmetry = rg.discover(module, (torch.zeros(2, 30),))
    zoo = options.folder / "zoo"
    zoo.mkdir(parents=True, exist_ok=True)

    def draw() -> rg.Params:
        return {name: 0.3 * torch.randn(t.shape, generator=generator) for name, t in module.state_dict().items()}

    paths = [save(draw(), zoo / f"{number}.safetensors", overwrite=True) for number in range(options.networks)]
    noise = draw()
    parent = {name: tensor + 0.02 * noise[name] for name, tensor in load(paths[-1]).items()}
    query = save(symmetry.act(symmetry.random(generator), parent), options.folder / "query.safetensors", overwrite=True)
    file = options.folder / "database.safetensors"
    file.unlink(missing_ok=True)
    _, added = timed(lambda: Database(file).add(paths, symmetry=symmetry))
    known, opened = timed(lambda: Database(file))
    near, nearest = timed(lambda: known.nearest(query))
    found, searched = timed(lambda: known.search(query))
    record = {
        "networks": options.networks,
        "file_bytes": file.stat().st_size,
        "seconds": {"add": added, "open": opened, "nearest": nearest, "search": searched},
        "is_parent_nearest": near[0].path == f"zoo/{paths[-1].name}",
        "distances": [near[0].distance, near[1].distance],
        "verdicts": [row["verdict"] for row in found.rows],
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
