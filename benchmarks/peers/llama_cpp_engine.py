"""llama.cpp through its C interface: all requests of a call in one batch per step, as its own server runs them.

Usage: PEERS/llama-cpp/bin/python -m benchmarks.peers.llama_cpp_engine --model FILE [--workload NAME ...] [--repeat N]

Every request is a sequence of its own. llama.cpp finds no shared prefixes by itself: a prefix that all
prompts of a call share is computed once here and copied, as its ``llama-batched-bench`` does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from .report import run

ROWS = 64
LENGTH = 2048  # tokens per request
BATCH = 2048  # most tokens per call; llama.cpp's default

Entry = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


def common_prefix(prompts: list[list[int]]) -> int:
    """How many first tokens all prompts share."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))


class LlamaCpp:
    """A model with a cache for 64 sequences."""

    def __init__(self, model: str) -> None:
        import llama_cpp  # type: ignore[import-not-found]  # another environment's

        self._lib = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)  # else it logs every tensor
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not loaded:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx, params.n_batch = ROWS, ROWS * LENGTH, BATCH
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(loaded, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot allocate its cache")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def generate(self, prompts: list[list[int]], output: int) -> list[int]:
        """Compute the prompts, then one token per request and step."""
        self.forget()
        shared = min(common_prefix(prompts), min(map(len, prompts)) - 1) if len(prompts) > 1 else 0
        if shared:
            self._decode([(token, position, 0, False) for position, token in enumerate(prompts[0][:shared])])
            for row in range(1, len(prompts)):
                self._lib.llama_memory_seq_cp(self._memory, 0, row, -1, -1)
        tokens = self._decode(
            [
                (prompt[position], position, row, position == len(prompt) - 1)
                for row, prompt in enumerate(prompts)
                for position in range(shared, len(prompt))
            ]
        )
        answers = [[token] for token in tokens]
        for step in range(output - 1):
            tokens = self._decode(
                [
                    (token, len(prompt) + step, row, True)
                    for row, (token, prompt) in enumerate(zip(tokens, prompts, strict=True))
                ]
            )
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
        return [len(answer) for answer in answers]

    def forget(self) -> None:
        """Empty the cache."""
        self._lib.llama_memory_clear(self._memory, True)

    def _decode(self, entries: Sequence[Entry]) -> list[int]:
        """Run tokens through the model; the likeliest next token wherever logits are wanted, in order."""
        tokens: list[int] = []
        for first in range(0, len(entries), BATCH):
            chunk, batch = entries[first : first + BATCH], self._batch
            batch.n_tokens = len(chunk)
            for index, (token, position, row, wanted) in enumerate(chunk):
                batch.token[index], batch.pos[index] = token, position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
                batch.logits[index] = wanted
            if status := self._lib.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode failed with status {status}")
            if rows := sum(wanted for *_, wanted in chunk):
                logits = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), (rows, self._vocabulary))
                tokens += logits.argmax(-1).tolist()
        return tokens


if __name__ == "__main__":
    run("llama.cpp", LlamaCpp, __doc__)
