"""Mutation tests of the sources: see __main__.py."""
