"""What any project needs: files that are written whole or not at all, YAML with line numbers, intervals."""
