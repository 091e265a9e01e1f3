"""The tiny random models of the test matrix."""

from kvlab.inputs import shapes

FAMILIES = [name for name in shapes.SHAPES if name.startswith("tiny-")]
HYBRIDS = [name for name in shapes.SHAPES if name.startswith("hybrid-")]
