"""Parts of bench.py: cases, implementations, timing and reports."""
