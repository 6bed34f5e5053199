"""The experiments of the papers: from a frozen config to a table of our numbers and the paper's."""
