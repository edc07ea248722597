"""Builds and calls adamw.cpp: one call per unit, without the GIL.

The kernel has a plain C interface. The machine's C++ compiler compiles it into the user's cache in about a second.
torch's extension loader would need ninja and torch's headers (half a minute), and the lock file of a killed build would
make every later build wait.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from toolkit.errors import ToolkitError
from toolkit.paths import user_cache
from toolkit.sharding.offload.host import processor_features

SOURCE = Path(__file__).with_name("adamw.cpp")
# adamw.cpp spells out which operations are fused, as torch fuses them. Contraction by the compiler would change last
# bits. Without errno and traps the square root can be vectorised, with the same results.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-std=c++17")
BUILD_SECONDS = 120


class Segment(ctypes.Structure):
    """A parameter's position in the flat tensors, and its settings for this step (`step` counts from 1)."""

    _fields_ = (
        ("offset", ctypes.c_int64),
        ("numel", ctypes.c_int64),
        ("lr", ctypes.c_double),
        ("beta1", ctypes.c_double),
        ("beta2", ctypes.c_double),
        ("eps", ctypes.c_double),
        ("weight_decay", ctypes.c_double),
        ("step", ctypes.c_int64),
    )


class AdamWKernel:
    """The compiled kernel, made by `load_kernel`.

    Raises:
        ToolkitError: if the library cannot be loaded.
    """

    def __init__(self, library: Path) -> None:
        try:
            self._adamw = ctypes.CDLL(str(library)).adamw  # CDLL lets go of the GIL
        except OSError as error:
            raise ToolkitError(f"the kernel cannot be loaded: {error}") from error
        self._adamw.restype = None
        self._adamw.argtypes = (
            *(ctypes.c_void_p,) * 4,
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.POINTER(Segment),
            ctypes.c_int64,
            ctypes.c_float,
            ctypes.c_int,
        )

    def step(
        self,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,
        weights: torch.Tensor,
        segments: Sequence[Segment],
        scale: float,
        threads: int,
    ) -> None:
        """Takes one AdamW step of the segments of flat tensors. All have shape (n,), are contiguous and on the host.

        Args:
            master: float32, updated.
            exp_avg: the first moment, float32, updated.
            exp_avg_sq: the second moment, float32, updated.
            gradient: float32 or bfloat16.
            weights: float32 or bfloat16, filled with the rounded new masters.
            segments: the parameters to step, with their settings.
            scale: the factor of the gradient.
            threads: the number of threads.
        """
        for tensor in (master, exp_avg, exp_avg_sq, gradient, weights):
            assert tensor.device.type == "cpu"
            assert tensor.is_contiguous()
            assert tensor.numel() == master.numel()
        for tensor in (master, exp_avg, exp_avg_sq):
            assert tensor.dtype == torch.float32
        array = (Segment * len(segments))(*segments)
        self._adamw(
            master.data_ptr(),
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            gradient.data_ptr(),
            int(_is_bf16(gradient)),
            weights.data_ptr(),
            int(_is_bf16(weights)),
            array,
            len(segments),
            scale,
            threads,
        )


def _is_bf16(tensor: torch.Tensor) -> bool:
    assert tensor.dtype in (torch.float32, torch.bfloat16)
    return tensor.dtype == torch.bfloat16


@functools.cache
def load_kernel() -> AdamWKernel:
    """Builds the kernel unless the user's cache holds it.

    Raises:
        ToolkitError: if there is no compiler, or it fails. The message quotes it.
    """
    library = _library_path()
    if not library.exists():
        _build(library)
    return AdamWKernel(library)


def _compiler() -> str:
    """Returns the machine's C++ compiler, or the one that the variable CXX names."""
    from torch.utils import cpp_extension  # imports setuptools: 0.1 s of CPU, which most runs and plans do not need

    return cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call, no-any-return]


def _library_path() -> Path:
    """Returns a path that depends on source, compiler and processor: machines of many kinds may share a home folder."""
    key = hashlib.sha256(SOURCE.read_bytes())
    # With -march=native the code runs only on this kind of processor.
    key.update(" ".join((_compiler(), *FLAGS, platform.machine(), processor_features())).encode())
    return user_cache() / "kernels" / f"adamw-{key.hexdigest()[:16]}.so"


def _build(library: Path) -> None:
    """Compiles into a temporary folder and renames the result, because several processes may build at once."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            command = [_compiler(), *FLAGS, "-fopenmp", "-shared", "-fPIC", str(SOURCE), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)  # noqa: S603
            if done.returncode != 0:
                raise ToolkitError(f"the kernel does not compile: {(done.stderr.strip().splitlines() or ['?'])[0]}")
            os.replace(built, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolkitError(f"the kernel cannot be built: {error}") from error
