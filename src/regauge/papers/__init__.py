"""The experiments of the papers: from a frozen config to a table, the paper's number beside ours."""
