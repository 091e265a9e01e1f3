"""Which policies take part in a comparison."""

from __future__ import annotations

import pytest

from kvlab.analyses.tasks.contenders import LEFT_OUT, named
from kvlab.errors import KvlabError
from kvlab.methods import policies


def test_sets_and_names_stand_for_policies_each_once():
    assert named(["all"]) == policies()
    quick = named()
    assert not set(quick) & set(LEFT_OUT) and set(quick) | set(LEFT_OUT) == set(policies())
    cheap = ("knorm", "keydiff", "lagkv", "tova", "rkv", "adakv", "chunkkv", "expected_attention")
    assert set(cheap) <= set(quick) and "kvzip" not in quick
    assert named(["snapkv", "kvzip", "snapkv"]) == ["snapkv", "kvzip"]
    assert named(["quick", "kvzip"]) == [*quick, "kvzip"]
    with pytest.raises(KvlabError, match="did you mean 'snapkv'"):
        named(["snapkw"])
