"""The launcher of `csrc/host`, which repeats prepared calls without Python: loading it, handing calls over.

It is a small shared library without dependencies. The C++ compiler of the machine builds it beside this process
(`launcher_build.py`), from the first graph or the first launch on. Until it is there calls go through Python: they take
longer on the host, and nothing else changes. So they do where there is no compiler, and with
`MAGI_COMPILE_LAUNCHER=0`.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from magi_compile import _checks
from magi_compile.kernels.sm90.runtime import calls, launcher_build
from magi_compile.kernels.sm90.runtime.driver import current_context, on_device

#: PyTorch's ScalarType of what a buffer may hold.
_DTYPES = {
    torch.uint8: 0,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bool: 11,
    torch.bfloat16: 15,
}
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}


class Launcher:
    """The loaded library.

    Args:
        library: a descriptor of its file, which stays open: the loader knows the library by that number.
        driver: of the CUDA driver.

    Raises:
        OSError: if it cannot be loaded, or lacks a function of PyTorch or of the driver.
    """

    def __init__(self, library: int, driver: str = "libcuda.so.1"):
        # The file that was verified, whatever its name leads to by now. The dot is for the loader, which takes a name
        # that it has seen for the same library: nobody else writes it like this.
        self._library = ctypes.CDLL(f"/proc/self/./fd/{library}")
        self._library.magi_open.restype = ctypes.c_char_p
        missing = self._library.magi_open(driver.encode())
        if missing is not None:
            raise OSError(f"{missing.decode()} is not there")
        _checks.on_flags(self._watch)

    def register(self, name: str, arguments: str, results: str, dispatch_key: str = "CUDA") -> None:
        """Takes over the op `magi::name` where `dispatch_key` says; what it does not know, `magi::name_in_python`
        computes, under `adopting`.

        Args:
            name: of the op.
            arguments: a letter for each, see `magi_compile.ops.repeatable.Repeatable`.
            results: the same.
            dispatch_key: of PyTorch's dispatcher.
        """
        names = (name, f"{name}_in_python", arguments, results, dispatch_key)
        error = self._library.magi_register(*(x.encode() for x in names))
        if error:
            raise RuntimeError(f"PyTorch did not take the launcher for magi::{name}: error {error}")

    def adopting(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """`function(*arguments)`, and if that is one prepared call of the arguments' tensors,
        it is repeated from now on."""
        if not self._library.magi_is_asked():
            return function(*arguments)
        arguments = _each_once(arguments)
        try:
            with calls.recorded() as done:
                results = function(*arguments)
            if len(done) == 1 and not done[0].has_others:
                self._adopt(done[0], _tensors_of(arguments), results)
        except Exception as error:
            self._library.magi_note_error(f"{type(error).__name__}: {error}".encode())
            raise
        return results

    def forget(self) -> None:
        """Forgets all calls."""
        self._library.magi_forget()

    def _watch(self, address: int, count: int, stride: int) -> None:
        self._library.magi_watch(*map(ctypes.c_int64, (address, count, stride)))

    def _adopt(
        self, done: calls.LaunchedCall, tensors: Sequence[Tensor | None], results: Sequence[Tensor]
    ) -> None:
        given, found = _places(done.given, tensors), _results(results, done)
        if given is None or found is None:
            return  # of copies, or completed behind the launches
        made, buffers = found
        device = done.made[0].device
        with on_device(device):
            context = current_context()
        words = [_DEVICE_TYPES[device.type], device.index or 0, context]
        words += [len(given), *(x for place in given for x in place), len(buffers)]
        for buffer in buffers:
            sizes = (len(buffer.shape), *buffer.shape, *buffer.stride)
            words += [_DTYPES[buffer.dtype], buffer.zeros, *sizes]
        words += [len(made), *made, len(done.call.launches)]
        params = b""
        for launch in done.call.launches:
            words += _words_of(launch)
            params += launch.data
        self._library.magi_adopt((ctypes.c_int64 * len(words))(*words), params)


def _words_of(launch: calls.Launch) -> list[int]:
    """A launch as the library reads it, without its parameters."""
    grid = launch.grid if isinstance(launch.grid, tuple) else (launch.grid, 1)
    words = [int(launch.function or 0), *grid, launch.num_threads]
    words += [int(option) for option in launch.options]
    words += [len(launch.data), len(launch.pointers)]
    for word, buffer, offset in launch.pointers:
        words += [8 * word, buffer, offset]
    words.append(len(launch.maps))
    for at, tensor_map in launch.maps:
        words += [at, *tensor_map.pointer, tensor_map.element, *tensor_map.sizes]
        words += [*tensor_map.strides, *tensor_map.box, int(tensor_map.is_swizzled)]
    return words


def _each_once(arguments: Sequence[Any]) -> list[Any]:
    """The arguments of an op, with views in place of tensors that are in front of them already: in the next call these
    may be different ones."""
    seen: set[int] = set()

    def once(argument: Any) -> Any:
        if isinstance(argument, (list, tuple)):
            return [once(x) for x in argument]
        if isinstance(argument, Tensor) and id(argument) in seen:
            argument = argument.view_as(argument)
        seen.add(id(argument))
        return argument

    return [once(argument) for argument in arguments]


def _tensors_of(arguments: Sequence[Any]) -> list[Tensor | None]:
    """The tensors among the arguments of an op, in order, those of lists too; None for one that is not there."""
    tensors: list[Tensor | None] = []
    for argument in arguments:
        if argument is None or isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors += [x for x in argument if isinstance(x, Tensor)]  # not numbers
    return tensors


def _results(
    results: Sequence[Tensor], done: calls.LaunchedCall
) -> tuple[list[int], list[calls.Buffer]] | None:
    """The number of the buffer that each result is, and these buffers, shaped as the results are, with those of results
    without elements behind them; None if a result is another tensor."""
    where = {_place(x): i for i, x in enumerate(done.made) if x.numel()}
    numbers, buffers = [], list(done.call.made)
    for result in results:
        if result.numel() == 0:
            numbers.append(len(buffers))
            buffers.append(calls.Buffer(tuple(result.shape), result.stride(), result.dtype))
            continue
        number = where.get(_place(result))
        if number is None or number in numbers:
            return None
        buffer, tensor = buffers[number], done.made[number]
        if (result.numel(), result.dtype) != (tensor.numel(), tensor.dtype):
            return None
        buffers[number] = buffer._replace(shape=tuple(result.shape), stride=result.stride())
        numbers.append(number)
    return numbers, buffers


def _places(
    tensors: Sequence[Tensor | None], among: Sequence[Tensor | None]
) -> list[tuple[int, int]] | None:
    """For each of `tensors`, the number of the tensor that it is a part of, and where it begins there, in bytes; (-1,
    0) for None. None if one is not among them, or if which one it is cannot be told."""
    where = {id(x): i for i, x in enumerate(among) if x is not None}
    begins, memories = _numbers(among, _place), _numbers(among, lambda x: _place(x)[0])
    places = []
    for tensor in tensors:
        if tensor is None or tensor.numel() == 0:
            places.append((-1, 0))
            continue
        # A view that begins where one argument does, or a part of one, where no other leads to that memory.
        found = [where[id(tensor)]] if id(tensor) in where else begins.get(_place(tensor), [])
        found = found or memories.get(_place(tensor)[0], [])
        if len(found) != 1:
            return None
        whole = among[found[0]]
        assert whole is not None
        places.append((found[0], tensor.data_ptr() - whole.data_ptr()))
    return places


def _place(tensor: Tensor) -> tuple[int, int]:
    """The address of its memory, and where it begins there."""
    return tensor.untyped_storage().data_ptr(), tensor.data_ptr()


def _numbers(
    tensors: Sequence[Tensor | None], key: Callable[[Tensor], Hashable]
) -> dict[Hashable, list[int]]:
    """The numbers of the tensors that have elements, by `key`."""
    found: dict[Hashable, list[int]] = {}
    for i, x in enumerate(tensors):
        if x is not None and x.numel():
            found.setdefault(key(x), []).append(i)
    return found


def launcher() -> Launcher | None:
    """The launcher of this process; None as long as a compiler builds it, and where it is switched off or cannot be
    built or loaded, which is logged once."""
    build = launcher_build.begin()
    if build is None or not build.is_done():
        return None
    with _loading:
        return _loaded(build)


_loading = threading.Lock()


@cache
def _loaded(build: launcher_build.Build) -> Launcher | None:
    try:
        return Launcher(build.library())
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        launcher_build.log_absence(error)
        return None
