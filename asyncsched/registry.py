"""Finding policies: by name through entry points, by dotted path, by options, or as an instance."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from .errors import PolicyLoadError, PolicyNotFoundError
from .policy import API_VERSION

GROUP = "asyncsched.policies"


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """An installed policy, as its distribution declares it (nothing is imported).

    Attributes:
        name: What users type.
        value: ``module:Class``.
        distribution: Name of the distribution it comes from.
        version: That distribution's version.
    """

    name: str
    value: str
    distribution: str
    version: str


def installed_policies() -> list[PolicyInfo]:
    """Every installed policy, by name."""
    return sorted((_info(point) for point in entry_points(group=GROUP)), key=lambda info: (info.name, info.distribution))


def load_factory(name: str) -> Any:
    """The class behind a policy's name or dotted path, not called yet.

    Raises:
        PolicyNotFoundError, PolicyLoadError: as ``load_policy``.
    """
    return _find(name)[0]


def load_policy(spec: Any, hook: str) -> Any:
    """Make a policy from a name, ``"package.module:Class"``, ``{"name": …, option: …}``, or an instance.

    Args:
        spec: The description.
        hook: The method such a policy must have: ``order``, ``key`` or ``admit``.

    Raises:
        PolicyNotFoundError: no such name; the text lists the known ones.
        PolicyLoadError: import or construction failed, the options do not fit, two distributions
            claim the name, it was written for another version of the hooks, or it lacks ``hook``.
    """
    options: dict[str, Any] = {}
    if isinstance(spec, Mapping):
        options = dict(spec)
        spec = options.pop("name", None)
        if spec is None:
            raise PolicyLoadError('a policy given as a mapping needs a "name"')
    if isinstance(spec, str):
        factory, origin = _find(spec)
    elif isinstance(spec, type):
        factory, origin = spec, f"{spec.__module__}:{spec.__qualname__}"
    else:
        if options:
            raise PolicyLoadError("options need a policy's name or class; an instance has its own already")
        factory, origin = None, f"an instance of {type(spec).__module__}:{type(spec).__qualname__}"
    try:
        policy = spec if factory is None else factory(**options)
    except Exception as exc:
        raise PolicyLoadError(f"policy {spec!r} ({origin}) could not be made with options {options}: {exc}") from exc
    if not callable(getattr(policy, hook, None)):
        raise PolicyLoadError(f"policy {spec!r} ({origin}) has no method {hook}(), which is needed here")
    version = getattr(policy, "api_version", API_VERSION)
    if not isinstance(version, int):
        raise PolicyLoadError(f"policy {spec!r} ({origin}) has api_version {version!r}, which is not a number")
    if version != API_VERSION:
        side = "the policy is newer: upgrade asyncsched-llm" if version > API_VERSION else "upgrade the policy's distribution"
        raise PolicyLoadError(f"policy {spec!r} ({origin}) has api_version {version}, this engine {API_VERSION}; {side}")
    return policy


def _find(name: str) -> tuple[Any, str]:
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute), name
        except Exception as exc:
            raise PolicyLoadError(f"policy {name!r} could not be imported: {exc}") from exc
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points:
        known = sorted({point.name for point in entry_points(group=GROUP)})
        hint = get_close_matches(name, known, 1)
        raise PolicyNotFoundError(
            f"no policy named {name!r}" + (f"; did you mean {hint[0]!r}?" if hint else "") + f" (installed: {', '.join(known)})"
        )
    infos = [_info(point) for point in points]
    if len({(info.value, info.distribution) for info in infos}) > 1:
        claims = " and ".join(f"{info.distribution} {info.version} ({info.value})" for info in infos)
        raise PolicyLoadError(
            f"policy name {name!r} is claimed by {claims}; uninstall one, or name the class by its dotted path"
        )
    origin = f"{infos[0].value}, from {infos[0].distribution} {infos[0].version}"
    try:
        return points[0].load(), origin
    except Exception as exc:
        raise PolicyLoadError(f"policy {name!r} ({origin}) could not be imported: {exc}") from exc


def _info(point: EntryPoint) -> PolicyInfo:
    dist = point.dist
    return PolicyInfo(point.name, point.value, dist.name if dist else "?", dist.version if dist else "?")
