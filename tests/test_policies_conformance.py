"""Every bundled policy keeps the rules that the conformance kit knows."""

from __future__ import annotations

from typing import Any

import pytest

from asyncsched.registry import PolicyInfo, installed_policies
from asyncsched.testing import check_policy

BUNDLED = [info for info in installed_policies() if info.distribution == "asyncsched-llm"]

NEEDED: dict[str, dict[str, Any]] = {"queue-bounds": {"requests": 30}, "token-bounds": {"tokens": 2000}}
"""Options of the policies that do nothing without any."""


@pytest.mark.parametrize("info", [pytest.param(info, id=info.name) for info in BUNDLED])
def test_a_bundled_policy_conforms(info: PolicyInfo) -> None:
    report = check_policy({"name": info.name, **NEEDED.get(info.name, {})}, cost=False)
    assert report.policy == info.value


def test_the_defaults_are_among_them() -> None:
    assert {"fcfs", "lru"} <= {info.name for info in BUNDLED}
    assert all(info.value.startswith("asyncsched.policies.") for info in BUNDLED)
