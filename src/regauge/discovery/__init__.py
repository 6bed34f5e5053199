"""Discovery by tracing: a search for transformations of a model's parameters that leave its function unchanged.

Discovery takes the following steps. Each step is implemented in the file of the same name.

- **trace**: `torch.export` converts the module to a *program*, a flat list of operator calls in which parameters have
  names.

- **interpret**: each call is passed to the *rule* of its operator. The rule calls methods of a *builder*, which record
  how the operator constrains axes.

- **laws**: the constraints of each operator call are stored as a *record*, because later calls may divide the axes
  further.

- **slots** (`write_out`): after the last call, every record is expanded into *ties* between *slots*, for each index and
  each block of the axes.

- **solve**: the ties of each atom form equations. The solutions of an atom's equations are the transformations that may
  act on the atom: its *freedom*.

- **angles**: rotary embeddings rotate pairs of coordinates by fixed angles. Tests on random numbers show which pairs of
  coordinates may also be rotated by other angles.

- **emit**: freedoms are converted to named groups with placements. Every axis that stays frozen gets a reason.

- **verify** (`regauge.core`): a random element of all groups is applied, and the outputs are compared.

The terms, in the order in which they appear:

- A *value* is a tensor of the program: a parameter, an input or an intermediate result. A value is *fixed* if no
  parameter influences it. A value is *uniform* along an axis if its entries are constant along this axis.

- A *layout* describes one axis as a row-major product of atoms, just as `view` merges several axes into one.

- An *atom* is a factor of an axis: a leaf, a product of smaller atoms, or a direct sum of layouts (a concatenation).

- A *leaf* is an atom that is not divided further, because no operator so far distinguishes its units. If an operator
  ties two axes, leaves are split, cut and merged until both axes have the same structure.

- A *unit* is one index of a leaf, such as a neuron, a channel or a head.

- An atom is *frozen* if its units cannot be permuted. Every axis that no rule covers is frozen. Therefore discovery
  never allows a transformation that changes the function.

- A *stacked* value consists of several tensors along a new axis, such as query, key and value. Discovery keeps the
  stacked tensors separate until an operator needs the whole stack.

- A *virtual* axis of a value is an axis that its tensor lacks, because the tensor contains only selected indices of
  this axis. For example, if each token selects an expert, the values of the tokens have a virtual expert axis.

- The *axis* of a law is one axis of a value, several axes that are treated as one, or a range of one axis.

- A *law* is a constraint that one index of an operator imposes, such as the summed index of a matrix product. A law
  applies to all axes along which its operator index runs. A law relates the scales, signs, matrices and translations of
  its axes to each other. A *record* contains the laws of one operator call.

- A *term* describes one block of an axis by its first index, and by its leaves with their strides.

- A *slot* is one occurrence of a leaf, in one block of one axis of one value.

- A *tie* is a law, restricted to one slot on each axis of the law. All slots of a tie are at the same position within
  corresponding blocks.

- The *companions* of a slot are other leaves. Like the slot, each companion has exactly one index at each entry of the
  tensor. For example, heads are companions of the units within heads. A transformation of the slot may depend on the
  units of a companion.

- The *bases* of a leaf are other leaves, such as heads or experts. The group of the leaf acts separately within each
  unit of a base.

- A *family* is one kind of factor that every unit has: a scale with its exponents, or a sign with the slots where it
  acts.

- A *freedom* contains all transformations that may act on one leaf, such as permutations, families of scales, matrices,
  and rotations of pairs.

- A *watched* value is an intermediate value for which the caller requests placements (how groups act on its axes).
  Discovery finds the same freedoms with and without watched values.
"""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
