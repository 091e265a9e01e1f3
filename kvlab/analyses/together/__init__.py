"""All policies side by side, at equal bytes."""
