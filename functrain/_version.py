"""The version, also in pyproject.toml and bridge; a test holds them together."""

__version__ = "0.5.0.dev0"
