"""Benchmarks: each module is a command that prints one JSON line per measurement."""
