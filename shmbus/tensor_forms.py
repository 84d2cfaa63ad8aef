"""How tensors lie in their memory, many of them in one call, by DLPack's table of C functions.

`shmbus` knows no tensors. Who does gives the table, as torch has it on its type.
"""

from __future__ import annotations

from shmbus_ext._core import have_forms, tensor_forms

__all__ = ["have_forms", "tensor_forms"]
