"""Attention over packed rows that keeps sequences apart, on every device, forward and gradient."""

from trainer_adapter.attention.varlen import (
    attention_backend,
    register_with_transformers,
    transformers_inputs,
    varlen_attention,
)

__all__ = [
    "attention_backend",
    "register_with_transformers",
    "transformers_inputs",
    "varlen_attention",
]
