"""Tools for any project: files that are written whole or not at all, YAML with line numbers, intervals."""
