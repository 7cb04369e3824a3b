"""The GPU kernel: one read of each tile of x; W, W^T, both scales and the checksum's tile sum out of registers.

One program per 128x128 block, all matrices of a batch in one launch. It is written in Gluon, Triton's own language
with explicit layouts: each thread holds 16 rows x 4 columns, so it packs 4 neighbouring codes of a row into a word
for W, turns 4x4 bytes at a time by byte permutes, and has 16 neighbouring codes of a column for W^T. No value changes
thread.

Beware of the conversion. ptxas 12.8, which Triton 3.6 ships, merges ``cvt.e4m3x2`` into packed words, and goes wrong
where a converted pair has a second use: it then fills the word's other half with an unrelated register, without a
sign. Plain Triton runs into this with ``tl.trans`` of an 8-bit tile (37% of W^T wrong on sm_90), a checksum of the
codes does, and so does a word of two equal constants. ``_codes`` therefore makes whole words only, and xors them with
a zero that the compiler cannot know, so that no later use sees the conversion. selftest.py runs every compiled
variant against plain torch before it is used.

The recipe's operators are constexprs, so every preset is this kernel. ``gl.div_rn`` is the IEEE division; a plain
``/`` is ``div.full.f32``, Triton's approximate one, and stands only where the recipe asks for it.
"""

# ruff: noqa: SIM102, SIM108 (constexpr conditions choose code at compile time, so they stand in statements of their
# own)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from .fragments import LOAD_ASM, LOAD_CONSTRAINTS, SUM_ASM, SUM_CONSTRAINTS, THREADS
from .triton_transpose import turn

__all__ = ["COLUMNS_FIRST", "NUM_WARPS", "ROWS_FIRST", "quantize_tiles"]

NUM_WARPS = THREADS // 32

# Thread: 16 rows x 4 columns; warp: 4 x 8 threads, 64 rows x 32 columns; program: 2 x 4 warps. A warp's load touches
# four whole 128-byte lines, its store to W whole 32-byte sectors, its store to W^T 64 bytes of each column.
_LANES = [[0, 4], [0, 8], [0, 16], [16, 0], [32, 0]]
_WARPS = [[0, 32], [0, 64], [64, 0]]
COLUMNS_FIRST = gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0]],
    lane_bases=_LANES,
    warp_bases=_WARPS,
    block_bases=[],
    shape=[128, 128],
)
# The same elements in the same threads, registers numbered down the rows: a store then finds 16 neighbours of a column.
ROWS_FIRST = gl.DistributedLinearLayout(
    reg_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [0, 1], [0, 2]],
    lane_bases=_LANES,
    warp_bases=_WARPS,
    block_bases=[],
    shape=[128, 128],
)

# One value per thread; and all of those in every warp, eight in each of its threads.
_BY_THREAD = gl.constexpr(gl.BlockedLayout([1], [32], [NUM_WARPS], [0]))
_BY_WARP = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1], [2], [4]],
        lane_bases=[[8], [16], [32], [64], [128]],
        warp_bases=[[0], [0], [0]],
        block_bases=[],
        shape=[THREADS],
    )
)
_IN_ORDER = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))

_LOAD_ASM = gl.constexpr(LOAD_ASM)
_LOAD_CONSTRAINTS = gl.constexpr(LOAD_CONSTRAINTS)
_SUM_ASM = gl.constexpr(SUM_ASM)
_SUM_CONSTRAINTS = gl.constexpr(SUM_CONSTRAINTS)
_ALL_NAN = gl.constexpr(PropagateNan.ALL)
_CLEAN = gl.constexpr(2**63 - 1)
_INF_BITS = gl.constexpr(0x7F800000)
_FLT_MAX = gl.constexpr(3.4028234663852886e38)
_RECIP_448 = gl.constexpr(0.0022321429569274187)  # float32(1/448)


@gluon.jit(do_not_specialize=["s_e", "s_m", "s_n", "st_e", "st_n", "st_m", "c_e", "c_m", "c_n"])
def quantize_tiles(
    x, w, wt, scale, scale_t, sums, record,
    base: gl.int64, weights: gl.int64,
    M, N, zero: gl.int32,
    x_e, x_m, x_n, w_e, w_m, w_n, wt_e, wt_n, wt_m, s_e, s_m, s_n, st_e, st_n, st_m, c_e, c_m, c_n,
    FLOOR: gl.constexpr, SCALE: gl.constexpr, OVERFLOW: gl.constexpr, POW2: gl.constexpr, ZERO: gl.constexpr,
    INVERSE: gl.constexpr, CODE: gl.constexpr,
    EVEN: gl.constexpr, CHECK: gl.constexpr, SUMS: gl.constexpr, WIDE: gl.constexpr,
    X_M: gl.constexpr, W_M: gl.constexpr, WT_N: gl.constexpr,
    LOAD_CACHE: gl.constexpr, LOAD_EVICT: gl.constexpr, STORE_CACHE: gl.constexpr, TURNED_CACHE: gl.constexpr,
    APART: gl.constexpr, EARLY: gl.constexpr, LATE: gl.constexpr, LAYOUT: gl.constexpr, LAYOUT_T: gl.constexpr,
):  # fmt: skip
    """Quantize block (program 1, program 0) of matrix (program 2) of ``x [E, M, N]``.

    ``*_e``, ``*_m`` and ``*_n`` are element strides, ``record`` and ``base`` a NonFiniteMonitor's, ``weights`` the
    address of fragments.sum_weights(N), ``zero`` is 0. Where they are not 0, ``X_M``, ``W_M`` and ``WT_N`` stand for
    ``x_m``, ``w_m`` and ``wt_n``. ``*_CACHE`` and ``LOAD_EVICT`` are how x is read and codes are written (tuning.py).
    ``EARLY`` works the addresses of stores out while values are under way; ``LATE``, which goes with it, the dequant
    scale and the sums after the stores of codes.

    The order of arguments is part of the machine code that was measured: ptxas loads two words of arguments at once
    where they share eight bytes, and so ``zero`` stands before the strides.
    """
    nb, mb, e = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    nb, mb, e = nb.to(gl.int64), mb.to(gl.int64), e.to(gl.int64)
    top = mb * 128
    left = nb * 128
    rows, columns = _indices(LAYOUT, WIDE)
    at = x + (e * x_e + top * x_m + left * x_n)
    if X_M != 0:  # constants to add to an address, by which loads take them in
        at = at + rows[:, None] * X_M + columns[None, :] * x_n
    else:  # one word for both
        at = at + (rows[:, None] * x_m + columns[None, :] * x_n)
    if EVEN:
        tile = gl.load(at, cache_modifier=LOAD_CACHE, eviction_policy=LOAD_EVICT).to(gl.float32)
    else:
        mask = ((top + rows) < M)[:, None] & ((left + columns) < N)[None, :]
        tile = gl.load(at, mask=mask, other=0.0).to(gl.float32)
    if SUMS and not APART:  # asked for now, so that they are there when the codes are
        fragments = _load_weights(weights, LAYOUT_T)
    if EARLY:
        w = w + (e * w_e + top * w_m + left * w_n)
        wt = wt + (e * wt_e + left * wt_n + top * wt_m)
        scale = scale + (e * s_e + mb * s_m + nb * s_n)
        scale_t = scale_t + (e * st_e + nb * st_n + mb * st_m)
        sums = sums + (e * c_e + mb * c_m + nb * c_n)

    amax = _block_max(tile)
    finite = amax < float("inf")
    m, s = _block_scale(amax, FLOOR, SCALE, OVERFLOW, POW2, ZERO, INVERSE, LATE)
    m = gl.where(finite, m, float("nan"))
    s = gl.where(finite, s, float("nan"))
    if CODE == "divide":
        scaled = gl.div_rn(tile, gl.full_like(tile, 0.0) + s)
    else:
        scaled = tile * m

    codes = _codes(scaled, zero, EVEN)
    if not EARLY:
        w = w + (e * w_e + top * w_m + left * w_n)
    at = w + _offsets(rows[:, None], w_m, W_M) + columns[None, :] * w_n
    if EVEN:
        gl.store(at, codes.to(gl.float8e4nv, bitcast=True), cache_modifier=STORE_CACHE)
    else:
        gl.store(at, codes.to(gl.float8e4nv, bitcast=True), mask=mask)

    turned = turn(codes, LAYOUT_T)
    if SUMS and APART:  # ptxas puts W's stores off until the sums are made, unless the weights come after them
        fragments = _load_weights(weights, LAYOUT_T)
    if SUMS and not LATE:  # before W^T is stored, so that its steps and these stores can fill each other's waits
        parts = _warp_sums(turned, fragments)
        if not EARLY:
            sums = sums + (e * c_e + mb * c_m + nb * c_n)
        gl.store(sums + gl.arange(0, 8, parts.type.layout), parts)
    rows_t, columns_t = _indices(LAYOUT_T, WIDE)
    across = _offsets(columns_t[None, :], wt_n, WT_N)
    if not EARLY:
        wt = wt + (e * wt_e + left * wt_n + top * wt_m)
    at = wt + rows_t[:, None] * wt_m + across
    if EVEN:
        gl.store(at, turned.to(gl.float8e4nv, bitcast=True), cache_modifier=TURNED_CACHE)
    else:
        mask = ((top + rows_t) < M)[:, None] & ((left + columns_t) < N)[None, :]
        gl.store(at, turned.to(gl.float8e4nv, bitcast=True), mask=mask)

    if LATE:
        # Division branches, and ptxas moves nothing across a branch: so the codes are on their way while this goes on.
        s = gl.where(finite, gl.div_rn(1.0, s), float("nan"))
        if SUMS:
            parts = _warp_sums(turned, fragments)
            gl.store(sums + gl.arange(0, 8, parts.type.layout), parts)
    if not EARLY:
        scale = scale + (e * s_e + mb * s_m + nb * s_n)
        scale_t = scale_t + (e * st_e + nb * st_n + mb * st_m)
    gl.store(scale, s)
    gl.store(scale_t, s)
    if CHECK:
        if finite == 0:
            origin = x + (e * x_e + top * x_m + left * x_n)
            _note(origin, record, base + e * M * N, top, left, M, N, x_m, x_n, columns)


@gluon.jit
def _offsets(numbers, stride, STRIDE: gl.constexpr):
    """Elements from the tile's first row to each: constants to add to an address where the stride is compiled in."""
    if STRIDE != 0:
        return numbers * STRIDE
    else:
        return numbers * stride


@gluon.jit
def _block_max(tile):
    """The largest magnitude of a block, or a NaN if it has one, by way of integers, which order them alike.

    Every thread leaves its maximum in shared memory, every warp reads them all: one barrier, and one instruction
    instead of five exchanges.
    """
    # 64 rows by 32 columns to a warp, and in it 16 by 4 to a thread: see _LANES and _WARPS
    pieces = gl.reshape(gl.abs(tile), [2, 4, 16, 4, 8, 4])
    pieces = gl.reshape(gl.permute(pieces, [0, 3, 1, 4, 2, 5]), [256, 64])
    largest = gl.reduce(pieces, 1, _larger_or_nan).to(gl.int32, bitcast=True)
    room = gl.allocate_shared_memory(gl.int32, [256], _IN_ORDER, gl.convert_layout(largest, _BY_THREAD))
    return gl.max(room.load(_BY_WARP), 0).to(gl.float32, bitcast=True)


@gluon.jit
def _indices(LAYOUT: gl.constexpr, WIDE: gl.constexpr):
    """Row and column numbers within the tile, as int64 where the tile itself spans more than 2^31 elements."""
    rows = gl.arange(0, 128, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    if WIDE:
        rows = rows.to(gl.int64)
        columns = columns.to(gl.int64)
    return rows, columns


@gluon.jit
def _larger_or_nan(a, b):
    return gl.maximum(a, b, propagate_nan=_ALL_NAN)


@gluon.jit
def _codes(scaled, zero, EVEN: gl.constexpr):
    """float32 -> e4m3 codes as uint8 in COLUMNS_FIRST registers, four neighbours of a row to a word that hides its
    making.

    In a ragged tile the masked values may all be one constant to the compiler, and so two pairs of a word one pair
    with two uses: there each pair is hidden before it is packed.
    """
    hidden = gl.full_like(scaled, 0, dtype=gl.int32) + zero
    if EVEN:
        codes = gl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            .reg .b32 word;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 word, {low, high};
            xor.b32 $0, word, $5;
            }
            """,
            "=r,f,f,f,f,r,r,r,r",
            [scaled, hidden],
            dtype=gl.uint8,
            is_pure=True,
            pack=4,
        )
    else:
        codes = gl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high, zero, none;
            mov.b32 {zero, none}, $5;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            xor.b16 low, low, zero;
            xor.b16 high, high, zero;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f,r,r,r,r",
            [scaled, hidden],
            dtype=gl.uint8,
            is_pure=True,
            pack=4,
        )
    return codes


@gluon.jit
def _load_weights(weights, LAYOUT_T: gl.constexpr):
    """int32 [32, 128], 16 per thread: six of them hold the thread's fragments of fragments.sum_weights, at that
    address."""
    address = _first_of_four(gl.full([128, 128], 0, gl.int64, LAYOUT_T), 32, 128) + weights
    return gl.inline_asm_elementwise(_LOAD_ASM, _LOAD_CONSTRAINTS, [address], dtype=gl.int32, is_pure=False, pack=16)


@gluon.jit
def _warp_sums(turned, fragments):
    """int64 [8]: sum of byte * A^(place in the tile) of the uint8 codes, in ROWS_FIRST registers, of each warp.

    fragments.py says how. The warps' sums stay apart, since adding them up would make the program wait for its slowest
    warp once more.
    """
    word = gl.inline_asm_elementwise("mov.b32 $0, $4;", "=r,=r,=r,=r,r", [turned], dtype=gl.int32, is_pure=True, pack=4)
    word = _first_of_four(word, 32, 128)  # the asm left four rows in one word, and three words without meaning
    part = gl.inline_asm_elementwise(
        _SUM_ASM, _SUM_CONSTRAINTS, [word, fragments], dtype=gl.int64, is_pure=True, pack=16
    )
    part = _first_of_four(part, 8, 128)  # as above: one of the sixteen results of a thread counts
    part, _ = gl.split(gl.reshape(part, [8, 32, 2, 2]))
    part, _ = gl.split(part)
    # 16-row by 4-column pieces as half, lanes down, warps across, lanes across: see _LANES and _WARPS
    part = gl.reshape(part, [2, 4, 4, 8])
    # three limbs, whose sums over 32 threads fit words: the GPU adds words over a warp in one instruction
    part = gl.reshape(gl.permute(part, [0, 2, 1, 3]), [8, 32])
    low = gl.sum((part & 0x7FFFFFF).to(gl.int32), 1).to(gl.uint32, bitcast=True).to(gl.int64)
    middle = gl.sum(((part >> 27) & 0x7FFFFFF).to(gl.int32), 1).to(gl.uint32, bitcast=True).to(gl.int64)
    high = gl.sum((part >> 54).to(gl.int32), 1).to(gl.int64)
    return low + (middle << 27) + (high << 54)


@gluon.jit
def _first_of_four(values, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Every fourth row of [4 * ROWS, COLUMNS]: a choice of registers, no instruction."""
    first, _ = gl.split(gl.permute(gl.reshape(values, [ROWS, 2, 2, COLUMNS]), [0, 3, 1, 2]))
    first, _ = gl.split(first)
    return first


@gluon.jit
def _note(origin, record, base, top, left, M, N, x_m, x_n, columns):
    """Send the first NaN or Inf of this block to ``record``; the block is void, so it may be read again, row by row."""
    first = gl.full_like(columns, _CLEAN, dtype=gl.int64)
    inside = (left + columns) < N
    for r in range(128):
        row = top + r
        value = gl.load(origin + r.to(gl.int64) * x_m + columns * x_n, mask=inside & (row < M), other=0.0)
        value = value.to(gl.float32)
        bits = value.to(gl.int32, bitcast=True) & 0x7FFFFFFF
        kind = gl.where(bits > _INF_BITS, 0, gl.where(value > 0, 1, 2))
        key = (base + row * N + left + columns) * 4 + kind
        first = gl.minimum(first, gl.where(bits >= _INF_BITS, key, _CLEAN))
    gl.atomic_min(record, gl.min(first, 0))


@gluon.jit
def _block_scale(
    amax, FLOOR: gl.constexpr, SCALE: gl.constexpr, OVERFLOW: gl.constexpr, POW2: gl.constexpr, ZERO: gl.constexpr,
    INVERSE: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """(multiplier m, dequant scale s) of one finite block: recipe.py's operators 2 to 7 in their order; with ``LATE``,
    where m comes first, (m, m)."""
    if FLOOR > 0.0:
        amax = gl.maximum(amax, FLOOR)
    if SCALE == "rn_448_over_amax" or SCALE == "recip_amax_times_448":
        if SCALE == "rn_448_over_amax":
            m = gl.div_rn(448.0, amax)
        else:
            m = gl.div_rn(1.0, amax) * 448.0
        if OVERFLOW == "max_finite":
            m = gl.where(m == float("inf"), _FLT_MAX, m)
        if POW2 == "truncate_multiplier":
            m = (m.to(gl.int32, bitcast=True) & _INF_BITS).to(gl.float32, bitcast=True)
        if ZERO == "one":
            m = gl.where(amax == 0.0, 1.0, m)
        if LATE:
            s = m
        else:
            s = gl.div_rn(1.0, m)
    else:
        if SCALE == "amax_times_recip":
            s = amax * _RECIP_448
        else:
            s = amax / 448.0
        if POW2 == "ceil_bits":
            bits = s.to(gl.int32, bitcast=True)
            exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(gl.int32)
            s = _power_of_two(gl.minimum(gl.maximum(exponent, 1), 254) - 127)
        elif POW2 == "ceil_log2":
            s = _power_of_two(gl.minimum(gl.maximum(_ceil_log2(s), -126), 127))
        elif POW2 == "ceil_log2_e8m0":
            exponent = gl.minimum(_ceil_log2(s), 127)
            s = gl.where(exponent <= -127, 1.0, _power_of_two(gl.maximum(exponent, -126)))
        if INVERSE == "full":
            m = 1.0 / s
        else:
            m = gl.div_rn(1.0, s)
    return m, s


@gluon.jit
def _power_of_two(exponent):
    """2^exponent for -126..127."""
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _ceil_log2(s):
    """ceil(fp32(log2 s)); reference.ceil_log2 says why integers can decide it."""
    subnormal = s < 1.1754943508222875e-38
    bits = gl.where(subnormal, s * 8388608.0, s).to(gl.int32, bitcast=True)
    e = (bits >> 23) - 127 - gl.where(subnormal, 23, 0)
    size = gl.where(e < 0, -e, e).to(gl.float32).to(gl.int32, bitcast=True) - gl.where(e < 0, 1, 0)
    half_step = (_power_of_two(gl.maximum((size >> 23) - 127, -126)) * 0.34657359027997264).to(gl.int32)
    half_step = gl.where(e == 0, 0, half_step)
    return gl.where(s == 0.0, -150, e + ((bits & 0x7FFFFF) > half_step).to(gl.int32))
