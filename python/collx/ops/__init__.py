"""The operators as Python functions, with defaults filled in."""
