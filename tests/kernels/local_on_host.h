// Runs the CUDA source of local:S on a CPU, one fiber per thread, so that its index arithmetic, its
// masks and its barriers are what is tested. SOURCE names the file; its constants come with -D.
//
// A matrix instruction here adds its 16 products in FP64 and rounds once: not the bits of a GPU, but
// like a GPU's they depend on a row of x and a row of A alone.
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define FLIPTRACE_ON_HOST
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

using std::min;
struct Index { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

static Index threadIdx, blockIdx, gridDim;
float4 shared_memory[8192];

static inline float __fadd_rn(float left, float right) { return left + right; }
static inline float __fmul_rn(float left, float right) { return left * right; }
static inline int __ffs(unsigned word) { return __builtin_ffs((int)word); }
static inline float __int_as_float(int bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline void atomicAdd(unsigned long long* at, unsigned long long by) { *at += by; }

struct Fiber { ucontext_t context; std::vector<char> stack; bool done; };
struct Barrier { int arrived, generation; };
struct Lane { unsigned word[6]; };
static std::vector<Fiber> fibers;
static std::vector<Barrier> barriers;  // one per warp, the last for the block
static std::vector<Lane> lanes;
static ucontext_t scheduler;
static unsigned current;

static void wait_at(Barrier& barrier, int expected) {
  const int generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) swapcontext(&fibers[current].context, &scheduler);
}
static void wait_warp() { wait_at(barriers[threadIdx.x / 32], 32); }
static void __syncthreads() { wait_at(barriers.back(), (int)fibers.size()); }

static unsigned __ballot_sync(unsigned, bool vote) {
  lanes[threadIdx.x].word[0] = vote;
  wait_warp();
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= lanes[threadIdx.x / 32 * 32 + i].word[0] << i;
  wait_warp();
  return result;
}
static int __shfl_sync(unsigned, int value, int from) {
  lanes[threadIdx.x].word[0] = (unsigned)value;
  wait_warp();
  const int result = (int)lanes[threadIdx.x / 32 * 32 + from].word[0];
  wait_warp();
  return result;
}

static const char *readable[8][2];  // x and the slices of A: first byte, end
static uint4 load_16_bytes(const void* from) {
  const char* at = (const char*)from;
  bool inside = false;
  for (auto& range : readable) inside |= at >= range[0] && at + 16 <= range[1];
  if (!inside || (uintptr_t)at % 16) {
    fprintf(stderr, "a load of 16 bytes %s\n", inside ? "is not aligned" : "is out of bounds");
    abort();
  }
  uint4 v;
  memcpy(&v, from, 16);
  return v;
}
static uint4 load_x(const unsigned short* from) { return load_16_bytes(from); }
static uint4 load_a(const unsigned short* from) { return load_16_bytes(from); }

static float widen(unsigned word, int high) {
  const uint32_t bits = high ? word & 0xffff0000u : word << 16;  // BF16
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
// The layout of m16n8k16 as the PTX manual gives it.
static void multiply_add(float (&d)[4], unsigned x0, unsigned x1, unsigned x2, unsigned x3,
                         unsigned a0, unsigned a1) {
  lanes[threadIdx.x] = Lane{{x0, x1, x2, x3, a0, a1}};
  wait_warp();
  const Lane* warp = &lanes[threadIdx.x / 32 * 32];
  const int lane = threadIdx.x % 32;
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int owner = k % 8 / 2;
      const unsigned x = warp[row % 8 * 4 + owner].word[row / 8 + k / 8 * 2];
      const unsigned a = warp[column * 4 + owner].word[4 + k / 8];
      sum += (double)widen(x, k % 2) * widen(a, k % 2);
    }
    d[e] = (float)(d[e] + sum);
  }
  wait_warp();
}

#define KERNEL kernel_on_host
#include SOURCE

static const Arguments* arguments;
static void body() {
  kernel_on_host(*arguments);
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

// Runs a grid block after block; `backwards` starts the threads of a block from the last.
extern "C" int run_on_host(const Arguments* p, const uint64_t* ranges, int grid_x, int grid_y,
                           int grid_z, int shared_bytes, int backwards) {
  arguments = p;
  for (int i = 0; i < 16; ++i) readable[i / 2][i % 2] = (const char*)ranges[i];
  if (shared_bytes > (int)sizeof(shared_memory)) return 1;
  const float4 canary = {12345.f, 12345.f, 12345.f, 12345.f};
  fibers.resize(THREADS);
  lanes.resize(THREADS);
  gridDim = {(unsigned)grid_x, (unsigned)grid_y, (unsigned)grid_z};
  for (int block = 0; block < grid_x * grid_y * grid_z; ++block) {
    blockIdx = {unsigned(block % grid_x), unsigned(block / grid_x % grid_y),
                unsigned(block / grid_x / grid_y)};
    std::fill(std::begin(shared_memory), std::end(shared_memory), canary);
    barriers.assign(THREADS / 32 + 1, Barrier{0, 0});
    for (auto& fiber : fibers) {
      fiber.stack.resize(1 << 16);
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, body, 0);
    }
    for (int left = THREADS; left > 0;) {
      for (int i = 0; i < THREADS; ++i) {
        current = backwards ? THREADS - 1 - i : i;
        if (fibers[current].done) continue;
        threadIdx = {current, 0, 0};
        swapcontext(&scheduler, &fibers[current].context);
        left -= fibers[current].done;
      }
    }
    for (size_t i = (shared_bytes + 15) / 16; i < std::size(shared_memory); ++i)
      if (shared_memory[i].x != canary.x) return 2;
  }
  return 0;
}
