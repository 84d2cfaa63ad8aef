"""The version, below everything else that needs it."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
