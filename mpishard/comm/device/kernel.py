"""The copy kernel: one launch packs, or unpacks, every segment of a table.

A block of threads moves one tile of one segment; it finds the segment by bisection over the first tiles.
`mpishard.comm.memory.copy_table.addresses` is the same arithmetic in Python. The source also compiles for the host,
where a loop stands for the grid: so its every line runs without a GPU.
"""

from __future__ import annotations

from mpishard.comm.memory.copy_table import NDIM, TILE, UNITS

THREADS = 256

# "{pack|unpack}_{bytes of a unit}"
SOURCE = f"""
#if defined(__CUDACC__) || defined(__HIPCC__)
#define KERNEL extern "C" __global__
#define TILE_INDEX blockIdx.x
#define FIRST_UNIT threadIdx.x
#define STEP {THREADS}u
#else
#define KERNEL extern
#define TILE_INDEX tile_index
#define FIRST_UNIT 0u
#define STEP 1u
typedef struct {{ unsigned int x, y; }} uint2;
typedef struct {{ unsigned int x, y, z, w; }} uint4;
static unsigned int tile_index;
#endif

/* offset, packed, units, first tile; counts[1..{NDIM - 1}]; strides[0..{NDIM - 1}] */
typedef struct {{ long long offset, packed, units, first, count[{NDIM - 1}], stride[{NDIM}]; }} Row;

#define COPY_SEGMENTS(NAME, T, PACK)                                                        \\
KERNEL void NAME(char* base, char* packed, const Row* rows, int segments)                   \\
{{                                                                                          \\
    int low = 0, high = segments;                                                           \\
    while (high - low > 1) {{                                                               \\
        int middle = (low + high) / 2;                                                      \\
        if (rows[middle].first <= (long long)TILE_INDEX) low = middle; else high = middle;  \\
    }}                                                                                      \\
    const Row row = rows[low];                                                              \\
    const unsigned int units = (unsigned int)row.units;                                     \\
    const unsigned int start = (unsigned int)(TILE_INDEX - row.first) * {TILE}u;            \\
    const unsigned int stop = units - start < {TILE}u ? units : start + {TILE}u;            \\
    for (unsigned int i = start + FIRST_UNIT; i < stop; i += STEP) {{                       \\
        unsigned int rest = i;                                                              \\
        char* at = base + row.offset;                                                       \\
        for (int d = {NDIM - 1}; d > 0; --d) {{                                             \\
            const unsigned int n = (unsigned int)row.count[d - 1];                          \\
            const unsigned int above = n == 1u ? rest : rest / n;                           \\
            at += (long long)(rest - above * n) * row.stride[d];                            \\
            rest = above;                                                                   \\
        }}                                                                                  \\
        T* cell = (T*)(at + (long long)rest * row.stride[0]);                               \\
        T* place = (T*)(packed + row.packed) + i;                                           \\
        if (PACK) *place = *cell; else *cell = *place;                                      \\
    }}                                                                                      \\
}}

COPY_SEGMENTS(pack_1, unsigned char, 1)
COPY_SEGMENTS(pack_2, unsigned short, 1)
COPY_SEGMENTS(pack_4, unsigned int, 1)
COPY_SEGMENTS(pack_8, uint2, 1)
COPY_SEGMENTS(pack_16, uint4, 1)
COPY_SEGMENTS(unpack_1, unsigned char, 0)
COPY_SEGMENTS(unpack_2, unsigned short, 0)
COPY_SEGMENTS(unpack_4, unsigned int, 0)
COPY_SEGMENTS(unpack_8, uint2, 0)
COPY_SEGMENTS(unpack_16, uint4, 0)

#if !defined(__CUDACC__) && !defined(__HIPCC__)
typedef void (*Kernel)(char*, char*, const Row*, int);
extern void launch(Kernel kernel, unsigned int tiles, char* base, char* packed, const Row* rows, int segments)
{{
    for (tile_index = 0; tile_index < tiles; ++tile_index) kernel(base, packed, rows, segments);
}}
#endif
"""

NAMES = tuple(f"{way}_{unit}" for way in ("pack", "unpack") for unit in UNITS)
