"""What goes in: models, texts, and the pinned packs that carry both."""
