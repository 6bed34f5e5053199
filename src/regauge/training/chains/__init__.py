"""Chains of layers, forward and backward written by hand: no graph is kept, and memory is used again.

`chain_steps` reads a module as a chain, `vector_chain` runs fully connected networks as one program for a whole stack,
and `image_chain` runs convolutional ones.

Without it `torch.func.vmap` takes 3.6 times as long for a step of 30-16-16-2, 2.6 times for 784-10-10 and 1.8 times for
SIRENs 2-32-32-1, and one network after the other 1.4 times for small CNNs (`benchmarks/hand_written.py`).
"""
