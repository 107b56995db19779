"""Helpers that everything else stands on: trees, checks, tables, types."""
