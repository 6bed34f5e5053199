"""Search for translations of a traced model: vectors are added to parameters, and their effects are followed through
operators.
"""
