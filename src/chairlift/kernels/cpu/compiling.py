"""The decorators that compile kernels, and scalar functions for compiled loops that numba only offers as slow calls.

Machine code of functions called from Python is kept on disk, so that later starts load it instead of compiling it
again. numba keeps it in pickles, which run code when they are read, so the folder must be one that no other user can
change.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import event
from numba.extending import intrinsic

from chairlift.loading.known_models import cache_dir
from chairlift.machine.files import private_folder, require_private_content
from chairlift.progress import COMPILING, StartStage, tell_stage

# Sums may be reordered so that they vectorise; NaN and infinity keep their meaning.
FAST = {"reassoc", "contract", "arcp", "nsz"}


def compiled(fastmath: set[str] | bool = False, **more: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile to machine code that releases the GIL."""

    def decorate(function: Callable[..., Any]) -> Any:
        return numba.njit(function, fastmath=fastmath, nogil=True, error_model="numpy", **more)

    return decorate


@intrinsic
def bits(_: Any, number: Any) -> Any:
    """Reinterpret a float32 as an int32."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return b.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def from_bits(_: Any, number: Any) -> Any:
    """Reinterpret an int32 as a float32."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return b.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def nearest(_: Any, number: Any) -> Any:
    """Round to the nearest integer, as a float32."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return b.call(b.module.declare_intrinsic("llvm.rint", [ir.FloatType()]), args)

    return types.float32(types.float32), generate


@intrinsic
def borrowed(_: Any, array: Any) -> Any:
    """The same array without a count of its references: threads that count those of one array wait for each other. Its
    owner must keep it meanwhile."""

    def generate(context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        made = context.make_array(array)(context, b, value=args[0])
        made.meminfo = ir.Constant(made.meminfo.type, None)
        made.parent = ir.Constant(made.parent.type, None)
        return made._getvalue()

    return array(array), generate


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # few bits, so that its products are exact
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST, _HIGHEST = np.float32(-87.0), np.float32(88.0)
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / n) for n in (2, 6, 24, 120, 720))
_ONE = np.float32(1.0)


@compiled({"contract"})
def exp(x: Any) -> Any:
    """exp of a float32 to within 2 units in the last place, 0 below -87; vectorises."""
    inside = min(max(x, _LOWEST), _HIGHEST)
    whole = nearest(inside * _LOG2_E)
    rest = inside - whole * _LN2_HIGH - whole * _LN2_LOW
    series = _ONE + rest * (_ONE + rest * (_C2 + rest * (_C3 + rest * (_C4 + rest * (_C5 + rest * _C6)))))
    result = series * from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))
    return result if x >= _LOWEST else (np.float32(0.0) if x < _LOWEST else x)


@intrinsic
def widen(_: Any, number: Any) -> Any:
    """Convert a stored number to float32: from float32, bfloat16 (a uint16 to numba) or int8."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        if number == types.float32:
            return args[0]
        if number == types.int8:
            return b.sitofp(args[0], ir.FloatType())
        word = b.shl(b.zext(args[0], ir.IntType(32)), ir.IntType(32)(16))
        return b.bitcast(word, ir.FloatType())

    return types.float32(number), generate


@intrinsic
def narrow(_: Any, number: Any, like: Any) -> Any:
    """Convert a float32 to the stored type of `like`, rounded to nearest: the inverse of `widen`."""

    def generate(_context: Any, b: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        if like == types.float32:
            return args[0]
        i32 = ir.IntType(32)
        word = b.bitcast(args[0], i32)
        odd = b.and_(b.lshr(word, i32(16)), i32(1))
        return b.trunc(b.lshr(b.add(word, b.add(odd, i32(0x7FFF))), i32(16)), ir.IntType(16))

    return like(types.float32, like), generate


@compiled()
def sortable(number: Any) -> Any:
    """Map a float32 to an integer of the same order, so that a maximum vectorises."""
    word = bits(number)
    return np.int32(word ^ ((word >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@compiled()
def from_sortable(word: Any) -> Any:
    return from_bits(np.int32(word ^ ((word >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@compiled()  # exact division: as torch rounds
def scale_of(rows: Any, row: int, largest: Any) -> Any:
    """The scale that maps the largest size in rows[row] to `largest`, and what to divide the row by: infinity where the
    scale is not above 0. A number that is not finite makes the scale NaN."""
    highest = np.int32(0)
    for i in range(rows.shape[1]):
        highest = max(highest, bits(rows[row, i]) & np.int32(0x7FFFFFFF))  # positive floats compare like integers
    scale = from_bits(highest) / largest if highest < np.int32(0x7F800000) else np.float32(np.nan)
    return scale, scale if scale > 0 else np.float32(np.inf)


log = logging.getLogger("chairlift")


def compiled_and_kept(fastmath: set[str] | bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Like `compiled`, kept on disk where that is possible: for functions called from Python."""

    def decorate(function: Callable[..., Any]) -> Any:
        return _compile_kept(lambda keep: compiled(fastmath, cache=keep)(function))

    return decorate


def kept_c_function(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile a C function with sums in the given order, to be called by its address; kept where that is possible."""
    return _compile_kept(lambda keep: numba.cfunc(signature, cache=keep, error_model="numpy")(function))


def _compile_kept(compile: Callable[[bool], Any]) -> Any:
    """Call `compile` with whether numba can keep the machine code, while its folder is set."""
    kept = folder()
    if kept is None:
        return compile(False)
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(kept)
        return compile(True)
    except RuntimeError:  # a function that comes from no file
        return compile(False)
    finally:
        numba.config.CACHE_DIR = before


@cache
def folder() -> Path | None:
    """The folder of this version of the kernels; None, with a warning, if it cannot be used. numba only checks the file
    of a function, not those of the functions it calls."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    version = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    chosen = numba.config.CACHE_DIR  # NUMBA_CACHE_DIR
    try:
        kept = private_folder((Path(chosen) if chosen else cache_dir() / "kernels") / version)
        require_private_content(kept)
        tempfile.TemporaryFile(dir=kept).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        way_out = "each start compiles them again; NUMBA_CACHE_DIR names another folder"
        log.warning(f"compiled kernels are not kept: {error}: {way_out}")
        return None
    return kept


USUAL_FUNCTIONS = 165  # About as many are compiled for a model with 8-bit weights.


class _CompilationLog(event.Listener):
    """Says that functions are compiled, which takes most of the first start, and how many are done."""

    def __init__(self) -> None:
        self.count = 0
        self.has_begun = False

    def on_start(self, event: Any) -> None:
        if not self.has_begun:
            self.has_begun = True
            kept = "not kept for later starts" if folder() is None else f"kept for later starts in {folder()}"
            log.info(f"kernels    compiling them for this CPU, {kept}")
        # The last functions, which contain the others, take most of the time.
        left = max(0.001, 1 - self.count / USUAL_FUNCTIONS)
        tell_stage(StartStage(COMPILING, round(100 * (1 - left**0.3)), 100))

    def on_end(self, event: Any) -> None:
        self.count += 1


compilation = _CompilationLog()
event.register("numba:compile", compilation)
