"""Many sequences of random lengths at once, and the same through another engine on the same card."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import anyio
import numpy as np

import asyncsched

from .lab import QWEN_06B, QWEN_14B, Lab
from .peer import continuous_batching
from .records import Record
from .streams import Tokens, random_prompts, stream_all

TARGET = 2.0
"""Output tokens per second over the other engine's."""
_MODELS = (QWEN_06B, QWEN_14B)
_WARM_UP = 4  # tokens
_PREPARING, _SHORTEST = 30.0, 10.0  # seconds that the other engine needs for its model and graphs, and to say anything


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences that are submitted at once.

    Attributes:
        prompts: Token ids.
        outputs: Tokens to generate for each.
    """

    prompts: list[Tokens]
    outputs: list[int]

    @classmethod
    def draw(cls, sequences: int, least: int, most: int, vocabulary: int) -> Load:
        """Lengths, in and out, and tokens, uniform and always the same."""
        rng = np.random.default_rng(0)
        lengths = rng.integers(least, most + 1, (2, sequences)).tolist()
        prompts: list[Tokens] = [rng.integers(0, vocabulary, length).tolist() for length in lengths[0]]
        return cls(prompts, lengths[1])


def run(lab: Lab) -> None:
    """Both models through asyncsched, then both through transformers: should that fail, the former is known already."""
    sizes = lab.sizes
    loads, rates = {}, {}
    for model in _MODELS:
        vocabulary = lab.configs[model]["vocab_size"]
        loads[model] = load = Load.draw(sizes.serving_sequences, sizes.serving_least, sizes.serving_most, vocabulary)
        seconds = serve(lab, model, load)
        rates[model] = rate = sum(load.outputs) / seconds
        details = {"seconds": seconds, "output_tokens": sum(load.outputs), "prompt_tokens": sum(map(len, load.prompts))}
        lab.emit(Record("serving", f"{model}, {len(load.prompts)} sequences, output tokens/s", rate, details=details))
    lab.release()
    for model in _MODELS:
        figure = f"{model}, {len(loads[model].prompts)} sequences, output tokens/s ÷ transformers' generate_batch"
        measured, details = against_peer(lab, model, loads[model], rates[model])
        lab.emit(Record("serving", figure, measured, TARGET, details=details))
        lab.release()


def serve(lab: Lab, model: str, load: Load) -> float:
    """Seconds from the submission of all sequences until the last has been read."""
    loaded, sizes = lab.model(model), lab.sizes
    warm_up = random_prompts(sizes.max_rows, sizes.serving_least, loaded.reusable.limits.vocab_size, seed=1)

    async def main() -> float:
        async with asyncsched.Engine(config=loaded.config, backend=loaded.backend()) as engine:
            await stream_all(engine, warm_up, [_WARM_UP] * len(warm_up))
            started = time.monotonic()
            await stream_all(engine, load.prompts, load.outputs)
            return time.monotonic() - started

    return anyio.run(main)


def against_peer(lab: Lab, model: str, load: Load, rate: float) -> tuple[float | None, dict[str, Any]]:
    """How many times the other engine's rate ours is, ``None`` if it does not run; and what is known of it."""
    longest = min(lab.sizes.peer_seconds, lab.time_left() - _PREPARING)
    if longest < _SHORTEST:
        return None, {"transformers": "not run: there was no time left for it"}
    try:
        peer = continuous_batching(
            lab.folder_of(model), load.prompts, load.outputs, lab.device.torch_device, lab.sizes.dtype, longest
        )
    except Exception as error:  # it is not ours to mend
        return None, {"transformers": f"does not run here: {type(error).__name__}: {error}"}
    return rate / peer.rate, {"transformers": asdict(peer) | {"output_tokens_per_s": peer.rate}}
