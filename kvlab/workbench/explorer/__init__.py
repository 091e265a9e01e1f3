"""kvlab.explore: sliders on a trace, and the picture that stays when the sliders are gone."""
