"""The version, below everything else that needs it."""

VERSION = "0.1.0"
