"""Building a transformers module with its weights, quietly and without its silent fallbacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from ...errors import UnsupportedModelError, WeightsError
from .base import Weights
from .paged_interface import INTERFACE


def _transformers() -> Any:
    # Imported when the first such model is loaded. Its annotations are too patchy to check against.
    return import_module("transformers")


def load_config(weights: Weights) -> Any:
    """The ``PretrainedConfig`` of a checkpoint.

    Raises:
        UnsupportedModelError: this version of transformers does not know the model type, or finds
            the configuration invalid.
    """
    options = dict(weights.config)
    kind = options.pop("model_type", None)
    try:
        return _transformers().AutoConfig.for_model(kind, **options)
    except Exception as error:
        raise UnsupportedModelError(f"{weights.name}: transformers cannot run model type {kind!r}: {error}") from error


def load_module(weights: Weights, config: Any, *, dummy: bool) -> Any:
    """A causal model in evaluation mode whose attention layers call the paged interface.

    Raises:
        UnsupportedModelError: there is no causal model of this type, or it has an attention of its own.
        WeightsError: weights are missing, unreadable or of the wrong shape.
    """
    options: dict[str, Any] = {"dtype": weights.dtype, "attn_implementation": INTERFACE}
    try:
        module = _random(config, options) if dummy else _from_folder(weights, config, options)
    except WeightsError:
        raise
    except ValueError as error:
        raise UnsupportedModelError(f"{weights.name}: {error}") from error
    except Exception as error:
        raise WeightsError(f"{weights.name}: transformers could not load the weights: {error}") from error
    return module.eval().requires_grad_(False)


def _random(config: Any, options: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=()):  # the application's own random numbers stay as they were
        torch.manual_seed(0)
        return _transformers().AutoModelForCausalLM.from_config(config, **options)


def _from_folder(weights: Weights, config: Any, options: dict[str, Any]) -> Any:
    with _quiet():
        module, report = _transformers().AutoModelForCausalLM.from_pretrained(
            weights.hf_folder, config=config, local_files_only=True, output_loading_info=True, **options
        )
    # transformers fills missing parameters with random numbers and only logs it.
    for problem in ("missing_keys", "mismatched_keys"):
        if report.get(problem):
            names = ", ".join(sorted(str(name) for name in report[problem])[:5])
            raise WeightsError(f"{weights.name}: {problem.replace('_', ' ')} in the weights: {names}")
    return module


@contextmanager
def _quiet() -> Iterator[None]:
    logging = _transformers().utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
