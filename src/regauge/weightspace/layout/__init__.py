"""The tensors of a network as features of units, of pairs of units, and of the network: compiled from its symmetry."""

from regauge.weightspace.layout.blocks import Block, End, Grid, Label, UnitSet
from regauge.weightspace.layout.characters import Character
from regauge.weightspace.layout.compile import Layout, compile_layout

__all__ = ["Block", "Character", "End", "Grid", "Label", "Layout", "UnitSet", "compile_layout"]
