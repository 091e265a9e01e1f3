"""Differences are paired by their index, in which no entry occurs twice."""

import pandas
from support.refusals import refusal

from kvlab.analyses.findings import Findings


def test_a_document_measured_at_two_budgets_is_no_pair():
    errors = pandas.Series([0.1, 0.2, 0.3, 0.5], index=pandas.Index(["a", "b", "a", "b"], name="document"))
    findings = Findings(pandas.DataFrame())
    assert "'a' is measured twice" in refusal(findings.add_difference, "saved", errors, errors / 2)
    findings.add_difference("saved", errors[:2], errors[:2] / 2)
    assert abs(findings.metrics["saved"] - 0.075) < 1e-12
