"""Trees of networks: nearest common ancestors and the lengths of the branches between them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor


@dataclass(frozen=True)
class Branch:
    """A branch from an ancestor to a network or another ancestor; its length is in the unit of the distances."""

    parent: str
    child: str
    length: float


def join_neighbors(names: list[str], distances: Float64[Tensor, "n n"]) -> list[Branch]:
    """The tree whose paths between networks are as long as the distances say, as nearly as neighbor joining finds it.

    If the distances are those of a tree, it is that tree. Inner nodes are ancestors that are not among the networks,
    named "ancestor 1" and so on; a network that is itself an ancestor hangs on a branch of length zero. For networks
    that were trained on from common ones give *squared* distances: steps of different trainings are nearly orthogonal,
    so that their squares add up along the tree. The tree has no root; it is given from the last ancestor made.

    Args:
        names: The names of the networks, two at least, without repetition.
        distances: Between all pairs, symmetric.

    References:
        Saitou and Nei (1987), The neighbor-joining method; Studier and Keppler (1988) for the criterion.
    """
    if len(names) < 2 or len({*names}) < len(names):
        raise ValueError(f"a tree needs two networks or more with names of their own; these are {names}")
    nodes, known, branches = list(names), distances.double().clone(), list[Branch]()
    while len(nodes) > 2:
        n = len(nodes)
        sums = known.sum(1)
        criterion = (n - 2) * known - sums.unsqueeze(0) - sums.unsqueeze(1)
        criterion.fill_diagonal_(torch.inf)
        i, j = divmod(int(criterion.argmin()), n)
        first = float(known[i, j] / 2 + (sums[i] - sums[j]) / (2 * (n - 2)))
        parent = f"ancestor {len(names) - n + 1}"
        lengths = (first, float(known[i, j]) - first)
        branches += [Branch(parent, nodes[k], max(0.0, length)) for k, length in zip((i, j), lengths, strict=True)]
        others = [k for k in range(n) if k not in (i, j)]
        joined = (known[i, others] + known[j, others] - known[i, j]) / 2
        rest = known[others][:, others]
        known = torch.zeros(n - 1, n - 1, dtype=torch.float64)
        known[:-1, :-1], known[-1, :-1], known[:-1, -1] = rest, joined, joined
        nodes = [*(nodes[k] for k in others), parent]
    return [*branches, Branch(nodes[1], nodes[0], max(0.0, float(known[0, 1])))]


def tree_lines(branches: list[Branch]) -> list[str]:
    """A tree as text: each network or ancestor below the one that it hangs on, with the length of its branch."""
    children: dict[str, list[Branch]] = {}
    for branch in branches:
        children.setdefault(branch.parent, []).append(branch)
    root = branches[-1].parent

    def lines(name: str, indent: str) -> list[str]:
        result = []
        own = sorted(children.get(name, []), key=lambda branch: branch.length)
        for k, branch in enumerate(own):
            is_last = k == len(own) - 1
            result.append(f"{indent}{'└' if is_last else '├'}─ {branch.child}  ({branch.length:.3g})")
            result += lines(branch.child, indent + ("   " if is_last else "│  "))
        return result

    return [root, *lines(root, "")]
