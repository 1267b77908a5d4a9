"""Cost of the prefix tree alone: matching, inserting and evicting prompts of 1,024 tokens, half of them shared.

Usage: python -m benchmarks.prefix_tree [--prompts 2000] [--json]

Each prompt is matched, and what is not cached of it inserted; then the prompts' own halves are evicted
in the default order, one at a time. Printed are the medians, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

from asyncsched.radix import RadixTree

PAGE, SHARED, OWN = 16, 512, 512


def measure(prompts: int) -> dict[str, Any]:
    """Median microseconds of each operation."""
    rng = np.random.default_rng(0)
    tree = RadixTree(PAGE, lambda node: (node.last_used, -node.depth))
    shared = rng.integers(0, 50_000, SHARED).astype(np.int32)
    pages = np.arange((SHARED + OWN) // PAGE, dtype=np.int32)
    matching, inserting, evicting = [], [], []
    for step in range(prompts):
        tokens = np.concatenate([shared, rng.integers(0, 50_000, OWN).astype(np.int32)]).tobytes()
        started = time.perf_counter()
        node, found = tree.match("", tokens, step)
        matched = time.perf_counter()
        tree.extend(node, tokens[len(found) * PAGE * 4 :], pages[len(found) :], step)
        inserted = time.perf_counter()
        matching.append(matched - started)
        inserting.append(inserted - matched)
    for _ in range(prompts - 1):
        started = time.perf_counter()
        tree.evict(OWN // PAGE)
        evicting.append(time.perf_counter() - started)
    return {
        "engine": "asyncsched",
        "prefix_tree": "1024 tokens, half shared",
        "match_us": round(statistics.median(matching) * 1e6, 2),
        "insert_us": round(statistics.median(inserting) * 1e6, 2),
        "evict_us": round(statistics.median(evicting) * 1e6, 2),
    }


def main() -> None:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    record = measure(options.prompts)
    line = "prefix tree: match {match_us} µs, insert {insert_us} µs, evict {evict_us} µs"
    print(json.dumps(record) if options.json else line.format(**record))


if __name__ == "__main__":
    main()
