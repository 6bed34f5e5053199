"""Search for translations of a traced model: vectors that can be added to parameters without a change of the
outputs.
"""
