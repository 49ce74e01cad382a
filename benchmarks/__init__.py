"""Microbenchmarks of hidden_cache: `python -m benchmarks --help`."""
