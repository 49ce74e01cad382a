"""Adapters to engines and caches. Each imports its peer only when it is imported itself."""
