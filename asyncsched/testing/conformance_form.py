"""The checks of ``check_policy`` on the class itself: hooks, version, options."""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import fields, is_dataclass
from typing import Any

from ..policy import API_VERSION
from ..policy_set import HOOKS, PolicySet
from ..registry import load_policy

DECIDING = (*HOOKS.values(), "preempt_for", "begin", "on_evict", "on_submit", "on_step", "on_finish")
AWAITED = ("annotate", "run")


def form(policy: Any, kinds: tuple[str, ...]) -> list[str]:
    """Things without which nothing else can be checked."""
    found = []
    if not kinds:
        found.append(f"it has none of the methods {', '.join(HOOKS.values())}, so that it can decide nothing")
    found += [
        f"it has no method {HOOKS[kind]}(), which a {kind} needs"
        for kind in kinds
        if not callable(getattr(policy, HOOKS[kind], None))
    ]
    version = getattr(policy, "api_version", None)
    if version != API_VERSION:
        found.append(f"api_version is {version!r}; add `api_version = {API_VERSION}` to the class once it keeps these rules")
    for member in _members(policy):
        for hook in DECIDING:
            if _is_awaited(getattr(member, hook, None)):
                found.append(f"{hook}() is asynchronous, but planning awaits nothing; make it a plain function")
        for hook in AWAITED:
            function = getattr(member, hook, None)
            if function is not None and not inspect.iscoroutinefunction(function):
                found.append(f"{hook}() is no coroutine function; write it as `async def {hook}`")
    return found


def options(policy: Any, hook: str) -> list[str]:
    """The options survive a round trip through JSON."""
    try:
        values = _option_values(policy)
    except AttributeError as exc:
        return [f"{exc}: keep every option in an attribute of its name, or make the class a dataclass"]
    plain = {name: value for name, value in values.items() if not callable(value) and not _is_policy(value)}
    try:
        text = json.dumps(plain)
    except (TypeError, ValueError) as exc:
        return [f"options {plain!r} cannot be written as JSON ({exc}); use numbers, texts, lists and dictionaries"]
    rest = {name: value for name, value in values.items() if name not in plain}
    try:
        again = load_policy({"name": _address(type(policy)), **json.loads(text), **rest}, hook)
        back = json.dumps({name: _option_values(again)[name] for name in plain})
    except Exception as exc:
        return [f"no policy can be made of its own options {text}: {exc}"]
    return [] if back == text else [f"options {text} made a policy with the options {back}; keep them as they are given"]


def _option_values(policy: Any) -> dict[str, Any]:
    """The fields of a dataclass, or what is kept under the names of the class's parameters."""
    if is_dataclass(policy):
        return {field.name: getattr(policy, field.name) for field in fields(policy) if field.init}
    parameters = inspect.signature(type(policy)).parameters.values()
    named = [option for option in parameters if option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD)]
    return {option.name: getattr(policy, option.name) for option in named}


def _address(policy: type) -> Any:
    """The class's dotted path if it can be imported by it, else the class itself."""
    try:
        found = getattr(importlib.import_module(policy.__module__), policy.__qualname__, None)
    except ImportError:
        found = None
    return f"{policy.__module__}:{policy.__qualname__}" if found is policy else policy


def waiver(policy: Any) -> str | None:
    """Why the policy, or one that it wraps, may starve requests."""
    for member in _members(policy):
        text = getattr(member, "starvation", None)
        if isinstance(text, str) and text.startswith("waived:") and text.removeprefix("waived:").strip():
            return text
    return None


def _members(policy: Any) -> list[Any]:
    return list(PolicySet(policy, None, None, None, None).members())


def _is_policy(value: Any) -> bool:
    return any(callable(getattr(value, hook, None)) for hook in HOOKS.values())


def _is_awaited(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
