"""Streamed alignment of Llama-style checkpoints: it recovers a hidden element between two checkpoints in little memory.

    python benchmarks/streaming.py make FOLDER             # sharded bfloat16 checkpoints, 1.1 billion values each: a, b
                                                           # (a with noise, moved) and c, which is independent of both
    python benchmarks/streaming.py measure FOLDER          # aligns, merges and compares them, with peak memory
    python benchmarks/streaming.py check FOLDER            # compares what was found with what was hidden
    python benchmarks/streaming.py rotate FOLDER           # `regauge gauge` of a beside reading and writing it
    python benchmarks/streaming.py plain FOLDER            # a and b merged without aligning, beside copying a
    python benchmarks/streaming.py least FOLDER            # the least memory in which a plan aligns a and b

`--layers 2 --hidden 256` and similar options make smaller checkpoints.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import regauge as rg
from regauge.checkpoints.alignments import Alignment, alignment_path, load_alignment
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.headers import TensorSpec
from regauge.checkpoints.writing import Shard, write_index, write_shard
from regauge.core import act as _act
from regauge.core.element import Element

SIZES = {"hidden": 2048, "intermediate": 5632, "layers": 22, "heads": 32, "kv_heads": 4, "vocabulary": 32000}
COMMANDS = {
    "align": ("align", "b", "aligned"),
    "merge": ("merge", "b", "merged"),
    "compare a b": ("compare", "b", None),
    "compare a c": ("compare", "c", None),
}
"""Commands that are measured: name, second network, and output if there is one."""


def main() -> None:
    """Parse the arguments, and run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("make", "measure", "check", "rotate", "plain", "least"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--noise", type=float, default=0.3, help="standard deviation, as a share of the weights'")
    parser.add_argument("--memory", default="3GB", help="of measure; rotate has 4GB")
    parser.add_argument("--only", choices=tuple(COMMANDS), help="measure only that")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--shard", type=float, default=0.5, help="GB of a file that is made, about")
    parser.add_argument("--before", help="of plain and least: the sources of an earlier commit, which also run")
    options = parser.parse_args()
    work = {"make": make, "measure": measure, "check": check, "rotate": rotate, "plain": plain, "least": least}
    work[options.command](options)


def make(options: argparse.Namespace) -> None:
    """Write the folders a, b and c, and the element that transforms b, next to a."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        vocab_size=options.vocabulary,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    symmetry = rg.discover(model, (), {"input_ids": torch.zeros(2, 8, dtype=torch.long, device="meta")})
    generator = torch.Generator().manual_seed(0)
    element = hidden(symmetry, generator)
    back = symmetry.inverse(element)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    shards = in_shards(shapes, 1e9 * options.shard)

    def values(name: str, is_moved: bool, first_seed: int) -> Iterator[Tensor]:
        seed = first_seed + 2 * list(shapes).index(name)
        own = torch.Generator().manual_seed(seed)
        std = 0.02 if len(shapes[name]) > 1 else 0.1
        tensor = torch.randn(shapes[name], generator=own) * std + (0.0 if len(shapes[name]) > 1 else 1.0)
        if is_moved:
            own = torch.Generator().manual_seed(seed + 1)
            tensor = tensor + options.noise * std * torch.randn(shapes[name], generator=own)
            sites = {name: symmetry.sites[name]}
            tensor = _act.act(symmetry.groups, sites, back, {name: tensor}, {name: tensor.ndim})[name]
        yield tensor.to(torch.bfloat16)

    for letter, is_moved, seed in (("a", False, 0), ("b", True, 0), ("c", False, 10_000)):
        folder = options.folder / letter
        folder.mkdir(parents=True, exist_ok=True)
        for shard in shards:
            write_shard(shard, folder, lambda name, one=(is_moved, seed): values(name, *one))
        write_index(shards, folder)
        config.save_pretrained(folder)
    Alignment(symmetry, element).save(options.folder / "hidden.alignment.safetensors", overwrite=True)
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    print(f"{count:,} values in {len(shards)} shards: {options.folder}/a, b and c")


def hidden(symmetry: rg.Symmetry, generator: torch.Generator) -> Element:
    """Return a random element: orders, signs, positive scales, angles, and rotations for groups of invertible
    matrices.
    """
    element = symmetry.random(generator, ("permutation", "sign", "scale", "linear"))
    for group in symmetry.groups:
        if group.matrix == "linear":
            value = element[group.name]
            noise = torch.randn(value.matrix.shape, generator=generator, dtype=torch.float64)
            element = element.replace(group.name, type(value)(matrix=torch.linalg.qr(noise)[0]))
    return element


def in_shards(shapes: dict[str, tuple[int, ...]], size: float) -> list[Shard]:
    """Write the tensors in files of about the given number of bytes."""
    parts: list[list[TensorSpec]] = [[]]
    for name, shape in shapes.items():
        spec = TensorSpec(name, shape, torch.bfloat16)
        if parts[-1] and sum(s.nbytes for s in parts[-1]) + spec.nbytes > size:
            parts.append([])
        parts[-1].append(spec)
    files = [f"model-{k + 1:05}-of-{len(parts):05}.safetensors" for k in range(len(parts))]
    return [Shard(file, tuple(slots), {}) for file, slots in zip(files, parts, strict=True)]


def measure(options: argparse.Namespace) -> None:
    """Run the commands, each in a separate process."""
    a = options.folder / "a"
    base = peak_of(["-c", "import torch, transformers, regauge.cli.streaming, regauge.cli.merge"]).nbytes
    print(f"interpreter with torch, transformers and regauge imported: {base / 1e9:.3f} GB")
    print(f"reading both checkpoints from the page cache: {plain_reading([a, options.folder / 'b']):.2f} GB/s")
    for label, (command, other, out) in COMMANDS.items():
        if options.only in (None, label):
            arguments = [command, str(a), str(options.folder / other), "--memory", options.memory]
            if out is not None:
                arguments += ["-o", str(options.folder / out), "--overwrite"]
            else:
                arguments += ["--exact", "--json"]
            cost = peak_of(["-m", "regauge", *arguments])
            print(
                f"regauge {label}: {cost.seconds:.0f} s, processor {cost.processor_seconds:.0f} s, "
                f"peak {(cost.nbytes - base) / 1e9:.3f} GB above the interpreter"
            )
            if out is None:
                found = json.loads(cost.told)
                print(f"  {found['verdict']}: {found['reason']}")


class Cost(NamedTuple):
    """Peak resident memory of a process in bytes, wall-clock seconds, processor seconds, and the printed output."""

    nbytes: int
    seconds: float
    processor_seconds: float
    told: str


def peak_of(arguments: list[str]) -> Cost:
    """Run Python with some arguments, and measure its memory and time."""
    code = (
        "import resource, subprocess, sys; code = subprocess.call([sys.executable, *sys.argv[1:]]);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(code, used.ru_maxrss, used.ru_utime + used.ru_stime, file=sys.stderr)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    *told, last = done.stderr.strip().splitlines()
    status, peak, seconds = last.split()
    if status != "0":
        sys.exit("\n".join(told))
    nbytes = int(peak) * (1 if sys.platform == "darwin" else 1024)
    return Cost(nbytes, time.perf_counter() - start, float(seconds), done.stdout)


def plain_reading(folders: list[Path]) -> float:
    """Return GB/s for reading all files once into one buffer, at the second time, with the files in the page cache."""
    buffer = bytearray(1 << 20)
    for _ in range(2):
        start, total = time.perf_counter(), 0
        for folder in folders:
            for file in Checkpoint.open(folder).metadata:
                descriptor = os.open(file, os.O_RDONLY)
                while count := os.readv(descriptor, [buffer]):
                    total += count
                os.close(descriptor)
        seconds = time.perf_counter() - start
    return total / seconds / 1e9


def rotate(options: argparse.Namespace) -> None:
    """Rotate a by Hadamard matrices, and compare the processor time with the time for only reading and writing a."""
    source, out, copied = options.folder / "a", options.folder / "rotated", options.folder / "copied"
    plain = [read_and_write(source, copied)]
    shutil.rmtree(out, ignore_errors=True)
    cost = peak_of(["-m", "regauge", "gauge", str(source), "-o", str(out), "--memory", "4GB"])
    plain.append(read_and_write(source, copied))
    print(
        f"reading and writing, tensor by tensor, before and after: processor {plain[0]:.1f} and {plain[1]:.1f} s\n"
        f"regauge gauge: {cost.seconds:.0f} s, processor {cost.processor_seconds:.1f} s, "
        f"{2 * cost.processor_seconds / sum(plain):.1f} times as much; peak {cost.nbytes / 1e9:.2f} GB"
    )


PLAIN = """
import sys, time, shutil
from regauge.merging import merge_recipe
shutil.rmtree(sys.argv[2], ignore_errors=True)
began = time.process_time()
merge_recipe(sys.argv[1], sys.argv[2])
print(time.process_time() - began)
"""


def plain(options: argparse.Namespace) -> None:
    """Merge a and b without alignment, and compare the processor time with the time for copying a by safetensors."""
    recipe, out = options.folder / "plain.yml", options.folder / "plain"
    models = "".join(f"  - {{model: {letter}, parameters: {{weight: 0.5}}}}\n" for letter in "ab")
    recipe.write_text(f"merge_method: linear\nmodels:\n{models}dtype: bfloat16\nregauge: {{align: false}}\n")
    sources = {"before": options.before, "now": os.environ.get("PYTHONPATH", "")}
    best = dict.fromkeys(["a copy", *(name for name, folder in sources.items() if folder is not None)], float("inf"))
    for _ in range(3):
        best["a copy"] = min(best["a copy"], copy_by_safetensors(options.folder / "a", options.folder / "copied"))
        for name in best.keys() & sources.keys():
            environment = {**os.environ, "PYTHONPATH": sources[name]}
            arguments = [sys.executable, "-c", PLAIN, str(recipe), str(out)]
            done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
            best[name] = min(best[name], float(done.stdout))
    print(f"{torch.get_num_threads()} threads; processor seconds, the least of three: ", end="")
    print(", ".join(f"{name} {seconds:.2f}" for name, seconds in best.items()))


def least(options: argparse.Namespace) -> None:
    """Print the smallest memory that an error message names, with the symmetry in the cache, next to the size of the
    files.
    """
    for name, sources in {"before": options.before, "now": os.environ.get("PYTHONPATH", "")}.items():
        if sources is None:
            continue
        folders = [str(options.folder / letter) for letter in "ab"]
        words = ["-m", "regauge", "align", *folders, "-o", str(options.folder / "x"), "--memory", "1MB", "--dry-run"]
        environment = {**os.environ, "PYTHONPATH": sources}
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
            )
        print(f"{name}: {done.stderr.strip().rpartition('; ')[2]}")
    print(f"{Checkpoint.open(options.folder / 'a').nbytes / 1e9:.3g} GB in each folder")


def copy_by_safetensors(source: Path, out: Path) -> float:
    """Read all files of a checkpoint and write them again. Return the processor seconds."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    start = time.process_time()
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            save_file({name: tensors.get_tensor(name).clone() for name in tensors.keys()}, out / file.name)  # noqa: SIM118
        descriptor = os.open(out / file.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.process_time() - start


def read_and_write(source: Path, out: Path) -> float:
    """Copy every tensor of a checkpoint to a separate new file on the disk. Return the processor seconds."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    start = time.process_time()
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                path = out / f"{name}.safetensors"
                save_file({name: tensors.get_tensor(name).clone()}, path)
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
    return time.process_time() - start


def check(options: argparse.Namespace) -> None:
    """Print the difference between the found element and the hidden element."""
    planted = load_alignment(options.folder / "hidden.alignment.safetensors").element
    found = load_alignment(alignment_path(options.folder / "aligned")).element
    numbers: dict[str, float] = {}
    counts = {"units": 0, "units in their place": 0, "signs": 0, "signs recovered": 0}
    for name, value in planted.items():
        other = found[name]
        if value.perm is not None:
            counts["units"] += value.perm.numel()
            counts["units in their place"] += int((value.perm == other.perm).sum())
        if value.sign is not None:
            counts["signs"] += value.sign.numel()
            counts["signs recovered"] += int((value.sign == other.sign).sum())
        if value.scale is not None:
            error = float((other.scale.log() - value.scale.log()).abs().max())
            numbers["largest error of the logarithm of a scale"] = max(
                error, numbers.get("largest error of the logarithm of a scale", 0.0)
            )
        if value.matrix is not None:
            error = float((other.matrix - value.matrix).flatten(-2).norm(dim=-1).max() / value.matrix.shape[-1] ** 0.5)
            numbers["largest relative error of a rotation"] = max(
                error, numbers.get("largest relative error of a rotation", 0.0)
            )
    print(json.dumps(counts | numbers, indent=1))


if __name__ == "__main__":
    main()
