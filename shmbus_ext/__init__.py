"""The C core of shmbus. Its byte layout is in LAYOUT.md, its types are in _core.pyi."""

from importlib import import_module

try:
    import_module("shmbus_ext._core")
except ModuleNotFoundError as error:
    # Only the core itself: what that fails to import says so best by its own name.
    if error.name != "shmbus_ext._core":
        raise
    raise ImportError(
        f"shmbus_ext: expected a compiled _core for this Python in {__path__[0]}, found none; "
        "where that is the source tree, run Python from another directory, in which it finds the "
        "installed package, or compile here: python setup.py build_ext --inplace"
    ) from None
except ImportError as error:
    if error.path is None:  # it loads, and its initialisation says why not
        raise
    raise ImportError(
        f"shmbus_ext: expected a _core for this system's C library, got one that does not load "
        f"({error}); wheels are of glibc: elsewhere compile it, by pip install --no-binary=shmbus "
        "shmbus"
    ) from error
