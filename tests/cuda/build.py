"""Builds the pretended device's libraries with the system's C compiler, against the headers in torch's own packages.

    python tests/cuda/build.py FOLDER

A library takes the place of the real one by its name (SONAME) where it is loaded first. What torch's libraries ask for
and the sources lack becomes a function that complains and fails.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "libraries"
USERS = ("c10_cuda", "torch_cuda", "torch_cuda_linalg", "torch_python", "caffe2_nvrtc", "torch_nvshmem", "torch_cpu")


@dataclass(frozen=True)
class Library:
    """One of the libraries.

    Attributes:
        prefix: a regular expression of its functions' names.
        versioned: its functions carry its name as their version, as the real one's do.
        error: what a missing function returns.
    """

    soname: str
    source: str
    prefix: str
    error: int
    versioned: bool = True
    options: tuple[str, ...] = ()


LIBRARIES = (
    Library("libcudart.so.13", "runtime.c", "cuda", 801),
    Library("libcuda.so.1", "driver.c", "cu(?!File)[A-Z]", 801, versioned=False),
    Library("libcublasLt.so.13", "products.c", "cublasLt", 15, options=("-DLIGHT",)),
    Library("libcublas.so.13", "products.c", "cublas(?!Lt)", 15),
    Library("libnccl.so.2", "collectives.c", "nccl", 5, versioned=False),
    Library("libcudnn.so.9", "attention.c", "cudnn", 3000),
)
ASKED_BY_NAME = (
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemRetainAllocationHandle",
    "cuMemGetAllocationPropertiesFromHandle",
)


def why_not() -> str | None:
    """Why nothing can be built here, in words; None if it can."""
    import torch

    cuda = torch.version.cuda
    if cuda is None:
        return "this torch is built without CUDA"
    if cuda.split(".")[0] != "13":
        return f"this torch is built for CUDA {cuda}, the pretended device for 13"
    if torch.cuda.is_available():
        return "there is a real device"
    missing = [tool for tool in ("cc", "nm") if shutil.which(tool) is None]
    return f"no {' and no '.join(missing)} is installed" if missing else None


def packages() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def build(folder: Path) -> Path:
    """The libraries' folder inside `folder`, built once for these sources and this torch."""
    import torch

    texts = [path.read_bytes() for path in sorted(SOURCES.iterdir())] + [torch.__version__.encode()]
    target = folder / hashlib.sha256(b"".join([*texts, Path(__file__).read_bytes()])).hexdigest()[:16]
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder))
    for library in LIBRARIES:
        _build(library, made)
    try:
        made.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(made)
    return target


def _build(library: Library, folder: Path) -> None:
    site = packages()
    headers = [site / "nvidia/cu13/include", site / "nvidia/nccl/include", site / "nvidia/cudnn/include"]
    headers.append(site / "triton/backends/nvidia/include")
    options = ["-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wno-comment", "-Wno-unknown-pragmas"]
    options += ["-Wno-attributes", f"-Wl,-soname,{library.soname}", f"-I{SOURCES}"]
    options += [f"-I{path}" for path in headers] + list(library.options)
    if library.soname != LIBRARIES[0].soname:
        options += ["-Wl,--no-as-needed", str(folder / LIBRARIES[0].soname), "-Wl,-rpath,$ORIGIN"]
    source, output = SOURCES / library.source, folder / library.soname
    _compile([*options, "-o", f"{output}.without", str(source)])
    stubs = folder / f"{library.soname}.c"
    stubs.write_text(_stubs(library, Path(f"{output}.without")), encoding="utf-8")
    if library.versioned:
        script = folder / f"{library.soname}.map"
        name = library.prefix.partition("(")[0]
        script.write_text(f"{library.soname} {{ global: {name}*; __{name}*; pretended_*; local: *; }};\n")
        options.append(f"-Wl,--version-script={script}")
    _compile([*options, "-o", str(output), str(source), str(stubs)])
    Path(f"{output}.without").unlink()


def _compile(arguments: list[str]) -> None:
    done = subprocess.run(["cc", *arguments, "-ldl"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"cc {' '.join(arguments)}\n{done.stderr}")


def _stubs(library: Library, written: Path) -> str:
    pattern = re.compile(f"(__)?{library.prefix}")
    wanted: set[str] = set(ASKED_BY_NAME) if library.soname == "libcuda.so.1" else set()
    users = [packages() / f"torch/lib/lib{user}.so" for user in USERS]
    for user in [*users, *packages().glob("bitsandbytes/libbitsandbytes_cuda13?.so")]:
        wanted |= _symbols("--undefined-only", user)
    lacking = sorted(name for name in wanted - _symbols("--defined-only", written) if pattern.match(name))
    lines = [
        f'int {name}(void) {{ pretended_misuse("{name} is not pretended"); return {library.error}; }}'
        for name in lacking
    ]
    return "\n".join(['#include "shared.h"', *lines]) + "\n"


def _symbols(which: str, library: Path) -> set[str]:
    if not library.exists():
        return set()
    told = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in told.splitlines()}


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
