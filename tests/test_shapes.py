"""Shapes of tensors are types. This file checks them for every kind of group, and REGAUGE_CHECK_SHAPES=1 checks them in
any test.
"""

import subprocess
import sys
from pathlib import Path

CODE = """
import shape_checks

shape_checks.install()

import jaxtyping
import torch

import regauge as rg
from regauge.core.element import Value
from test_core_laws import cases, draw

generator = torch.Generator().manual_seed(0)
for symmetry, shapes in cases(3, 4):
    for batch in ((), (5,)):
        params = draw(shapes, 0, *batch)
        bound = symmetry.bind(params)
        element = bound.random(generator, batch=batch)
        bound.act(bound.inverse(bound.compose(element, element)), params)
        rg.canonicalize(params, bound)
    rg.canonical.canonical_manifold(bound)
try:
    Value(perm=torch.arange(3), scale=torch.ones(1, 4, dtype=torch.float64))
except jaxtyping.TypeCheckError:
    print("three units are not four")
"""


def test_shapes_are_as_annotated() -> None:
    folder = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", CODE], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "three units are not four\n"
