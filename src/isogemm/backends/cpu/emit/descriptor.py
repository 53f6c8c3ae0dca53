"""The task descriptor that host and kernels share: one row of 64-bit integers per product.

Addresses and strides are in bytes, extents in elements. Scalars travel as fp32 bit patterns.
"""

from __future__ import annotations

(
    M, N, K,
    A, A_RS, A_CS, A_E,
    B, B_RS, B_CS, B_E,
    OUT, O_RS, O_CS, O_E,
    C, C_RS, C_CS, C_E,
    BIAS, BIAS_RS, BIAS_CS, BIAS_E,
    ALPHA, BETA,
    PLAIN, START,
    STRATEGY, A_MODE, B_MODE, MC, NC, KC,
    GRID_M, GRID_N, MR_PANEL, NR_PANEL,
    PACK_A, PACK_B, TILE, HALF, FEW,
    SEEN, FROM_MEMORY,
) = range(44)  # fmt: skip
FIELDS = 44

# Flags for PLAIN: the accumulator is the output itself (fp32, unit column stride, nothing to apply after the walk).
# START: CONTINUES where the walk starts from C instead of from zero, else 0. It is a bit of every kernel's flags, too.
CONTINUES = 1

# PACK_A, PACK_B, TILE, HALF, FEW: addresses of the routines that the schedule needs (routines.py); 0 where it needs
# none. HALF: the tile of half the columns, where no more are left at the end.

# SEEN: 1 where the last call of this kind had the same weights (B), which may then lie in a cache. In a template that
# calls share: the address of those weights, or NEVER_SEEN where they have no room in a cache.
NEVER_SEEN = -1
# FROM_MEMORY: flags for the walk of few rows, or bytes ahead that tiles ask for packed weights, where SEEN is not 1.

# Words of a header behind the pool's, in the template of a product or a batch: the entry and how many chunks it is
# called for, flags, and what its operands are like where the call that brings them has looked at nothing else.
FUNCTION, CHUNKS, FLAGS, LIKE_A, LIKE_B, LIKE_OUT = 8, 9, 10, 11, 20, 29
# Words of what an operand is like: its axes, up to three extents and strides, its type, and bytes from first to last.
AXES, EXTENTS, STRIDES, TYPE, SPAN, LIKE_WORDS = 0, 1, 4, 7, 8, 9
# Flags: A and B have changed places; A and B are compared; so is the output, which may not be written or be theirs.
SWAPPED, COMPARED, INTO = 1, 2, 4

# STRATEGY
TILED, GEMV, STREAM, QUADS, PANELS = 0, 1, 2, 3, 4
# A_MODE: pack a block at a time, pack all rows once per thread, or walk in place.
PACK_BLOCK, PACK_ALL, A_IN_PLACE = 0, 1, 2
# B_MODE: pack a block at a time, panels prepared by the user, or rows in place.
PACK, PREPARED, B_IN_PLACE = 0, 1, 2
# O_E, C_E, BIAS_E, A_E, B_E: vectors.FLOAT32, BFLOAT16, FLOAT16.

ONE = 0x3F800000  # as a scalar
