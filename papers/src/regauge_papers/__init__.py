"""The experiments of the papers, each from frozen settings to a table of our numbers and those of the paper."""
