"""A name becomes a language model: weights, tokenizer and the hash that a result carries in its signature."""

from kvlab.inputs.models.catalogue import DEFAULT, MODELS, PackedModel
from kvlab.inputs.models.conversion import pull
from kvlab.inputs.models.lm import LM, lm_of
from kvlab.inputs.models.loading import load, random_lm, tokenizer

__all__ = ["DEFAULT", "LM", "MODELS", "PackedModel", "lm_of", "load", "pull", "random_lm", "tokenizer"]
