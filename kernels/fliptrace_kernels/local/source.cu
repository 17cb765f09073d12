// LoRA shrink whose splits are added inside one block: local:S. Compiled at run time by NVRTC.
//
// Order, the same for every arrangement. K is cut into blocks of 32; block b belongs to split b % S.
// A split's partial is one chain of m16n8k16 matrix instructions from +0.0 over the rounds of its
// blocks, two per block: of each run of 8 elements the first takes elements 0-3, the second 4-7.
// Every split has as many rounds as the longest; what lies beyond K counts as 0. Four consecutive
// splits are a group: ((p0 + p1) + p2) + p3. The total is the groups' sums in increasing order,
// starting from the first; then total * scale.
//
// Why an arrangement cannot change a bit: an element of a matrix instruction's result depends on its
// own row of the first operand and its own column of the second. Which token, rank and split sit on
// which row and column, and what the others hold, is free. With DIAGONAL = C > 1 an instruction
// carries C splits at once, C * tokens on its rows and C * ranks on its columns, and only results
// whose row and column belong to the same split are used.
//
// Constants given by the compiler's command line:
//   KERNEL            name of the kernel
//   K, RANK, SPLITS   size of the sum, rows of one A slice, S (8, 16, 32 or 64)
//   DIAGONAL          C: splits per instruction (1, 2, 4 or 8)
//   HALVES            1: rows 8-15 of an instruction stay empty; 2: they are used
//   TOKEN_TILES, RANK_TILES   instruction tiles per warp
//   TOKEN_WARPS, RANK_WARPS   warps next to each other; along the splits there are UNITS of them
//   TURNS             times that a warp goes over K, each time for other splits
//   DEPTH             fragments loaded ahead
//   MIN_BLOCKS        blocks that must fit a multiprocessor, for the register allocator
//   VECTOR            1: 16-byte loads (K % 8 == 0 and everything aligned); 0: element by element
//   ADAPTERS_MODE     0: no mapping; 1: one adapter and a mapping; 2: several adapters
//   PARTIALS          0: none; 1: also stored, unscaled; 2: stored, and nothing else is done
//   ELEMENT           "bf16" or "f16"

#define NO_MAPPING 0
#define ONE_ADAPTER 1
#define MANY_ADAPTERS 2

constexpr int BLOCK_K = 32;
constexpr int GROUP = 4;
constexpr int C = DIAGONAL;
constexpr int SETS = C >= GROUP ? 1 : GROUP / C;  // chains of one warp: together whole groups
constexpr int UNITS = SPLITS / (C * SETS * TURNS);  // warps along the splits
constexpr int TURN_K = UNITS * SETS * C * BLOCK_K;  // from one turn's first element to the next's
constexpr int TOKENS_PER_TILE = 8 * HALVES / C;
constexpr int RANKS_PER_TILE = 8 / C;
constexpr int TOKENS = TOKEN_WARPS * TOKEN_TILES * TOKENS_PER_TILE;  // of one block
constexpr int RANKS = RANK_WARPS * RANK_TILES * RANKS_PER_TILE;
constexpr int THREADS = 32 * UNITS * TOKEN_WARPS * RANK_WARPS;
constexpr int ROUNDS = ((K + BLOCK_K - 1) / BLOCK_K + SPLITS - 1) / SPLITS;
constexpr int STEPS = ROUNDS * SETS;
constexpr int TILES_PER_SLICE = (RANK + RANKS_PER_TILE - 1) / RANKS_PER_TILE;
constexpr bool UNROLLED = STEPS * TOKEN_TILES * RANK_TILES <= 192;
constexpr int SUM_STRIDE = SPLITS + 4;  // with C > 1, so that stores do not meet on a bank
constexpr int MAX_TOKENS = 64;
constexpr int PER_LANE = (TOKENS + 31) / 32;  // tokens whose adapter one lane holds

static_assert(UNITS >= 1 && TOKENS <= MAX_TOKENS && THREADS <= 1024,
              "an arrangement that does not exist");
static_assert(TURNS == 1 || STEPS % DEPTH == 0, "a turn must end where the fragments ahead begin");

typedef unsigned short Element;  // 16 bits of a BF16 or FP16 number
typedef unsigned int Word;

struct Arguments {
  const Element* x;  // [rows, K]
  long long x_row;   // strides in elements throughout
  const int* mapping;
  float* out;  // [slices, rows, RANK]
  long long out_slice, out_row, out_rank;
  float* partials;  // [SPLITS, slices, rows, RANK]
  long long partials_split, partials_slice;
  unsigned long long* launch_counter;
  const Element* a[4];  // each [adapters, RANK, K]
  long long a_adapter[4], a_row[4];
  int rows, slices, adapters;
  float scale;
};

#ifndef FLIPTRACE_ON_HOST
__device__ __forceinline__ uint4 load_x(const Element* from) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ __forceinline__ uint4 load_a(const Element* from) {
  uint4 v;
#if TOKEN_WARPS > 1  // they share it through the L1 cache
  asm volatile("ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
#else
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
#endif
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// d = x * a + d; x is 16 x 16, a is 16 x 8, d is 16 x 8.
__device__ __forceinline__ void multiply_add(float (&d)[4], Word x0, Word x1, Word x2, Word x3,
                                             Word a0, Word a1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT "." ELEMENT
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(a0), "r"(a1));
}
#endif

extern __shared__ float4 shared_memory[];  // adapters of MAX_TOKENS tokens, then the sums

struct Fragments {
  uint4 x[TOKEN_TILES][HALVES];
  uint4 a[RANK_TILES];
};

// Where a thread stands. Row g (and g + 8) of x's fragment and column g of a's belong to it, and of
// each block of K the elements 8q .. 8q + 7.
struct Place {
  int g, q, unit, token_warp, rank_warp;
  int first_k;  // of this thread, in turn 0, round 0, set 0
  long long first_row;
  int first_tile;  // of this block, counted over all slices
};

__device__ __forceinline__ Place find_place() {
  Place at;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  at.g = lane / 4;
  at.q = lane % 4;
  at.unit = warp % UNITS;
  at.rank_warp = warp / UNITS % RANK_WARPS;
  at.token_warp = warp / UNITS / RANK_WARPS;
  at.first_k = (at.unit * SETS * C + at.g % C) * BLOCK_K + 8 * at.q;
  at.first_row = (long long)blockIdx.y * TOKENS;
  at.first_tile = blockIdx.x * (RANK_WARPS * RANK_TILES);
  return at;
}

// The first `valid` of 8 elements, the others 0.
__device__ __forceinline__ uint4 load_elements(const Element* from, int valid) {
  Word word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Word low = 2 * i < valid ? from[2 * i] : 0;
    const Word high = 2 * i + 1 < valid ? from[2 * i + 1] : 0;
    word[i] = low | high << 16;
  }
  return uint4{word[0], word[1], word[2], word[3]};
}

__device__ __forceinline__ void load_step(Fragments& into, const Element* const (&x)[TOKEN_TILES][HALVES],
                                          const Element* const (&a)[RANK_TILES], int step,
                                          int later, int first_k) {
  const int round = step / SETS, set = step % SETS;
  const int offset = (round * SPLITS + set * C) * BLOCK_K + later * TURN_K;
  const bool whole = (round + 1) * (SPLITS * BLOCK_K) <= K;  // a constant where unrolled
  if (whole && VECTOR) {
#pragma unroll
    for (int tb = 0; tb < RANK_TILES; ++tb) into.a[tb] = load_a(a[tb] + offset);
#pragma unroll
    for (int ta = 0; ta < TOKEN_TILES; ++ta)
#pragma unroll
      for (int h = 0; h < HALVES; ++h) into.x[ta][h] = load_x(x[ta][h] + offset);
    return;
  }
  const int valid = K - first_k - offset;
  const uint4 zero = {0, 0, 0, 0};
#pragma unroll
  for (int tb = 0; tb < RANK_TILES; ++tb) {
    if (!VECTOR) {
      into.a[tb] = load_elements(a[tb] + offset, valid);
    } else {
      into.a[tb] = zero;
      if (valid > 0) into.a[tb] = load_a(a[tb] + offset);
    }
  }
#pragma unroll
  for (int ta = 0; ta < TOKEN_TILES; ++ta)
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      if (!VECTOR) {
        into.x[ta][h] = load_elements(x[ta][h] + offset, valid);
      } else {
        into.x[ta][h] = zero;
        if (valid > 0) into.x[ta][h] = load_x(x[ta][h] + offset);
      }
    }
}

typedef float Chains[TOKEN_TILES][RANK_TILES][4];

__device__ __forceinline__ void multiply_step(Chains& chain, const Fragments& f) {
#pragma unroll
  for (int ta = 0; ta < TOKEN_TILES; ++ta)
#pragma unroll
    for (int tb = 0; tb < RANK_TILES; ++tb) {
      const uint4 upper = f.x[ta][0], a = f.a[tb];
      if (HALVES == 2) {
        const uint4 lower = f.x[ta][HALVES - 1];
        multiply_add(chain[ta][tb], upper.x, lower.x, upper.y, lower.y, a.x, a.y);
      } else {
        multiply_add(chain[ta][tb], upper.x, 0, upper.y, 0, a.x, a.y);
      }
    }
#pragma unroll
  for (int ta = 0; ta < TOKEN_TILES; ++ta)
#pragma unroll
    for (int tb = 0; tb < RANK_TILES; ++tb) {
      const uint4 upper = f.x[ta][0], a = f.a[tb];
      if (HALVES == 2) {
        const uint4 lower = f.x[ta][HALVES - 1];
        multiply_add(chain[ta][tb], upper.z, lower.z, upper.w, lower.w, a.z, a.w);
      } else {
        multiply_add(chain[ta][tb], upper.z, 0, upper.w, 0, a.z, a.w);
      }
    }
}

// Where group sums lie (C == 1). The shift by 8 keeps four rows that are stored together apart.
__device__ __forceinline__ int sum_index(int group, int t, int n) {
  return (group * TOKENS + t) * RANKS + (RANKS / 8 % 2 ? n : n ^ t / 2 % 2 * 8);
}

// Slice and rank of column n of this block; false where there is none.
__device__ __forceinline__ bool find_column(const Arguments& p, const Place& at, int n, int& slice,
                                            int& rank) {
  const int tile = at.first_tile + n / RANKS_PER_TILE;
  slice = tile / TILES_PER_SLICE;
  rank = tile % TILES_PER_SLICE * RANKS_PER_TILE + n % RANKS_PER_TILE;
  return slice < p.slices && rank < RANK;
}

__device__ __forceinline__ void store_partial(const Arguments& p, const Place& at, int adapter,
                                              int split, int t, int n, float value) {
  const long long row = at.first_row + t;
  int slice, rank;
  if (row >= p.rows || !find_column(p, at, n, slice, rank)) return;
  if (ADAPTERS_MODE != NO_MAPPING && p.mapping[row] != adapter) return;
  p.partials[split * p.partials_split + slice * p.partials_slice + row * RANK + rank] = value;
}

// A row without an adapter is 0; one whose adapter does not exist is NaN.
__device__ __forceinline__ float without_adapter(int adapter) {
  return adapter < 0 ? 0.0f : __int_as_float(0x7fc00000);
}

// Stores what the chains of one warp and turn came to: sums of groups, or with C > 1 of splits.
__device__ __forceinline__ void keep_sums(
    const Arguments& p, const Place& at, int adapter, int part,
    const float (&chain)[SETS][TOKEN_TILES][RANK_TILES][4], float* sums) {
  // Element e of a result is row g (e < 2) or g + 8, column 2q + e % 2.
  if constexpr (C == 1) {
#pragma unroll
    for (int ta = 0; ta < TOKEN_TILES; ++ta)
#pragma unroll
      for (int tb = 0; tb < RANK_TILES; ++tb)
#pragma unroll
        for (int e = 0; e < 2 * HALVES; ++e) {
          const int t = (at.token_warp * TOKEN_TILES + ta) * TOKENS_PER_TILE + at.g + e / 2 * 8;
          const int n = (at.rank_warp * RANK_TILES + tb) * RANKS_PER_TILE + 2 * at.q + e % 2;
          float group = chain[0][ta][tb][e];
#pragma unroll
          for (int u = 1; u < SETS; ++u) group = __fadd_rn(group, chain[u][ta][tb][e]);
          if (PARTIALS) {
#pragma unroll
            for (int u = 0; u < SETS; ++u)
              store_partial(p, at, adapter, part * SETS + u, t, n, chain[u][ta][tb][e]);
          }
          if (PARTIALS != 2) sums[sum_index(part, t, n)] = group;
        }
  } else {
    // Of the two columns one at most belongs to the split of row g: the one as odd as g.
    if (at.g % C / 2 == at.q % (C > 1 ? C / 2 : 1)) {
#pragma unroll
      for (int u = 0; u < SETS; ++u)
#pragma unroll
        for (int ta = 0; ta < TOKEN_TILES; ++ta)
#pragma unroll
          for (int tb = 0; tb < RANK_TILES; ++tb)
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
              const int t =
                  (at.token_warp * TOKEN_TILES + ta) * TOKENS_PER_TILE + (at.g + 8 * h) / C;
              const int n = (at.rank_warp * RANK_TILES + tb) * RANKS_PER_TILE + 2 * at.q / C;
              const int split = (part * SETS + u) * C + at.g % C;
              const float value =
                  at.g % 2 ? chain[u][ta][tb][2 * h + 1] : chain[u][ta][tb][2 * h];
              if (PARTIALS) store_partial(p, at, adapter, split, t, n, value);
              if (PARTIALS != 2) sums[(t * RANKS + n) * SUM_STRIDE + split] = value;
            }
    }
  }
}

// Adds what all warps stored, and writes the result.
__device__ __forceinline__ void add_sums(const Arguments& p, const Place& at, int adapter,
                                         const int* token_adapters, const float* sums) {
  for (int o = threadIdx.x; o < TOKENS * RANKS; o += THREADS) {
    const int t = o / RANKS, n = o % RANKS;
    const long long row = at.first_row + t;
    int slice, rank;
    if (row >= p.rows || !find_column(p, at, n, slice, rank)) continue;
    if (ADAPTERS_MODE == MANY_ADAPTERS && token_adapters[t] != adapter) continue;
    float total = 0.0f;
#pragma unroll
    for (int group = 0; group < SPLITS / GROUP; ++group) {
      float sum;
      if (C == 1) {
        sum = sums[sum_index(group, t, n)];
      } else {
        const float4 v = *reinterpret_cast<const float4*>(sums + o * SUM_STRIDE + GROUP * group);
        sum = __fadd_rn(__fadd_rn(__fadd_rn(v.x, v.y), v.z), v.w);
      }
      total = group == 0 ? sum : __fadd_rn(total, sum);
    }
    float value = __fmul_rn(total, p.scale);
    if (ADAPTERS_MODE == ONE_ADAPTER && token_adapters[t] != 0)
      value = without_adapter(token_adapters[t]);
    p.out[slice * p.out_slice + row * p.out_row + rank * p.out_rank] = value;
  }
}

__device__ __forceinline__ void sum_tile(const Arguments& p, const Place& at, int adapter,
                                         const int* token_adapters, float* sums) {
  const Element* x[TOKEN_TILES][HALVES];
  const Element* a[RANK_TILES];
  // Rows, ranks and tiles that do not exist read their last neighbour's: their results are not used.
#pragma unroll
  for (int tb = 0; tb < RANK_TILES; ++tb) {
    int tile = at.first_tile + at.rank_warp * RANK_TILES + tb;
    tile = min(tile, p.slices * TILES_PER_SLICE - 1);
    const int slice = tile / TILES_PER_SLICE;
    const int rank = min(tile % TILES_PER_SLICE * RANKS_PER_TILE + at.g / C, RANK - 1);
    a[tb] = p.a[slice] + adapter * p.a_adapter[slice] + rank * p.a_row[slice] + at.first_k;
  }
#pragma unroll
  for (int ta = 0; ta < TOKEN_TILES; ++ta)
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const int t = (at.token_warp * TOKEN_TILES + ta) * TOKENS_PER_TILE + (at.g + 8 * h) / C;
      const long long row = at.first_row + t;
      x[ta][h] = p.x + (row < p.rows ? row : p.rows - 1) * p.x_row + at.first_k;
    }

  Fragments ahead[DEPTH];
#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
    if (d < STEPS) load_step(ahead[d], x, a, d, 0, at.first_k);
  int first_k = at.first_k;
#pragma unroll 1
  for (int turn = 0; turn < TURNS; ++turn) {
    float chain[SETS][TOKEN_TILES][RANK_TILES][4];
#pragma unroll
    for (int u = 0; u < SETS; ++u)
#pragma unroll
      for (int ta = 0; ta < TOKEN_TILES; ++ta)
#pragma unroll
        for (int tb = 0; tb < RANK_TILES; ++tb)
#pragma unroll
          for (int e = 0; e < 4; ++e) chain[u][ta][tb][e] = 0.0f;

    const auto load_ahead = [&](Fragments& into, int step) {
      if (step + DEPTH < STEPS)
        load_step(into, x, a, step + DEPTH, 0, first_k);
      else if (turn + 1 < TURNS)
        load_step(into, x, a, step + DEPTH - STEPS, 1, first_k);
    };
    if constexpr (UNROLLED) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        multiply_step(chain[step % SETS], ahead[step % DEPTH]);
        load_ahead(ahead[step % DEPTH], step);
      }
    } else {
      static_assert(UNROLLED || (DEPTH & (DEPTH - 1)) == 0, "a rolled loop needs a power of two");
      constexpr int BODY = DEPTH > SETS ? DEPTH : SETS;
#pragma unroll 1
      for (int base = 0; base < STEPS; base += BODY) {
#pragma unroll
        for (int d = 0; d < BODY; ++d) {
          if (base + d < STEPS) {
            multiply_step(chain[d % SETS], ahead[d % DEPTH]);
            load_ahead(ahead[d % DEPTH], base + d);
          }
        }
      }
    }
    keep_sums(p, at, adapter, turn * UNITS + at.unit, chain, sums);
#pragma unroll
    for (int tb = 0; tb < RANK_TILES; ++tb) a[tb] += TURN_K;
#pragma unroll
    for (int ta = 0; ta < TOKEN_TILES; ++ta)
#pragma unroll
      for (int h = 0; h < HALVES; ++h) x[ta][h] += TURN_K;
    first_k += TURN_K;
  }
  if constexpr (PARTIALS == 2) return;
  __syncthreads();
  add_sums(p, at, adapter, token_adapters, sums);
}

// Rows of this block's tile that no adapter computes.
__device__ __forceinline__ void fill_rows(const Arguments& p, const Place& at,
                                          const int* token_adapters) {
  for (int o = threadIdx.x; o < TOKENS * RANKS; o += THREADS) {
    const int t = o / RANKS, n = o % RANKS;
    const long long row = at.first_row + t;
    int slice, rank;
    if (row >= p.rows || !find_column(p, at, n, slice, rank)) continue;
    const int adapter = token_adapters[t];
    if (adapter >= 0 && adapter < p.adapters) continue;
    p.out[slice * p.out_slice + row * p.out_row + rank * p.out_rank] = without_adapter(adapter);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    KERNEL(const __grid_constant__ Arguments p) {
  int* token_adapters = reinterpret_cast<int*>(shared_memory);
  float* sums = reinterpret_cast<float*>(token_adapters + MAX_TOKENS);
  const Place at = find_place();

  if (p.launch_counter != nullptr && threadIdx.x == 0 &&
      (blockIdx.x | blockIdx.y | blockIdx.z) == 0)
    atomicAdd(p.launch_counter, 1ull);

  if constexpr (ADAPTERS_MODE == NO_MAPPING) {
    sum_tile(p, at, 0, token_adapters, sums);
  } else {
    // Every warp reads the adapters of the block's tokens, PER_LANE per lane.
    const int lane = threadIdx.x % 32;
    int own[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int t = 32 * i + lane;
      own[i] = -1;
      if (t < TOKENS && at.first_row + t < p.rows) own[i] = p.mapping[at.first_row + t];
      if (threadIdx.x < 32) token_adapters[t] = own[i];
    }
    if constexpr (ADAPTERS_MODE == ONE_ADAPTER) {
      // With few tokens the weights are read before it is known whether anyone needs them.
      if constexpr (TOKENS > 8 && PARTIALS != 2) {
        bool wanted = false;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) wanted |= own[i] == 0;
        if (__ballot_sync(0xffffffffu, wanted) == 0) {
          __syncthreads();
          fill_rows(p, at, token_adapters);
          return;
        }
      }
      sum_tile(p, at, 0, token_adapters, sums);
    } else {
      // The adapters of the tile, in order of their first token, are dealt to gridDim.z blocks.
      Word left[PER_LANE];
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        left[i] = __ballot_sync(0xffffffffu, own[i] >= 0 && own[i] < p.adapters);
      __syncthreads();
      if (blockIdx.z == 0 && PARTIALS != 2) fill_rows(p, at, token_adapters);
      for (int turn = 0;; ++turn) {
        int first = -1;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; --i)
          if (left[i] != 0) first = 32 * i + __ffs(left[i]) - 1;
        if (first < 0) break;
        const int adapter = token_adapters[first];
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) left[i] &= ~__ballot_sync(0xffffffffu, own[i] == adapter);
        if (turn % gridDim.z != blockIdx.z) continue;
        sum_tile(p, at, adapter, token_adapters, sums);
        __syncthreads();
      }
    }
  }
}
