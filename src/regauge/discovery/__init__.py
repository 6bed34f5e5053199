"""Transformations of a model's parameters that leave its function unchanged, found by tracing.

A module passes through the following steps. Each step is in the file with the same name.

- **trace**: `torch.export` turns the module into a *program*, a flat list of operator calls with parameters by name.
- **interpret**: each call is handed to a *rule*. With a *builder*, the rule records how the operator constrains axes.
- **laws**: the constraints of an operator are kept as a *record* until no axis is refined any more.
- **slots** (`write_out`): records are expanded, index by index and piece by piece, into *ties* between *slots*.
- **solve**: the ties of each atom are equations. Their solutions are the *freedom* of the atom.
- **angles**: pairs of coordinates that positions turn by fixed angles are tested on random numbers.
- **emit**: freedoms become named groups with placements. Every axis that stays frozen gets a reason.
- **verify** (`regauge.core`): a random element of every group is applied, and the outputs are compared.

The terms, in the order in which they appear:

- A *value* is a tensor of the program: parameter, input or intermediate. It is *fixed* if no parameter influences it,
  and *uniform* along axes on which it is constant.
- A *layout* is the meaning of the indices of one axis: a row-major product of atoms.
- An *atom* is a piece of an axis: a leaf, a product of smaller atoms, or a direct sum of layouts (a concatenation).
- A *leaf* is an atom whose units nothing distinguishes so far. Tying two axes splits, cuts and merges leaves until both
  axes have the same structure.
- A *unit* is one index of a leaf: a neuron, a channel, a head. A leaf of size one is a single unit.
- An atom is *frozen* if its units cannot be reordered. The result is sound because every axis that no rule explains is
  frozen.
- A *stacked* value is several tensors along an axis whose positions differ in meaning: query, key and value. The
  tensors stay separate as long as possible.
- A value can have a *virtual* axis: an axis that it lacks, but from which one of its own axes selects. An example is
  the axis of experts if each token selects an expert.
- In a law, an *axis* is one axis of a value, several axes that are read as one, or a range of one axis.
- A *law* constrains the transformations of the axes that one index of an operator runs over. It determines which
  scales, signs, matrices and translations must agree. A *record* holds the laws of one operator call.
- A *term* is one product of an axis written as a sum of products: its first index, and its leaves with their strides.
- A *slot* is one occurrence of a leaf in one term of one axis of one value.
- A *tie* is a law at one place: the slots that the law relates there.
- The *companions* of a slot are the other leaves whose index is known wherever the index of the slot is known. A
  transformation of the slot may differ between the units of a companion.
- The *bases* of a leaf are the leaves within whose units it is repeated. Its group acts separately in each head or
  expert.
- A *family* is one independent solution: the exponents of a positive scale, or the slots of a sign, unit by unit.
- A *freedom* holds all transformations that may act on one leaf: an order, families of scales, signs and shifts,
  matrices, turns of pairs.
- A *watched* value is an intermediate value for which placements are requested too. It does not change any freedom.
"""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
