"""Finding policies: names, dotted paths, options, instances, and what is said when it goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncsched.engine import Engine
from asyncsched.errors import ConfigError, PolicyError, PolicyLoadError, PolicyNotFoundError
from asyncsched.policies.fcfs import FCFS
from asyncsched.policies.lpm import LPM
from asyncsched.policies.lru import LRU
from asyncsched.policy import API_VERSION, EngineView, RequestView
from asyncsched.registry import installed_policies, load_policy

from .control_helpers import prompt, simulation


class Reversed:
    """Last come, first served."""

    def __init__(self, note: str = "") -> None:
        if note == "bad":
            raise ValueError("this note is bad")
        self.note = note

    def order(self, waiting: Sequence[RequestView], view: EngineView) -> Iterable[RequestView]:
        return list(waiting)[::-1]


class Versioned(Reversed):
    def __init__(self, version: Any) -> None:
        super().__init__()
        self.api_version = version


PATH = f"{Reversed.__module__}:Reversed"


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution that declares policies: ``install("dist", "1.0", name="module:Class")``."""

    def add(distribution: str, version: str, source: str = "", **points: str) -> None:
        site = tmp_path / distribution
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {value}\n" for name, value in points.items()]
        (info / "entry_points.txt").write_text("[asyncsched.policies]\n" + "".join(lines))
        if source:
            module = f"plugin_{distribution.replace('-', '_')}"
            (site / f"{module}.py").write_text(source)
            added.append(module)
        monkeypatch.syspath_prepend(str(site))

    added: list[str] = []
    yield add
    for module in added:
        sys.modules.pop(module, None)


PLUGIN = """
class Plugin:
    api_version = 1

    def __init__(self, size=1):
        self.size = size

    def order(self, waiting, view):
        return waiting
"""


# Ways to name a policy


@pytest.mark.parametrize(("name", "hook", "kind"), [("fcfs", "order", FCFS), ("lpm", "order", LPM), ("lru", "key", LRU)])
def test_bundled_policies_are_found_by_name(name: str, hook: str, kind: type) -> None:
    assert type(load_policy(name, hook)) is kind


def test_bundled_policies_are_declared_like_plugins() -> None:
    found = {info.name: info for info in installed_policies()}
    assert {"fcfs", "lpm", "lru"} <= set(found)
    assert found["lpm"].value == "asyncsched.policies.lpm:LPM"
    assert found["lpm"].distribution == "asyncsched-llm"
    assert found["lpm"].version


def test_by_dotted_path() -> None:
    assert isinstance(load_policy(PATH, "order"), Reversed)


def test_by_mapping_with_options() -> None:
    policy = load_policy({"name": "lpm", "age_steps": 7}, "order")
    assert isinstance(policy, LPM)
    assert policy.age_steps == 7
    options = {"name": PATH, "note": "hello"}
    assert load_policy(options, "order").note == "hello"
    assert options == {"name": PATH, "note": "hello"}, "the caller's mapping is left as it was"


def test_by_class_and_by_instance() -> None:
    assert isinstance(load_policy(Reversed, "order"), Reversed)
    instance = Reversed()
    assert load_policy(instance, "order") is instance


def test_each_name_makes_a_policy_of_its_own() -> None:
    assert load_policy("lpm", "order") is not load_policy("lpm", "order")


def test_a_plugin_is_found_by_its_entry_point(install: Install) -> None:
    install("sched-extra", "2.5", PLUGIN, extra="plugin_sched_extra:Plugin")
    assert load_policy({"name": "extra", "size": 3}, "order").size == 3
    (info,) = [info for info in installed_policies() if info.name == "extra"]
    assert (info.value, info.distribution, info.version) == ("plugin_sched_extra:Plugin", "sched-extra", "2.5")
    assert [info.name for info in installed_policies()] == sorted(info.name for info in installed_policies())


def test_listing_policies_imports_nothing(install: Install) -> None:
    install("sched-broken", "1.0", "raise RuntimeError('imported')", broken="plugin_sched_broken:Plugin")
    assert "broken" in [info.name for info in installed_policies()]
    assert "plugin_sched_broken" not in sys.modules


# What is said when it goes wrong


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PolicyNotFoundError, match=r"no policy named 'cfs'; did you mean 'fcfs'\?.*fcfs, .*lpm, .*lru"):
        load_policy("cfs", "order")


def test_an_unknown_name_without_a_likeness_still_lists_the_known_ones() -> None:
    with pytest.raises(PolicyNotFoundError, match=r"no policy named 'zzzzzz' \(installed: .*lpm") as caught:
        load_policy("zzzzzz", "order")
    assert "did you mean" not in str(caught.value)


def test_options_that_do_not_fit_are_shown() -> None:
    with pytest.raises(PolicyLoadError, match=r"asyncsched.policies.lpm:LPM.*asyncsched-llm.*\{'age': 3\}") as caught:
        load_policy({"name": "lpm", "age": 3}, "order")
    assert isinstance(caught.value.__cause__, TypeError)


def test_options_out_of_range_say_why() -> None:
    with pytest.raises(PolicyLoadError, match="age_steps, refresh_steps and lookups must be at least 1"):
        load_policy({"name": "lpm", "age_steps": 0}, "order")


def test_a_constructor_that_raises_is_the_cause() -> None:
    with pytest.raises(PolicyLoadError, match="this note is bad") as caught:
        load_policy({"name": PATH, "note": "bad"}, "order")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_mapping_needs_a_name() -> None:
    with pytest.raises(PolicyLoadError, match='needs a "name"'):
        load_policy({"age_steps": 3}, "order")


@pytest.mark.parametrize(
    ("spec", "hook", "text"),
    [
        ("lru", "order", r"'lru' .*asyncsched-llm.* has no method order\(\)"),
        ("fcfs", "key", r"has no method key\(\)"),
        ("fcfs", "admit", r"has no method admit\(\)"),
        (object(), "order", r"an instance of builtins:object\) has no method order\(\)"),
        (None, "order", r"has no method order\(\)"),
        (type("Half", (), {"order": 3}), "order", r"has no method order\(\)"),
    ],
)
def test_a_policy_without_the_method_is_refused(spec: Any, hook: str, text: str) -> None:
    with pytest.raises(PolicyLoadError, match=text):
        load_policy(spec, hook)


@pytest.mark.parametrize(
    "path", ["asyncsched.policies.fcfs:Nothing", "asyncsched.no_such_module:FCFS", "no_such_package.at_all:X", ":FCFS", "fcfs:"]
)
def test_a_path_that_leads_nowhere(path: str) -> None:
    with pytest.raises(PolicyLoadError, match="could not be imported"):
        load_policy(path, "order")


@pytest.mark.parametrize("source", ["raise RuntimeError('no licence')", "import no_such_dependency", "def (:"])
def test_a_module_that_cannot_be_imported_is_named_with_its_distribution(install: Install, source: str) -> None:
    install("sched-broken", "1.2", source, broken="plugin_sched_broken:Plugin")
    with pytest.raises(PolicyLoadError, match=r"'broken' \(plugin_sched_broken:Plugin, from sched-broken 1.2\)") as caught:
        load_policy("broken", "order")
    assert caught.value.__cause__ is not None
    with pytest.raises(PolicyLoadError, match="'plugin_sched_broken:Plugin' could not be imported") as caught:
        load_policy("plugin_sched_broken:Plugin", "order")
    assert caught.value.__cause__ is not None


def test_a_policy_of_this_version_or_of_none_is_taken() -> None:
    assert load_policy(Versioned(API_VERSION), "order")
    assert load_policy(Reversed, "order")


def test_a_policy_of_another_version_is_refused() -> None:
    with pytest.raises(
        PolicyLoadError, match=rf"api_version {API_VERSION + 1}, this engine {API_VERSION}; .*upgrade asyncsched-llm"
    ):
        load_policy(Versioned(API_VERSION + 1), "order")
    with pytest.raises(PolicyLoadError, match=r"upgrade the policy's distribution"):
        load_policy(Versioned(API_VERSION - 1), "order")


@pytest.mark.parametrize("version", ["2", None, (1, 0)])
def test_a_version_that_is_no_number_is_refused(version: Any) -> None:
    with pytest.raises(PolicyLoadError, match="api_version"):
        load_policy(Versioned(version), "order")


def test_a_name_claimed_by_two_distributions_is_refused(install: Install) -> None:
    install("sched-one", "1.0", PLUGIN, twin="plugin_sched_one:Plugin")
    install("sched-two", "2.0", PLUGIN, twin="plugin_sched_two:Plugin")
    with pytest.raises(PolicyLoadError) as caught:
        load_policy("twin", "order")
    for part in ("'twin'", "sched-one 1.0 (plugin_sched_one:Plugin)", "sched-two 2.0 (plugin_sched_two:Plugin)", "dotted path"):
        assert part in str(caught.value)
    assert type(load_policy("plugin_sched_two:Plugin", "order")).__module__ == "plugin_sched_two"


def test_a_bundled_name_cannot_be_taken_over_silently(install: Install) -> None:
    install("sched-evil", "1.0", PLUGIN, fcfs="plugin_sched_evil:Plugin")
    with pytest.raises(PolicyLoadError, match="asyncsched-llm"):
        load_policy("fcfs", "order")


# Through the engine


async def test_the_engine_takes_policies_in_every_form() -> None:
    for policy in ("lpm", PATH, {"name": "lpm", "age_steps": 3}, Reversed, Reversed()):
        async with simulation(policy=policy, eviction_policy=LRU, max_rows=1) as sim:
            sim.send(prompt(5, 1))
            sim.send(prompt(5, 2))
            await sim.finish()


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"policy": "nope"}, PolicyNotFoundError),
        ({"policy": "lru"}, PolicyLoadError),
        ({"eviction_policy": "fcfs"}, PolicyLoadError),
        ({"admission_policy": "fcfs"}, PolicyLoadError),
        ({"policy": {"name": "lpm", "age_steps": -1}}, PolicyLoadError),
    ],
)
async def test_an_engine_with_an_impossible_policy_does_not_start(option: dict[str, Any], error: type[PolicyError]) -> None:
    with pytest.raises(error):
        async with simulation(**option):
            pass


async def test_an_engine_that_did_not_start_may_be_started_again(install: Install) -> None:
    engine = Engine(policy="late")
    for _ in range(2):
        with pytest.raises(PolicyNotFoundError):
            await engine.start()


def test_bad_options_of_lpm_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="lpm"):
        LPM(age_steps=0)
    with pytest.raises(ConfigError, match="lpm"):
        LPM(refresh_steps=0)
