// Runs the CUDA source that TVM makes on a CPU: threads of a block are fibers that give way to one another at barriers.
//
// What it shows of a kernel is what a GPU would compute, its barriers included: a block's threads run one after the
// other from barrier to barrier, in ascending or in descending order, so that a barrier that lacks gives other numbers in
// one of the orders, and one that not every thread reaches ends the run. Matrices of tensor cores are held whole by each
// thread of a warp. What it does not show: speed, registers, memory models.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __restrict__ __restrict
#define __launch_bounds__(n)
#define __align__(n) alignas(n)
#define __CUDA_ARCH__ 870
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

struct dim3 { int x = 1, y = 1, z = 1; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace fibers {
enum State { ready, at_warp, at_block, done };
struct Fiber { ucontext_t context; State state; int line; dim3 index; unsigned char slot[16]; };
static std::vector<Fiber> all;
static std::vector<char> stacks;
static ucontext_t scheduler;
static int current;
static void (*body)();
static const char* fault;  // what a GPU would have refused
constexpr int stack_bytes = 256 << 10, warp = 32;

inline void wait(State state, int line) {
  Fiber& me = all[current];
  me.state = state;
  me.line = line;
  swapcontext(&me.context, &scheduler);
}
inline void enter() {
  body();
  all[current].state = done;
  swapcontext(&all[current].context, &scheduler);
}
inline void run_block(bool descending) {
  int count = int(all.size());
  for (;;) {
    bool ran = false;
    for (int i = 0; i < count; ++i) {
      current = descending ? count - 1 - i : i;
      if (all[current].state != ready) continue;
      ran = true;
      threadIdx = all[current].index;
      swapcontext(&scheduler, &all[current].context);
    }
    if (ran) continue;
    // Every thread waits or is done. Those that wait for their warp have with them all that will come.
    bool released = false;
    for (Fiber& fiber : all)
      if (fiber.state == at_warp) fiber.state = ready, released = true;
    if (released) continue;
    int waiting = 0, line = 0;
    for (Fiber& fiber : all)
      if (fiber.state == at_block) {
        if (waiting && fiber.line != line) fault = "threads wait at different barriers";
        ++waiting, line = fiber.line;
      }
    if (waiting && waiting < count) fault = "some threads do not reach a barrier";
    if (!waiting || fault) return;
    for (Fiber& fiber : all) fiber.state = ready;
  }
}
// What a GPU would have refused, or nothing.
inline const char* launch(void (*kernel)(), dim3 grid, dim3 block, bool descending) {
  int count = block.x * block.y * block.z;
  body = kernel;
  gridDim = grid;
  blockDim = block;
  all.resize(count);
  stacks.resize(size_t(count) * stack_bytes);
  for (int z = 0; z < grid.z; ++z)
    for (int y = 0; y < grid.y; ++y)
      for (int x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        for (int i = 0; i < count; ++i) {
          Fiber& fiber = all[i];
          getcontext(&fiber.context);
          fiber.context.uc_stack.ss_sp = stacks.data() + size_t(i) * stack_bytes;
          fiber.context.uc_stack.ss_size = stack_bytes;
          fiber.context.uc_link = nullptr;
          fiber.state = ready;
          fiber.index = {i % block.x, i / block.x % block.y, i / block.x / block.y};
          makecontext(&fiber.context, enter, 0);
        }
        run_block(descending);
        if (fault) return fault;
      }
  return nullptr;
}
template <class T> T exchange(T value, int lane, int width) {
  static_assert(sizeof(T) <= 16);
  int me = current;
  std::memcpy(all[me].slot, &value, sizeof(T));
  wait(at_warp, 0);
  int first = me / width * width;
  T got = value;
  int other = first + lane;
  if (lane >= 0 && lane < width && other < int(all.size())) std::memcpy(&got, all[other].slot, sizeof(T));
  wait(at_warp, 0);
  return got;
}
}  // namespace fibers

#define __syncthreads() fibers::wait(fibers::at_block, __LINE__)
#define __syncwarp(...) fibers::wait(fibers::at_warp, __LINE__)
inline unsigned __activemask() { return 0xffffffffu; }
template <class T> T __shfl_sync(unsigned, T v, int lane, int width) {
  return fibers::exchange(v, lane % width, width);
}
template <class T> T __shfl_down_sync(unsigned, T v, int delta, int width) {
  return fibers::exchange(v, fibers::current % width + delta, width);
}
template <class T> T __shfl_up_sync(unsigned, T v, int delta, int width) {
  return fibers::exchange(v, fibers::current % width - delta, width);
}

using half = _Float16;
using __half = _Float16;
struct half2 { half x, y; };
using __half2 = half2;
inline half2 make_half2(half x, half y) { return {x, y}; }
inline float __half2float(half x) { return float(x); }
inline half __float2half(float x) { return half(x); }
inline half __float2half_rn(float x) { return half(x); }
inline bool __hgt(half a, half b) { return a > b; }
inline bool __hlt(half a, half b) { return a < b; }
inline bool __hisnan(half a) { return a != a; }
inline half hexp(half x) { return half(std::exp(float(x))); }
inline half hsqrt(half x) { return half(std::sqrt(float(x))); }
inline half hrsqrt(half x) { return half(1 / std::sqrt(float(x))); }
inline half hlog(half x) { return half(std::log(float(x))); }
inline half htanh(half x) { return half(std::tanh(float(x))); }
inline half __habs(half x) { return x < half(0) ? half(-x) : x; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline float min(float a, float b) { return std::fmin(a, b); }
template <class T, class U> requires(std::is_integral_v<T> && std::is_integral_v<U>)
auto max(T a, U b) { std::common_type_t<T, U> x = a, y = b; return x > y ? x : y; }
template <class T, class U> requires(std::is_integral_v<T> && std::is_integral_v<U>)
auto min(T a, U b) { std::common_type_t<T, U> x = a, y = b; return x < y ? x : y; }

#define VECTOR(T, NAME) \
  struct alignas(2 * sizeof(T)) NAME##2 { T x, y; }; \
  struct NAME##3 { T x, y, z; }; \
  struct alignas(4 * sizeof(T)) NAME##4 { T x, y, z, w; }; \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; } \
  inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; } \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR(float, float)
VECTOR(double, double)
VECTOR(int, int)
VECTOR(unsigned, uint)
VECTOR(short, short)
VECTOR(unsigned short, ushort)
VECTOR(signed char, char)
VECTOR(unsigned char, uchar)
VECTOR(long long, longlong)
VECTOR(unsigned long long, ulonglong)
#undef VECTOR

namespace nvcuda::wmma {
struct matrix_a; struct matrix_b; struct accumulator; struct row_major; struct col_major;
enum layout_t { mem_row_major, mem_col_major };
template <class Use, int m, int n, int k, class T, class Layout = row_major> struct fragment {
  static constexpr int rows = std::is_same_v<Use, matrix_b> ? k : m, columns = std::is_same_v<Use, matrix_a> ? k : n;
  static constexpr bool turned = std::is_same_v<Layout, col_major>;
  T at[rows][columns];
};
template <class F, class V> void fill_fragment(F& f, V value) {
  for (auto& row : f.at) for (auto& x : row) x = value;
}
// What CUDA asks of addresses: 32 bytes for a fragment, 16 for the way from line to line.
inline void check(const void* p, size_t line_bytes) {
  if (reinterpret_cast<uintptr_t>(p) % 32 || line_bytes % 16) fibers::fault = "a fragment is not aligned";
}
template <class F, class T> void load_matrix_sync(F& f, const T* p, unsigned stride) {
  check(p, stride * sizeof(T));
  fibers::wait(fibers::at_warp, 0);
  for (int i = 0; i < F::rows; ++i)
    for (int j = 0; j < F::columns; ++j) f.at[i][j] = F::turned ? p[j * stride + i] : p[i * stride + j];
}
template <class D, class A, class B, class C> void mma_sync(D& d, const A& a, const B& b, const C& c) {
  D result;
  for (int i = 0; i < D::rows; ++i)
    for (int j = 0; j < D::columns; ++j) {
      auto sum = c.at[i][j];
      for (int k = 0; k < A::columns; ++k) sum += decltype(sum)(a.at[i][k]) * decltype(sum)(b.at[k][j]);
      result.at[i][j] = sum;
    }
  d = result;
}
template <class T, class F> void store_matrix_sync(T* p, const F& f, unsigned stride, layout_t layout) {
  check(p, stride * sizeof(T));
  fibers::wait(fibers::at_warp, 0);
  for (int i = 0; i < F::rows; ++i)
    for (int j = 0; j < F::columns; ++j) p[layout == mem_row_major ? i * stride + j : j * stride + i] = f.at[i][j];
}
}  // namespace nvcuda::wmma
