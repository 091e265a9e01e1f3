"""Figures, sentences and pages, made from findings. Nothing here can change a number or a content key."""
