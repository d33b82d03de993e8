"""Runs launches on a gfx950 GPU: code objects through libamdhip64 by ctypes; hiprtc compiles where the shipped ones do not serve.

Nothing of ROCm is needed to import this, and nothing is loaded until a launch. A ROCm build of torch brings both libraries.
"""

import ctypes
import warnings
from functools import lru_cache
from pathlib import Path

import torch

from lowbit_attn.kernels.cdna4 import build, toolchain
from lowbit_attn.kernels.cdna4.arguments import Launch

_LAUNCH_BUFFER, _LAUNCH_BUFFER_SIZE, _LAUNCH_END = 1, 2, 3
"""HIP_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END."""


class HipError(RuntimeError):
    """A HIP or hiprtc call failed; the message has its name and the runtime's words."""


class Hip:
    """The calls of libamdhip64 that launching takes. `path` names the library."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.hipGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: object) -> None:
        """HipError if the call does not return hipSuccess."""
        code = getattr(self.library, name)(*arguments)
        if code:
            raise HipError(f"{name}: {self.library.hipGetErrorString(code).decode()} ({code})")

    def function(self, image: bytes, kernel: str) -> ctypes.c_void_p:
        """A kernel of a code object, loaded on the current device."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("hipModuleLoadData", ctypes.byref(module), image)
        self.call("hipModuleGetFunction", ctypes.byref(function), module, kernel.encode())
        return function

    def launch(self, function: ctypes.c_void_p, groups: int, threads: int, args: ctypes.Structure, stream: int) -> None:
        """Enqueue one launch; LDS is static."""
        size = ctypes.c_size_t(ctypes.sizeof(args))
        extra = (ctypes.c_void_p * 5)(_LAUNCH_BUFFER, ctypes.addressof(args), _LAUNCH_BUFFER_SIZE, ctypes.addressof(size),
                                      _LAUNCH_END)
        self.call("hipModuleLaunchKernel", function, *map(ctypes.c_uint, (groups, 1, 1, threads, 1, 1, 0)), ctypes.c_void_p(stream),
                  None, extra)


class Hiprtc:
    """The calls of libhiprtc that compiling takes."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.hiprtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise HipError(f"{name}: {self.library.hiprtcGetErrorString(code).decode()} ({code})")

    def compile(self, unit: str, architecture: str) -> bytes:
        """The code object of a unit for the device's own architecture name."""
        texts = [(toolchain.SOURCES / name).read_bytes() for name in toolchain.HEADERS]
        headers = (ctypes.c_char_p * len(texts))(*texts)
        names = (ctypes.c_char_p * len(texts))(*(name.encode() for name in toolchain.HEADERS))
        source = (toolchain.SOURCES / f"{unit}.hip.cpp").read_bytes()
        options = [flag for flag in toolchain.flags(unit) if not flag.startswith("-W")] + [f"--offload-arch={architecture}"]
        program = ctypes.c_void_p()
        self._call("hiprtcCreateProgram", ctypes.byref(program), source, f"{unit}.hip.cpp".encode(), len(texts), headers, names)
        try:
            self._call("hiprtcCompileProgram", program, len(options),
                       (ctypes.c_char_p * len(options))(*(option.encode() for option in options)))
        except HipError as error:
            raise HipError(f"{error}\n{self._text('ProgramLog', program).decode(errors='replace')}") from None
        code = self._text("Code", program)
        self._call("hiprtcDestroyProgram", ctypes.byref(program))
        return code

    def _text(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"hiprtcGet{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"hiprtcGet{what}", program, text)
        return text.raw


def _find(names: tuple[str, ...]) -> str:
    """The first library that loads; torch's own first, for streams and memory are its."""
    tried = []
    for name in names:
        for path in (str(Path(torch.__file__).parent / "lib" / name), name):
            try:
                ctypes.CDLL(path)
            except OSError as error:
                tried.append(str(error))
            else:
                return path
    raise HipError(f"{names[0]}: not found; backend 'cdna4' needs a ROCm build of torch ({'; '.join(tried)})")


@lru_cache(maxsize=1)
def hip() -> Hip:
    """The HIP runtime of this process."""
    return Hip(_find(("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")))


@lru_cache(maxsize=1)
def hiprtc() -> Hiprtc:
    """The runtime compiler."""
    return Hiprtc(_find(("libhiprtc.so", "libhiprtc.so.7", "libhiprtc.so.6")))


def load(runtime: Hip, unit: str, kernel: str, architecture: str) -> ctypes.c_void_p:
    """A kernel from the shipped code object, or from hiprtc, with a warning that says why."""
    reason = build.stale()
    if reason is None:
        try:
            return runtime.function(build.prebuilt(unit).read_bytes(), kernel)
        except HipError as error:
            reason = str(error)
    warnings.warn(f"lowbit_attn: {unit}.hsaco does not serve ({reason}); hiprtc compiles {unit}.hip.cpp instead", RuntimeWarning,
                  stacklevel=2)
    return runtime.function(hiprtc().compile(unit, architecture), kernel)


@lru_cache(maxsize=256)
def _function(unit: str, kernel: str, device: int) -> ctypes.c_void_p:
    """One for each device: modules belong to the device that was current when they were loaded."""
    return load(hip(), unit, kernel, torch.cuda.get_device_properties(device).gcnArchName)


def run(launch: Launch) -> None:
    """Enqueue a launch on the current stream of its tensors' device; nothing waits. ValueError names a device that is no GPU."""
    device = launch.tensors[0].device
    if device.type != "cuda" or not torch.version.hip:
        raise ValueError(f"device: got {device}; accepted by backend 'cdna4': a GPU of a ROCm build of torch")
    with torch.cuda.device(device):
        function = _function(launch.unit, launch.kernel, torch.cuda.current_device())
        hip().launch(function, launch.groups, launch.threads, launch.args, torch.cuda.current_stream().cuda_stream)
