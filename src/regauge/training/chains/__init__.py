"""Chains of layers with handwritten forward and backward passes, which do not need autograd and reuse memory.

`chain_steps` converts a module to a chain. `vector_chain` evaluates a whole stack of fully connected networks as one
program, and `image_chain` evaluates stacks of convolutional networks.

Compared with chains, `torch.func.vmap` takes 3.6 times as long for a training step of MLPs 30-16-16-2, 2.6 times as
long for MLPs 784-10-10, and 1.8 times as long for SIRENs 2-32-32-1. Training small CNNs one after the other takes 1.4
times as long (`benchmarks/hand_written.py`).
"""
