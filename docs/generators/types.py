"""Short names of the types that signatures repeat, and the page that says what they are."""

import re

TYPES = {
    "Params": (
        ("Mapping[str, Tensor]", "dict[str, Tensor]"),
        "Parameters and buffers by name, as `state_dict()` gives them. In a population every tensor has a leading axis "
        "of networks.",
    ),
    "FilePath": (("str | pathlib.Path", "pathlib.Path | str"), "The path of a file or folder."),
    "Network": (
        ("Params | FilePath",),
        "Parameters by name, or the path of a checkpoint. A checkpoint is read on access.",
    ),
    "Destination": (
        ("regauge.Output | FilePath", "Output | FilePath"),
        "Where a result is written: a path, or `rg.Output` with its form.",
    ),
    "Memory": (
        ("int | str | MemoryLimit",),
        "The memory that a call may use: a number of bytes, or a text such as `3GB`.",
    ),
    "Outputs": (
        ("Callable[[Any], Any] | str | Sequence[str] | None",),
        "The outputs that are compared: one or several names, a function of the output, or `None` for all tensors.",
    ),
    "OnStep": (
        ("Callable[[regauge.training.State], object]", "Callable[[State], object]"),
        "A function that is called after each step of a training, with its `rg.training.State`.",
    ),
    "Judge": (
        ("regauge.Task | Callable[[Params], Mapping[str, float]]", "Task | Callable[[Params], Mapping[str, float]]"),
        "A task, or a function from parameters to numbers by name, of which `loss` is one.",
    ),
    "Hyperparameter": (
        (
            "float | regauge.training.Uniform | regauge.training.LogUniform | regauge.training.Choice",
            "float | Uniform | LogUniform | Choice",
        ),
        "One number for all networks, or a distribution from which every network draws its own.",
    ),
    "AnyOptimizer": (
        ("regauge.training.SGD | regauge.training.Adam | regauge.training.AdamW", "SGD | Adam | AdamW"),
        "An optimizer with its settings.",
    ),
    "ByLayer": (
        ("float | Setting | tuple[float | Setting, ...]", "float | Setting"),
        "One number, or a `Setting` by layer and module. A tuple has one of them for each network.",
    ),
    "Populations": (
        (
            "regauge.storage.Store | Params | Sequence[regauge.storage.Store | Params] | regauge.storage.Collection",
            "Store | Params | Sequence[Store | Params] | Collection",
        ),
        "A store, a population in memory, or several stores and populations, of one or more architectures.",
    ),
    "ArrayLike": (
        (
            "_Buffer | _SupportsArray[dtype[Any]] | _NestedSequence[_SupportsArray[dtype[Any]]] | complex | bytes | "
            "str | _NestedSequence[complex | bytes | str]",
        ),
        "An array, a number, or lists of numbers, which NumPy converts to an array.",
    ),
    "Scales": (
        ("Literal['balance', 'recompute', 'keep']",),
        "Which scales an alignment takes from the first network: see :doc:`/explanation/scales`.",
    ),
}
"""By short name: what is written for it in signatures, and what it is. A later entry may contain an earlier one."""


def _parts(text: str) -> list[str]:
    """The arguments between the brackets of a generic type."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _bars(text: str) -> str:
    """Unions and optional types, written with bars."""
    while found := re.search(r"\b(?:typing\.)?(Union|Optional)\[", text):
        end, depth = found.end(), 1
        while depth:
            depth += (text[end] == "[") - (text[end] == "]")
            end += 1
        parts = _parts(text[found.end() : end - 1]) + ["None"] * (found[1] == "Optional")
        text = text[: found.start()] + " | ".join(parts) + text[end:]
    return text


def shorten(signature: str, known: dict[str, str]) -> str:
    """A signature with short names of its types; `known` has the public name of a class by its module and name."""

    def plain(found: re.Match[str]) -> str:
        whole = found[0].removeprefix("~")
        is_path = whole.startswith("pathlib") and found[1] == "Path"
        return "pathlib.Path" if is_path else known.get(whole, found[1])

    text = re.sub(r"~?\b(?:[a-zA-Z_]\w*\.)+([A-Za-z_]\w*\b)(?!\()", plain, signature)
    text = re.sub(r"<class '(\w+)'>|ForwardRef\('(\w+)'\)|'([A-Z]\w*)'", r"\1\2\3", text)
    text = re.sub(r"\bndarray\[tuple\[Any, \.\.\.\], dtype\[\w+\]\]", "ndarray", text)
    text = re.sub(r"\bResult\[Any, float, tuple\[float, \.\.\.\], bool\]", "Result", _bars(text))
    for short, (written, _) in TYPES.items():
        for long in written:
            text = re.sub(rf"(?<![\w.]){re.escape(long)}(?!\w)", short, text)
    return text


def types_page() -> str:
    """The page of short names."""
    title = "Types in signatures"
    lines = [title, "=" * len(title), "", "Signatures in this reference have these short names of types.", ""]
    for short, (written, text) in TYPES.items():
        shown = re.sub(r"\b(?:pathlib|regauge(?:\.[a-z]+)?)\.", "", written[0])
        lines += [f".. py:type:: {short}", "", f"   {text}", ""]
        lines += [] if "_" in shown else [f"   Written as ``{shown}``.", ""]
    return "\n".join(lines)
