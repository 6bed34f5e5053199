"""The experiments of the papers, each a function from frozen settings to a table of our numbers and the paper's
numbers.
"""
