"""C core of shmbus. LAYOUT.md documents its bytes, _core.pyi its types."""

from importlib import import_module

try:
    import_module("shmbus_ext._core")
except ModuleNotFoundError as error:
    # Only for the core itself: the name of a missing dependency says more.
    if error.name != "shmbus_ext._core":
        raise
    raise ImportError(
        f"shmbus_ext: expected a compiled _core for this Python in {__path__[0]}, found none; "
        "where that is the source tree, run Python from another directory, in which it finds the "
        "installed package, or compile here: python setup.py build_ext --inplace"
    ) from None
except ImportError as error:
    if error.path is None:  # the file loads; its initialisation gives the reason
        raise
    raise ImportError(
        f"shmbus_ext: expected a _core for this system's C library, got one that does not load "
        f"({error}); wheels are of glibc: elsewhere compile it, by pip install --no-binary=shmbus "
        "shmbus"
    ) from error
