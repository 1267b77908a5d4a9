"""The policies of an engine, loaded together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError
from .registry import load_policy

HOOKS = {
    "policy": "order",
    "budget_policy": "budget",
    "preemption_policy": "victims",
    "eviction_policy": "key",
    "admission_policy": "admit",
}
"""What each kind of policy must be able to do, by the name of its engine option."""

_REQUIRED = ("policy", "eviction_policy")


@dataclass(frozen=True, slots=True)
class PolicySet:
    """One policy of each kind; ``None`` where the engine does without."""

    policy: Any
    budget_policy: Any
    preemption_policy: Any
    eviction_policy: Any
    admission_policy: Any

    @classmethod
    def load(cls, specs: Mapping[str, Any], given: PolicySet | None = None) -> PolicySet:
        """Load what ``specs`` describes; kinds it does not name stay as in ``given``.

        May import; not for the loop thread.

        Raises:
            PolicyError: see ``load_policy``.
            ConfigError: an engine cannot do without this kind.
        """
        loaded = {} if given is None else {kind: getattr(given, kind) for kind in HOOKS}
        for kind, spec in specs.items():
            if spec is None and kind in _REQUIRED:
                raise ConfigError(f"{kind}=None: the engine needs one; name a policy")
            loaded[kind] = None if spec is None else load_policy(spec, HOOKS[kind])
        return cls(**loaded)

    def members(self) -> Iterator[Any]:
        """Every policy once, with those it wraps."""
        seen: set[int] = set()
        found = [getattr(self, kind) for kind in HOOKS]
        while found:
            policy = found.pop(0)
            if policy is None or id(policy) in seen:
                continue
            seen.add(id(policy))
            yield policy
            found.extend(getattr(policy, "parts", ()))

    def hook(self, name: str, *kinds: str) -> Any:
        """The first of ``kinds`` that has a method ``name``, as a bound method, or ``None``."""
        for kind in kinds:
            function = getattr(getattr(self, kind), name, None)
            if function is not None:
                return function
        return None
