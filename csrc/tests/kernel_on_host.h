// What a kernel needs to compile as plain C++ and run on the host. Included by cuda/launch.h where
// no CUDA compiler is at work.
//
// The threads of a kernel run one after the other. Where they talk to each other (shuffles, votes,
// barriers) the kernel is launched with launch_collective(), and each thread gets a stack of its
// own: threads that could go on do so in random order. A barrier that not all of its threads reach
// ends the process and says who waits for whom. Kernels with shared memory do not compile here.
#pragma once

#include <cuda_runtime.h>
#include <math.h>  // nvcc brings it along: without it, host builds would hide a missing include

#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/rows_task.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
// CUDA's headers make it nothing on the host, and each thread would get its own.
#undef __shared__
#define __shared__ kernels_on_the_host_have_no_shared_memory

#define threadIdx (::hscache::cuda::host::running.thread)
#define blockIdx (::hscache::cuda::host::running.block)
#define blockDim (::hscache::cuda::host::running.block_size)
#define gridDim (::hscache::cuda::host::running.grid_size)

namespace hscache::cuda::host {

struct Running {
  uint3 thread;
  uint3 block;
  dim3 block_size;
  dim3 grid_size;
};
extern Running running;

// A kernel with its arguments, as they were when it was launched.
struct Bound {
  std::function<void()> run_thread;  // null for a kernel that was never registered
  bool collective = false;           // its threads talk to each other
  std::vector<const void*> memory;   // what its arguments point to, as far as they say
};
// Makes one of the arguments that the pointers point to.
using Binder = Bound (*)(const void* kernel, void** arguments);

void register_kernel(const void* kernel, Binder binder, bool collective);

// Where an argument points to.
template <class T>
std::vector<const void*> memory_of(const T& argument) {
  if constexpr (std::is_pointer_v<T>) return {argument};
  return {};
}
inline std::vector<const void*> memory_of(const RowsTask& task) {
  const auto* const bad_id = const_cast<const std::int64_t*>(task.tokens.bad_id);
  return {task.paged.data,        task.rows.data, task.tokens.ids.data(),
          task.conversion.scales, bad_id,         task.conversion.non_finite_rows};
}

template <class... Parameters>
void register_kernel(void (*kernel)(Parameters...), bool collective) {
  const Binder binder = [](const void* self, void** arguments) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) -> Bound {
      const std::tuple<Parameters...> values(*static_cast<Parameters*>(arguments[I])...);
      auto* const call = reinterpret_cast<void (*)(Parameters...)>(const_cast<void*>(self));
      Bound bound{[call, values] { std::apply(call, values); }, false, {}};
      const auto add = [&](const auto& argument) {
        for (const void* memory : memory_of(argument)) bound.memory.push_back(memory);
      };
      (add(std::get<I>(values)), ...);
      return bound;
    }(std::index_sequence_for<Parameters...>{});
  };
  register_kernel(reinterpret_cast<const void*>(kernel), binder, collective);
}

Bound bind_arguments(const void* kernel, void** arguments);
// Runs the threads of one block in an order drawn from the seed.
void run_block(const Bound& kernel, unsigned index, dim3 grid, dim3 block, std::uint64_t seed);

// What one thread brings to where threads of its warp meet, and what it takes away.
struct Meeting {
  enum class Kind { kShuffle, kBallot, kWarpBarrier, kBlockBarrier };

  const char* call = "";
  Kind kind = Kind::kWarpBarrier;
  unsigned mask = 0;        // lanes that meet
  std::uint64_t value = 0;  // a shuffle's bits, a vote
  unsigned source = 0;      // the lane that a shuffle reads
};
std::uint64_t meet(const Meeting& meeting);

template <class T>
T shuffle(const char* call, unsigned mask, T value, unsigned source) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, int> || std::is_same_v<T, unsigned>);
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint64_t answer = meet({call, Meeting::Kind::kShuffle, mask, bits, source});
  return std::bit_cast<T>(static_cast<std::uint32_t>(answer));
}

inline unsigned lane() { return running.thread.x % 32; }

}  // namespace hscache::cuda::host

// One thread runs at a time, and what it wrote is there.
inline unsigned atomicAdd(unsigned* address, unsigned value) {
  return std::exchange(*address, *address + value);
}
inline void __threadfence_system() {}

// As in the CUDA programming guide, "Warp Shuffle Functions" and after, and stricter: every lane
// that is named must come, while CUDA lets those go that have ended.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const unsigned lane = hscache::cuda::host::lane();
  const unsigned source = (lane ^ static_cast<unsigned>(lane_mask)) % 32;
  // Groups of `width` lanes may read from those before them, not from those behind.
  const unsigned last = lane | static_cast<unsigned>(width - 1);
  return hscache::cuda::host::shuffle("__shfl_xor_sync", mask, value,
                                      source > last ? lane : source);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const auto inside = static_cast<unsigned>(width - 1);
  const unsigned source =
      (hscache::cuda::host::lane() & ~inside) | (static_cast<unsigned>(from) & inside);
  return hscache::cuda::host::shuffle("__shfl_sync", mask, value, source);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  using hscache::cuda::host::Meeting;
  return static_cast<unsigned>(hscache::cuda::host::meet(
      {"__ballot_sync", Meeting::Kind::kBallot, mask, predicate != 0 ? 1U : 0U, 0}));
}
inline int __any_sync(unsigned mask, int predicate) {
  using hscache::cuda::host::Meeting;
  return hscache::cuda::host::meet(
             {"__any_sync", Meeting::Kind::kBallot, mask, predicate != 0 ? 1U : 0U, 0}) != 0;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFU) {
  using hscache::cuda::host::Meeting;
  hscache::cuda::host::meet({"__syncwarp", Meeting::Kind::kWarpBarrier, mask, 0, 0});
}
inline void __syncthreads() {
  using hscache::cuda::host::Meeting;
  hscache::cuda::host::meet({"__syncthreads", Meeting::Kind::kBlockBarrier, 0, 0, 0});
}
