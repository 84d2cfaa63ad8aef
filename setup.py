"""Builds the extension module ``shmbus_ext._core``; pyproject.toml holds all further metadata.

Environment switches:

- ``SHMBUS_DEBUG=1``: no optimisation, debug symbols, ``assert`` and the consistency checks on.
- ``SHMBUS_SANITIZE=address,undefined``: the named sanitizers, compiled and linked in.
- ``SHMBUS_FAILPOINTS=1``: points for tests to kill or stop the process (failpoints.h), without
  optimisation.
- ``SHMBUS_WERROR=1``: stricter warnings, each an error.
"""

import ast
import os
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("SHMBUS_DEBUG", "") not in ("", "0")
WERROR = os.environ.get("SHMBUS_WERROR", "") not in ("", "0")
FAILPOINTS = os.environ.get("SHMBUS_FAILPOINTS", "") not in ("", "0")
SANITIZE = os.environ.get("SHMBUS_SANITIZE", "")

# System headers limit warnings to our lines: -isystem overrides the plain -I of setuptools.
system_headers = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
system_headers = list(dict.fromkeys([*system_headers, numpy.get_include()]))

compile_args = ["-std=c11", "-O3", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
for directory in system_headers:
    compile_args += ["-isystem", directory]
# shm_open and friends lived in librt until glibc 2.34; the linker drops an unneeded library.
link_args = ["-pthread", "-Wl,--as-needed", "-lrt", "-lm"]
macros = [
    # Built against NumPy 2, runs with 1.26 (C API of 1.25).
    ("NPY_TARGET_VERSION", "NPY_1_25_API_VERSION"),
    ("NPY_NO_DEPRECATED_API", "NPY_1_25_API_VERSION"),
]
undefined_macros = []

if DEBUG:
    compile_args += ["-O0", "-g"]
    macros.append(("SHMBUS_DEBUG", "1"))
    # The interpreter's own flags carry NDEBUG, which would silence assert.
    undefined_macros.append("NDEBUG")
if FAILPOINTS:
    # For tests alone: compiling takes a fifth of the time.
    compile_args.append("-O0")
    macros.append(("SHMBUS_FAILPOINTS", "1"))
if SANITIZE:
    sanitize_args = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer", "-g"]
    if "undefined" in SANITIZE:
        sanitize_args.append("-fno-sanitize-recover=undefined")
    compile_args += sanitize_args
    link_args += sanitize_args
if WERROR:
    compile_args += ["-Wconversion", "-Werror"]


# The stubs alone describe the public C code; the build reads them.
STUBS = sorted(glob("shmbus_ext/_public*.pyi"))


def attributes_of(docstring: str) -> dict[str, str]:
    """Return the line of a class's docstring on each attribute."""
    _, _, rest = docstring.partition("Attributes\n----------\n")
    said: dict[str, str] = {}
    name = ""
    for line in rest.partition("\n\n")[0].splitlines():
        if line.startswith(" "):
            said[name] = f"{said[name]} {line.strip()}".strip()
        else:
            name = line.partition(" : ")[0]
            said[name] = ""
    return said


def documentation() -> str:
    """Return a C header of the stubs' docstrings: DOC_Writer, DOC_Writer_put and so on.

    An attribute's comes from its class's docstring: DOC_Trajectory_index.
    """
    lines = []

    def define(name: str, text: str) -> None:
        quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        lines.append(f'#define DOC_{name} "{quoted}"\n')

    for stub in STUBS:
        for kind in ast.parse(Path(stub).read_text()).body:
            for node in [kind, *getattr(kind, "body", [])]:
                if not isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                    continue
                text = ast.get_docstring(node)
                if text is None:
                    continue
                name = kind.name if node is kind else f"{kind.name}_{node.name}"
                if isinstance(node, ast.FunctionDef):
                    arguments = node.args
                    for each in ast.walk(arguments):
                        if isinstance(each, ast.arg):
                            each.annotation = None
                    own = {"self": "$self", "cls": "$type"}
                    for first in (arguments.posonlyargs + arguments.args)[:1]:
                        first.arg = own.get(first.arg, first.arg)
                    text = f"{node.name}({ast.unparse(arguments)})\n--\n\n{text}"
                else:
                    for attribute, said in attributes_of(text).items():
                        define(f"{name}_{attribute}", said)
                define(name, text)
    return "".join(lines)


class BuildExtension(build_ext):
    """Compiles on every core; with warnings as errors, by our flags alone."""

    def build_extensions(self) -> None:
        """Compile and link; under SHMBUS_WERROR without the interpreter's own flags."""
        os.makedirs(self.build_temp, exist_ok=True)
        Path(self.build_temp, "public_docs.h").write_text(documentation())
        self.compiler.add_include_dir(self.build_temp)
        if WERROR:
            # Some of the inherited flags switch warnings off; gcc alone understands the rest.
            cc = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
            self.compiler.set_executables(compiler_so=f"{cc} -fPIC")
        # setuptools spreads extensions over cores; for a single extension, spread its sources.
        compile_some = self.compiler.compile

        def compile_all(sources, **options):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                parts = pool.map(lambda source: compile_some([source], **options), sources)
                return [compiled for part in parts for compiled in part]

        self.compiler.compile = compile_all
        super().build_extensions()


setup(
    cmdclass={"build_ext": BuildExtension},
    ext_modules=[
        Extension(
            "shmbus_ext._core",
            sources=sorted(glob("shmbus_ext/**/*.c", recursive=True)),
            depends=[*sorted(glob("shmbus_ext/**/*.h", recursive=True)), *STUBS],
            include_dirs=["shmbus_ext", numpy.get_include()],
            define_macros=macros,
            undef_macros=undefined_macros,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
        )
    ],
)
