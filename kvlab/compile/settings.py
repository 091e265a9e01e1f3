"""What `kvlab compile` is asked for, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field, FiniteFloat, model_validator

from kvlab.lib.parameters import Parameters


class Actions(Parameters):
    """Settings with actions on heads and thresholds, the neutral ones among them."""

    if TYPE_CHECKING:  # each has the fields where they stand in its file and its command
        weights: tuple[float, ...]
        thresholds: tuple[float, ...]

    @model_validator(mode="after")
    def _acts(self) -> Self:
        for name, action in (("weights", 1.0), ("thresholds", 0.0)):
            actions = getattr(self, name)
            if action not in actions or len(set(actions)) != len(actions) or len(actions) < 2:
                raise ValueError(f"{name} must be at least two different actions, the neutral {action:g} among them")
        return self

    def actions(self, phase: str) -> tuple[float, ...]:
        """The actions of "heads" or "risk"."""
        return self.weights if phase == "heads" else self.thresholds

    def at_rest(self, phase: str) -> int:
        """Index of the neutral action."""
        return self.actions(phase).index(1.0 if phase == "heads" else 0.0)


class Settings(Actions):
    """How both tables are learnt.

    Attributes:
        budget: entries for each layer and KV head.
        lengths: tokens of the contexts, taken in turn.
        pool: contexts that are measured, of which `contexts` are taken evenly over the bins of risk.
        samples: joint actions on the heads in each context.
        risk_samples: joint actions on the thresholds in each context.
        continuation: tokens whose likelihood makes the reward (eq. 3).
        weights: actions on a head; holds the neutral 1.
        thresholds: actions on a layer's threshold; holds the neutral 0. Scores are relative to the layer's largest,
            that of an attention sink. On the default model the 128th of 400 to 800 tokens reaches 0.001 to 0.02 of it,
            by layer, so that the default set reaches from everything to about half of a budget of 128. (The paper
            bounds its thresholds too, for utilities on another scale.)
        neutral: propensity of the neutral action; unless given, all actions have the same.
        alpha: weight of the conservative penalty (eq. 4).
        penalty: lambda, nats for a deviation from the budget by one whole budget (eq. 2, 14); 0 for the heads.
        bins: of entropy and of perplexity.
        entropy: range of the entropy bins in nats, linear.
        perplexity: range of the perplexity bins, logarithmic.
        window, utility_window, kernel: the policy's.
        seed: for windows, the choice of contexts, and actions.
    """

    called: ClassVar[str] = "setting"

    budget: Annotated[int, Field(ge=1)] = 128
    lengths: Annotated[tuple[Annotated[int, Field(ge=2)], ...], Field(min_length=1)] = (350, 700, 1050)
    pool: Annotated[int, Field(ge=1)] = 64
    contexts: Annotated[int, Field(ge=1)] = 40
    samples: Annotated[int, Field(ge=0)] = 48
    risk_samples: Annotated[int, Field(ge=0)] = 24
    continuation: Annotated[int, Field(ge=1)] = 64
    weights: tuple[Annotated[FiniteFloat, Field(ge=0)], ...] = (0.25, 0.5, 1.0, 2.0)
    thresholds: tuple[Annotated[FiniteFloat, Field(ge=0, le=1)], ...] = (0.0, 0.0025, 0.005, 0.01, 0.02)
    neutral: Annotated[float, Field(gt=0, lt=1)] | None = None
    alpha: Annotated[FiniteFloat, Field(ge=0)] = 1.0
    penalty: Annotated[FiniteFloat, Field(ge=0)] = 0.002
    bins: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = (20, 4)
    entropy: tuple[FiniteFloat, FiniteFloat] = (2.0, 10.0)
    perplexity: tuple[Annotated[FiniteFloat, Field(gt=0)], FiniteFloat] = (1.0, 100.0)
    window: Annotated[int, Field(ge=1)] = 64
    utility_window: Annotated[int, Field(ge=1)] = 32
    kernel: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if min(self.lengths) <= self.budget:
            shortest = min(self.lengths)
            raise ValueError(f"a context of {shortest} tokens fits the budget of {self.budget}: nothing to learn")
        if self.contexts > self.pool:
            raise ValueError(f"{self.contexts} contexts cannot be taken from a pool of {self.pool}")
        if not self.samples and not self.risk_samples:
            raise ValueError("neither heads nor thresholds get a sample; raise samples or risk_samples")
        return self

    def propensities(self, phase: str) -> list[float]:
        """The behaviour policy's probability of each action of "heads" or "risk"."""
        actions, neutral = self.actions(phase), self.at_rest(phase)
        if self.neutral is None:
            return [1 / len(actions)] * len(actions)
        rest = (1 - self.neutral) / (len(actions) - 1)
        return [self.neutral if i == neutral else rest for i in range(len(actions))]
