"""kvlab: a laboratory for KV-cache compression in LLMs."""

from kvlab.corpus import Document, document, documents, questions
from kvlab.errors import KvlabError
from kvlab.models import LM, home, load, random_lm
from kvlab.policies import Policy, policies, policy
from kvlab.replay import replay
from kvlab.trace import Trace, capture

__version__ = "0.1.0"

__all__ = [
    "LM",
    "Document",
    "KvlabError",
    "Policy",
    "Trace",
    "capture",
    "document",
    "documents",
    "home",
    "load",
    "policies",
    "policy",
    "questions",
    "random_lm",
    "replay",
]
