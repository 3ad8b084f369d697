"""Build of the Cython kernels: every `_*.pyx` of KERNELS is one extension; each names its own C sources.

The xdelta3 C library comes from the `xdelta3` build requirement, found without importing it (its binding is broken).
"""

import os
from importlib.util import find_spec
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

KERNELS = Path("shared/nearkin_shared/kernels/native")


def xdelta3_source_dir() -> str:
    """Return the folder that holds `xdelta3.c` inside the build requirement `xdelta3==0.0.5`."""
    spec = find_spec("xdelta3")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "build requirement missing: xdelta3==0.0.5 (it carries the C source); see requirements/build.txt"
        )
    return str(Path(next(iter(spec.submodule_search_locations))) / "lib")


def extension(pyx: Path) -> Extension:
    """Return the extension of one kernel; a `<name>_impl.c` beside it is compiled into it."""
    implementation = pyx.with_name(pyx.stem.lstrip("_") + "_impl.c")
    include_dirs = [numpy.get_include(), str(KERNELS)]
    if pyx.stem == "_xdelta3":
        include_dirs.append(xdelta3_source_dir())
    return Extension(
        f"nearkin_shared.kernels.native.{pyx.stem}",
        [str(pyx), *([str(implementation)] if implementation.exists() else [])],
        include_dirs=include_dirs,
        depends=[str(shared) for shared in (*KERNELS.glob("*.h"), *KERNELS.glob("*.pxd"))],
        extra_compile_args=["-O3", "-g0", "-fno-strict-aliasing"],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    )


setup(
    ext_modules=cythonize(
        [extension(pyx) for pyx in sorted(KERNELS.glob("_*.pyx"))],
        language_level=3,
        compiler_directives={
            "boundscheck": False,
            "wraparound": False,
            "initializedcheck": False,
            "cdivision": True,
            "freethreading_compatible": True,
        },
    ),
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
)
