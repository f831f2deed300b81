"""padtrace: record, replay and check the padding decisions of an SGLang server."""

__version__ = "0.1.0"
