"""The methods that kvlab and kvpress both have: how each side is asked for one, and why their retained sets differ.

The reasons come from the sources of both (kvpress 0.5.5). peers.py shows them next to its measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kvlab
from kvlab.errors import KvlabError, nearest
from kvlab.methods import Policy

WINDOW, KERNEL = 64, 5
"""kvpress's defaults around SnapKV's scores; kvlab's are 32 and 7."""


@dataclass(frozen=True)
class Cut:
    """Facts about a prompt and a press, for a policy that does as the press does.

    Attributes:
        length: tokens of the prompt.
        entries: how many each head of the press kept on average.
        even: whether all layers kept equally many.
        group: how many query heads share a KV head.
    """

    length: int
    entries: int
    even: bool
    group: int


@dataclass(frozen=True)
class Method:
    """One method on both sides.

    Attributes:
        policy, plain: kvlab's name, and its parameters without the budget, as people call it.
        press, around, parameters: kvpress's class, the scorer inside it, and its parameters without the ratio.
        alike: kvlab's policy that does as kvpress does, as far as parameters go; None where none can.
        alike_parameters: kvpress's parameters for that.
        why: the differences between the two as they come.
        rest: the differences that are left when they are made alike.
    """

    policy: str
    press: str
    why: str
    rest: str = ""
    around: str | None = None
    plain: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    alike: Callable[[Cut], Policy] | None = None
    alike_parameters: dict[str, Any] | None = None

    def as_it_comes(self, keep: float) -> Policy:
        if self.policy == "think":
            return kvlab.policy("think", ratio=1 - keep)
        return kvlab.policy(self.policy, budget=keep, **self.plain)

    def told(self, keep: float, alike: bool = False) -> dict[str, Any]:
        """Describe the press for the peer's process."""
        given = self.alike_parameters if alike and self.alike_parameters is not None else self.parameters
        return {"press": self.press, "around": self.around, "ratio": 1 - keep, "parameters": given}


def same(name: str, **parameters: Any) -> Callable[[Cut], Policy]:
    """kvlab's policy with as many entries as the press kept."""
    return lambda cut: kvlab.policy(name, budget=cut.entries, **parameters)


def snapkv(cut: Cut) -> Policy:
    return kvlab.policy("snapkv", budget=cut.entries, window=WINDOW, kernel=KERNEL)


def pyramidkv(cut: Cut) -> Policy:
    return kvlab.policy("pyramidkv", budget=cut.entries, window=WINDOW, kernel=KERNEL, beta=1 if cut.even else 20)


def criticalkv(cut: Cut) -> Policy:
    # kvlab sums the scores that kvpress averages over the window and the group.
    epsilon = 1e-4 * WINDOW * cut.group
    return kvlab.policy("criticalkv", budget=cut.entries, scorer=snapkv(cut), epsilon=epsilon)


def adakv(cut: Cut) -> Policy:
    # kvpress counts the window into the share that each head is sure of, kvlab does not.
    free = max(int(0.2 * cut.entries) - WINDOW, 0)
    floor = (free + 0.5) / (cut.entries - WINDOW) if free else 0.0
    return kvlab.policy("adakv", budget=cut.entries, scorer=snapkv(cut), floor=floor)


def chunkkv(cut: Cut) -> Policy:
    return kvlab.policy("chunkkv", budget=cut.entries, scorer=snapkv(cut))


RATIO = "the ratio"
WINDOWS = f"window {WINDOW} against 32, pooling {KERNEL} against 7"
METHODS = {
    "streamingllm": Method("streamingllm", "StreamingLLMPress", RATIO, alike=same("streamingllm")),
    "knorm": Method("knorm", "KnormPress", RATIO, rest="rounding, where one token stands twice", alike=same("knorm")),
    "keydiff": Method("keydiff", "KeyDiffPress", RATIO, alike=same("keydiff")),
    "keydiff-blocks": Method(
        "keydiff",
        "BlockPress",
        RATIO,
        around="KeyDiffPress",
        plain={"block": 128},
        alike=same("keydiff", block=128),
    ),
    "tova": Method(
        "tova", "TOVAPress", "the ratio; kvpress forces the last token, which stays anyway", alike=same("tova")
    ),
    "expected_attention": Method(
        "expected_attention", "ExpectedAttentionPress", RATIO, alike=same("expected_attention")
    ),
    "snapkv": Method("snapkv", "SnapKVPress", f"the ratio; {WINDOWS}", alike=snapkv),
    "pyramidkv": Method(
        "pyramidkv",
        "PyramidKVPress",
        f"{WINDOWS}; where the last layer would get less than a window, kvpress gives all layers the same. Else it "
        "adds no window to a layer's share, and its pyramid is flatter",
        rest="the pyramids where kvpress builds one (elsewhere kvlab has beta=1)",
        alike=pyramidkv,
    ),
    "lagkv": Method(
        "lagkv",
        "LagKVPress",
        "the ratio; scores are ranks within partitions, which tie across them: kvlab takes the earlier, kvpress any. "
        "Sinks and the latest tokens tie, too: where they alone exceed the budget kvpress drops any of them, the sinks "
        "included",
        rest="the ties",
        alike=same("lagkv"),
    ),
    "h2o": Method(
        "h2o",
        "ObservedAttentionPress",
        "kvlab: attention summed, half of the budget for the latest tokens (H2O); kvpress: averaged over the queries "
        "that see a token, nothing forced",
        rest="these two rules",
        alike=same("h2o"),
    ),
    "criticalkv": Method(
        "criticalkv",
        "CriticalKVPress",
        f"the ratio; {WINDOWS}; epsilon is added to mean scores (kvpress) or to summed ones (kvlab)",
        around="SnapKVPress",
        alike=criticalkv,
    ),
    "adakv": Method(
        "adakv",
        "AdaKVPress",
        f"the ratio; {WINDOWS}; the entries that each head is sure of include the window (kvpress) or not (kvlab)",
        around="SnapKVPress",
        alike=adakv,
    ),
    "chunkkv": Method(
        "chunkkv",
        "ChunkKVPress",
        f"{WINDOWS}; kvpress keeps whole chunks alone and spends up to a chunk less, kvlab fills up the last one",
        rest="the chunk that the window cuts",
        around="SnapKVPress",
        alike=chunkkv,
    ),
    "kvzip": Method(
        "kvzip",
        "KVzipPress",
        "another sentence asks for the repetition; kvpress drops the chat prefix after the sinks, kvlab "
        "repeats it, too",
        rest="the same",
        alike=same("kvzip", chunk=2048),
    ),
    "leverage": Method(
        "leverage",
        "LeverageScorePress",
        "the ratio; the sketch is drawn at random, in kvlab with a seed",
        rest="a sketch as wide as the key, so that its draw matters through the ridge of 0.01 alone",
        alike=same("leverage", sketch=64),
        alike_parameters={"sketch_dimension": 64},
    ),
    "random": Method("random", "RandomPress", "the draw"),
    "think": Method("think", "ThinKPress", "(channels that go) kvpress prunes the window's keys, too, kvlab does not"),
}
TWELVE = [name for name in METHODS if name not in ("keydiff-blocks", "kvzip", "leverage", "random", "think")]
"""Those whose times are taken."""
LEFT_OUT = {
    "duoattention": "kvpress fetches its heads' patterns, or texts to find them by, from the network",
}


def chosen(names: str) -> dict[str, Method]:
    """The methods of a list with commas, or "all"."""
    if names == "all":
        return dict(METHODS)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise KvlabError(f"name at least one method of: {', '.join(METHODS)}")
    for name in wanted:
        if name in LEFT_OUT:
            raise KvlabError(f"{name} is left out: {LEFT_OUT[name]}")
        if name not in METHODS:
            raise KvlabError(nearest(name, METHODS, "method that both have"))
    return {name: METHODS[name] for name in wanted}
