"""kvlab.explore: sliders on a trace, and the picture that is shown where sliders do not work."""
