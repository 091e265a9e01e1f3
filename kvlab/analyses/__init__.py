"""The papers' analyses as functions: a model or traces in; tidy tables, metrics and intervals out."""
