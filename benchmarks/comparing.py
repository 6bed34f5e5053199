"""Comparison of two folders of a large model: CPU seconds of one thread, divided by the time for reading both folders
once.

The folders come from `benchmarks/streaming.py`. Network b is network a with noise, transformed by a random element.
Network c is independent of both.

    python benchmarks/streaming.py make FOLDER          # 1.1 billion values; --layers 4 and so on make smaller ones
    OMP_NUM_THREADS=1 python benchmarks/comparing.py FOLDER [--memory 2GB] [--exact]
"""

import argparse
import resource
import time
from pathlib import Path

import torch

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.comparison import open_relatives


def reading(folders: list[Path]) -> float:
    """Return the CPU seconds for reading every stored tensor of some folders once, as the minimum of three runs."""
    seconds = []
    for _ in range(3):
        began = time.process_time()
        for folder in folders:
            with Checkpoint.open(folder) as checkpoint:
                for name in checkpoint.stored:
                    checkpoint.read(name)
        seconds.append(time.process_time() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--memory", default="2GB")
    parser.add_argument("--exact", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| pair | values | verdict | by | s | reading both, s | ratio | peak, GB |")
    print("| " + " | ".join(["---"] * 4 + ["---:"] * 4) + " |")
    for other in "bc":
        folders = [options.folder / "a", options.folder / other]
        against = reading(folders)
        opened = open_relatives(folders, memory=options.memory)
        began = time.process_time()
        found = opened.compare(*opened.networks.checkpoints, exact=options.exact)
        seconds = time.process_time() - began
        values = sum(torch.Size(one.shape).numel() for one in opened.networks.checkpoints[0].stored.values())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        way = "a sample" if found.is_sampled else "all values"
        print(
            f"| a and {other} | {values:,} | {found.verdict} | {way} | {seconds:.1f} | {against:.2f} | "
            f"{seconds / against:.1f} | {peak:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
