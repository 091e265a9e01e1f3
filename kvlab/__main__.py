"""`python -m kvlab` is the `kvlab` command."""

from kvlab.cli import main

main()
