"""Inputs: models, texts, and the pinned packs that contain both."""
