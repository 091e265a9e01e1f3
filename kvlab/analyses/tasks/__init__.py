"""Tasks of several papers, answered under every policy."""
