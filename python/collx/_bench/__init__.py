"""The benchmark, `python -m collx bench`: cases, implementations, timing and reports."""
