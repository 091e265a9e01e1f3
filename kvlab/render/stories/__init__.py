"""Sentences about what an analysis found, one file for each paper; every number in them comes from findings."""
