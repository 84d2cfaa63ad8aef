"""The version, below every importing module."""

VERSION = "0.1.0"
