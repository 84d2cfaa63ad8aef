"""Attention over packed rows: each sequence by itself, on every device, forward and gradient."""

from trainer_adapter.attention.dispatch import attention_backend
from trainer_adapter.attention.prefixes import prefix_attention
from trainer_adapter.attention.transformers import register_with_transformers, transformers_inputs
from trainer_adapter.attention.varlen import varlen_attention

__all__ = [
    "attention_backend",
    "prefix_attention",
    "register_with_transformers",
    "transformers_inputs",
    "varlen_attention",
]
