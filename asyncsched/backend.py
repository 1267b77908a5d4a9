"""How the engine finds a compute plane: entry-point group ``asyncsched.backends``.

A backend is a function ``load(config) -> Backend``, run in a worker thread. One that needs a device
may carry a function ``available() -> bool`` as an attribute, which ``device="auto"`` asks. The core
never imports a backend by name, so that ``import asyncsched`` stays free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from .contract import Executor
from .errors import ConfigError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .config import EngineConfig

GROUP = "asyncsched.backends"
PREFERRED, FALLBACK = ("cuda",), "cpu"


@dataclass(frozen=True, slots=True)
class Backend:
    """A loaded model: where it runs and how it reads text.

    Attributes:
        executor: Built, not started.
        tokenizer: ``None`` for models without one: token ids in, token ids out.
        model_name: For logs and results.
    """

    executor: Executor
    tokenizer: Tokenizer | None
    model_name: str


def load_backend(config: EngineConfig) -> Backend:
    """Load the model of ``config`` on ``config.device``. Worker thread only; may take seconds.

    Raises:
        ConfigError: no such device backend is installed.
        ModelError: the model cannot be found, read or run.
    """
    installed = {point.name: point for point in entry_points(group=GROUP)}
    name = config.device.partition(":")[0]
    if name == "auto":
        name = next((name for name in PREFERRED if name in installed and _available(installed[name])), FALLBACK)
    point = installed.get(name)
    if point is None:
        known = ", ".join(sorted(installed)) or "none"
        raise ConfigError(f"no backend for device={config.device!r}; installed: {known}")
    backend = point.load()(config)
    assert isinstance(backend, Backend)
    return backend


def _available(point: EntryPoint) -> bool:
    available = getattr(point.load(), "available", None)
    return available is None or bool(available())
