"""How the engine finds a compute plane: entry-point group ``asyncsched.backends``.

A backend is a function ``load(config) -> Backend``, run in a worker thread. The core never imports
one by name, so that ``import asyncsched`` stays free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from .contract import Executor
from .errors import ConfigError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .config import EngineConfig

GROUP = "asyncsched.backends"


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
    name = "cpu" if config.device == "auto" and "cuda" not in installed else config.device
    point = installed.get(name)
    if point is None:
        known = ", ".join(sorted(installed)) or "none"
        raise ConfigError(f"no backend for device={config.device!r}; installed: {known}")
    backend = point.load()(config)
    assert isinstance(backend, Backend)
    return backend
