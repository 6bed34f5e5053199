"""Transformations of a model's parameters that leave its function unchanged, found by tracing.

A module passes through in this order; each step has a file of its name.

- **trace**: `torch.export` turns the module into a *program*, a flat list of operator calls with parameters by name.
- **interpret**: each call is handed to a *rule*, which writes with a *builder* what the operator says about axes.
- **laws**: what an operator says is kept as a *record*, until nothing refines the axes any more.
- **slots** (`write_out`): records are written out, index by index and piece by piece, as *ties* between *slots*.
- **solve**: the ties of each atom are equations; their solutions are its *freedom*.
- **angles**: pairs of coordinates that positions turn by fixed angles are tried on random numbers.
- **emit**: freedoms become named groups with placements; every axis that stays frozen gets its reason.
- **verify** (`regauge.core`): a random element of every group is applied, and the outputs are compared.

The words, in the order in which they are met:

- A *value* is a tensor of the program: parameter, input or intermediate. It is *fixed* if no parameter influences it,
  and *uniform* along axes on which it is constant.
- A *layout* says what the indices of one axis mean: a row-major product of atoms.
- An *atom* is a piece of an axis: a leaf, a product of smaller atoms, or a direct sum of layouts (a concatenation).
- A *leaf* is an atom whose units nothing distinguishes so far. Tying two axes splits, cuts and merges leaves until both
  axes read the same.
- A *unit* is one index of a leaf: a neuron, a channel, a head. A leaf of size one is a single unit.
- An atom is *frozen* if its units cannot be reordered. Sound by default: what no rule explains is frozen.
- A *stacked* value is several tensors along an axis whose positions differ in meaning: query, key and value. It stays
  apart as long as possible.
- A value is *virtual* along an axis that it lacks but that one of its own axes selects from: experts chosen per token.
- An *axis*, in a law, is one axis of a value, several that are read as one, or a range of one.
- A *law* is what one index of an operator demands of the transformations of its axes: which scales, signs, matrices and
  translations must agree. A *record* holds the laws of one operator call.
- A *term* is one product of an axis written as a sum of products: its first index, and its leaves with their strides.
- A *slot* is one occurrence of a leaf in one term of one axis of one value.
- A *tie* is a law at one place: the slots that it relates there.
- A slot's *companions* are the other leaves whose index is known wherever its own is: a transformation may differ from
  one of their units to the next.
- A leaf's *bases* are the leaves within whose units it is repeated: its group acts in each head or expert.
- A *family* is one independent solution: exponents of a positive scale, or slots of a sign, unit by unit.
- A *freedom* is all that may act on one leaf: an order, families of scales, signs and shifts, matrices, turns of pairs.
- A *watched* value is an intermediate value whose placements are asked for too; it changes no freedom.
"""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
