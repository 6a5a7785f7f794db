"""Launches of Triton kernels whose arguments are known beforehand. Importing this needs Triton.

Triton finds the machine code that fits a call's arguments at every call, in Python: more time than small kernels run. Here that
is done when the arguments are bound; what is left for the moment itself is the launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Grid = tuple[int, int, int]


def code_for(kernel: Any, grid: Grid, arguments: tuple[Any, ...], constants: Mapping[str, Any], num_warps: int = 4) -> Any:
    """The machine code for such arguments (their types and alignment), compiled when it is the first of its kind. Launches
    nothing. None under Triton's interpreter, which has none."""
    return kernel.run(*arguments, grid=grid, warmup=True, num_warps=num_warps, **constants)


class Launch:
    """One kernel with its arguments. Keeps what it was given alive, so it must live until the kernel is done."""

    def __init__(
        self, kernel: Any, grid: Grid, arguments: tuple[Any, ...], constants: Mapping[str, Any], num_warps: int = 4
    ) -> None:
        """`constants`: its `constexpr` parameters, in order; they are its last."""
        self._arguments = (*arguments, *constants.values())
        code = code_for(kernel, grid, arguments, constants, num_warps)
        self._start = None if code is None else code[grid]
        self._interpreted = kernel[grid]

    def __call__(self, stream: int) -> None:
        """Once or more, on a CUDA stream (its handle) of the device on which the arguments lie."""
        if self._start is None:
            self._interpreted(*self._arguments)
        else:
            self._start(*self._arguments, stream=stream)
