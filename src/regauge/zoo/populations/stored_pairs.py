"""Matrices over all pairs of networks in a store, and tables of their entries. Jobs that can be resumed compute the
matrices."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regauge.alignment import WeightMatching, align_pairs
from regauge.checkpoints.outputs.ledger import PARTS, claim, remove_own, require_own
from regauge.core.params import Params, count_models, select
from regauge.core.progress import Progress, no_progress
from regauge.core.task import Task
from regauge.storage.store import Store
from regauge.zoo.jobs.compare_blocks import Compare, plan_comparison
from regauge.zoo.jobs.driver import run_jobs
from regauge.zoo.jobs.executors import MakeExecutor
from regauge.zoo.populations.pairs import Barriers, OrbitDistances
from regauge.zoo.populations.universe import universe

BLOCK_SIDE = 32
"""The number of networks in a block of a matrix."""
EXACT = "donot_use_mm_for_euclid_dist"
"""The mode in which `torch.cdist` uses no matrix products. Matrix products would lose precision for similar
networks."""


class PairMatrices:
    """Matrices over pairs of networks in a store, which processes or a cluster compute. The files are kept until
    `clear` is called.

    Args:
        store: The store.
        numbers: The indices of the networks, `[networks]`.
        folder: The folder for the matrices. An error is raised if a folder exists that regauge has not created.
        key: A string that identifies the settings.
        executor: The executor of the jobs. Default: this process.
        progress: The display of the progress.

    Attributes:
        params: The networks, with a leading model axis.
    """

    def __init__(
        self,
        store: Store,
        numbers: NDArray[np.int64],
        folder: Path,
        *,
        key: str = "",
        executor: MakeExecutor | None = None,
        progress: Progress = no_progress,
    ) -> None:
        require_own(folder, PARTS)
        self.store, self.numbers, self.folder = store, numbers, folder
        self.executor, self.progress = executor, progress
        self.params = store.read(numbers)
        self.key = hashlib.sha256(repr([key, store.key, store.places(numbers)]).encode()).hexdigest()

    def __call__(self, label: str, params: Params, compare: Compare) -> Tensor:
        """Return the matrix over all pairs of some networks, float64 `[networks, networks]`. Labels must be unique."""
        claim(self.folder, PARTS)
        folder = self.folder / hashlib.sha256(f"{self.key} {label}".encode()).hexdigest()[:16]
        networks = Store.create(folder / "networks", self.store.architecture)
        count = count_models(params)
        if not networks.has("all"):
            networks.append(params, [{"id": k, "step": 0} for k in range(count)], name="all")
        jobs = plan_comparison(networks, folder / "blocks", range(count), compare, size=BLOCK_SIDE, what=self.key)
        run_jobs(jobs, executor=self.executor, progress=lambda _, total: self.progress(label, total))
        return torch.from_numpy(jobs.matrix())

    def barriers(
        self,
        task: Task,
        *,
        align: Literal["pairs", "medoid", "universe", "no"] = "pairs",
        points: int = 3,
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """Return barriers between all pairs of networks, unaligned and aligned: matrices `[networks, networks]`.

        Args:
            task: The task whose loss determines the barriers.
            align: The value "pairs" aligns the networks of each pair to each other. The values "medoid" and "universe"
                align all networks to their medoid, or to the mean of their universe. The value "no" computes only
                unaligned barriers.
            points: The number of networks on each path, including both endpoints.
            seed: The seed of the alignment.
        """
        params, before = self.params, Barriers(task, points=points)
        symmetry = None if align == "no" else self.store.require_symmetry()
        found = {"as they are": self("barriers, as they are", params, before)}
        if symmetry is None:
            return found
        if align == "pairs":
            after = Barriers(task, symmetry, points=points, seed=seed)
            return found | {"each pair aligned": self("barriers, aligned", params, after)}
        if align == "universe":
            title, moved = "in one universe", universe(params, symmetry).params
        else:
            distances = self("distances of orbits", params, OrbitDistances(symmetry, seed=seed))
            center = select(params, int(distances.sum(1).argmin()))
            method = WeightMatching(scales="recompute")  # Statistics are recomputed on paths if there are data.
            title, moved = "aligned to the medoid", align_pairs(center, params, symmetry, method=method).params
        return found | {title: self("barriers, aligned", moved, before)}

    def rows(self, matrices: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return a table of all pairs of networks: their ids and steps, and the entry of each matrix by its name."""
        rows = self.store.rows.dicts(self.numbers)
        return [
            {f"{key}_{side}": rows[k][key] for side, k in (("a", i), ("b", j)) for key in ("id", "step")}
            | {name: float(matrix[i, j]) for name, matrix in matrices.items()}
            for i in range(len(rows))
            for j in range(i + 1, len(rows))
        ]

    def distances(
        self, by: Literal["orbits", "universe", "weights"] = "orbits", *, seed: int = 0
    ) -> NDArray[np.float64]:
        """Return the distances between all networks, `[networks, networks]`.

        Args:
            by: The kind of distances. "orbits": distances between orbits, for which each pair is aligned. "universe":
                distances between networks aligned to the mean of their universe. "weights": distances between unaligned
                networks.
            seed: The seed of the alignment.
        """
        if by == "orbits":
            compare = OrbitDistances(self.store.require_symmetry(), seed=seed)
            matrix: NDArray[np.float64] = self("distances of orbits", self.params, compare).numpy()
            return matrix
        params = universe(self.params, self.store.require_symmetry()).params if by == "universe" else self.params
        flat = torch.cat([t.double().flatten(1) for t in params.values() if t.is_floating_point()], 1)
        found: NDArray[np.float64] = torch.cdist(flat, flat, compute_mode=EXACT).numpy()
        return found

    def clear(self) -> None:
        """Delete the matrices."""
        remove_own(self.folder, PARTS)
