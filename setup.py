"""Builds libhscache, _native and _ops with CMake and ninja, against the torch that is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PRODUCTS = ("libhscache*", "_native*", "_ops*")


def torch_root() -> Path:
    """The folder of the installed torch package, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "hidden_cache builds against the torch that you have, and there is none in this "
            "environment. Install torch first, then build with: "
            "pip install --no-build-isolation ."
        )
    return Path(spec.origin).parent


def tool(name: str) -> str:
    """The program that this environment's package brought, or else the one on PATH."""
    ours = Path(sys.executable).parent / name
    found = str(ours) if ours.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} was not found: pip install {name}, or put it on PATH")
    return found


def cuda_choice() -> str:
    """What HSCACHE_BUILD_CUDA asks for: AUTO, 0 or 1."""
    choice = os.environ.get("HSCACHE_BUILD_CUDA", "AUTO").upper()
    if choice not in ("AUTO", "0", "1"):
        raise SystemExit(
            f"HSCACHE_BUILD_CUDA is {choice!r}: set it to 0 (off), 1 (on), or leave it unset "
            "(on where nvcc is found)"
        )
    return choice


class CMakeBuild(build_ext):  # type: ignore[misc]
    """Runs CMake once and lays its products beside the Python files."""

    def build_extension(self, ext: Extension) -> None:
        try:
            import pybind11
        except ImportError:
            raise SystemExit("pybind11 was not found: pip install pybind11") from None

        # Not setuptools' temporary folder: what was compiled is kept for the next build.
        build = ROOT / "build" / f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
        build.mkdir(parents=True, exist_ok=True)
        configure = [
            tool("cmake"), "-G", "Ninja", "-S", str(ROOT), "-B", str(build),
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DHSCACHE_BUILD_CUDA={cuda_choice()}",
            f"-DHSCACHE_TORCH_ROOT={torch_root()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        ]  # fmt: skip
        subprocess.run(configure, check=True)
        subprocess.run([tool("cmake"), "--build", str(build)], check=True)
        self.place(build, Path(self.get_ext_fullpath(ext.name)).parent)
        self.built = build

    def copy_extensions_to_source(self) -> None:
        """An editable install finds all products beside the Python files, not one of them."""
        self.place(self.built, ROOT / "hidden_cache")

    def place(self, build: Path, target: Path) -> None:
        """Copies what CMake made into a folder."""
        target.mkdir(parents=True, exist_ok=True)
        for pattern in PRODUCTS:
            for product in filter(Path.is_file, build.glob(pattern)):
                # Replaced, not overwritten: a running process may have the old one mapped.
                (target / product.name).unlink(missing_ok=True)
                shutil.copy2(product, target)

    def get_outputs(self) -> list[str]:
        """What a wheel must carry: the products' names are CMake's, not setuptools'."""
        target = Path(self.get_ext_fullpath(self.extensions[0].name)).parent
        return [str(path) for pattern in PRODUCTS for path in target.glob(pattern)]


setup(
    ext_modules=[Extension("hidden_cache._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
