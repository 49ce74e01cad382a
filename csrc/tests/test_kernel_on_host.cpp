// The stand-in itself: kernels whose threads talk to each other.
#include <cstdint>
#include <numeric>
#include <vector>

#include "cuda/launch.h"
#include "tests/harness.h"
#include "tests/launch_at_once.h"
#include "tests/layouts.h"

namespace hscache::test {
namespace {

using cuda::launch;
using cuda::launch_collective;

constexpr unsigned kAll = 0xFFFFFFFFU;

// One warp sums one row at a time.
template <class T>
__global__ void sum_rows(const T* rows, int columns, int num_rows, T* sums) {
  const int warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  const int first = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int row = first; row < num_rows; row += warps) {
    T sum = 0;
    for (int i = lane; i < columns; i += 32) sum += rows[row * columns + i];
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAll, sum, step);
    if (lane == 0) sums[row] = sum;
  }
}

// Each block turns a row of its own round, in place: all must have read before one writes.
__global__ void reverse_row(int* rows, int columns, bool with_barrier) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= columns) return;
  int* const row = rows + static_cast<int>(blockIdx.x) * columns;
  const int value = row[columns - 1 - i];
  if (with_barrier) __syncthreads();
  row[i] = value;
}

// Gives its left neighbour's number, the votes of the warp, whether anyone is at a multiple of 7.
__global__ void neighbours(unsigned* left, unsigned* votes, int* any) {
  const unsigned i = threadIdx.x;
  left[i] = __shfl_sync(kAll, i, static_cast<int>(i + 31));
  votes[i] = __ballot_sync(kAll, i % 3 == 0);
  any[i] = __any_sync(kAll, i % 77 == 76);
}

// The halves of a warp go different ways and meet again.
__global__ void halves(unsigned* out) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned mask = lane < 16 ? 0xFFFFU : 0xFFFF0000U;
  unsigned sum = lane;
  for (unsigned round = lane < 16 ? 0 : 3; round < 5; ++round) {
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(mask, sum, step, 16);
    sum /= 16;
  }
  __syncwarp();
  out[threadIdx.x] = __shfl_xor_sync(kAll, sum, 16);
}

__global__ void uneven_loops(int* out) {
  int sum = 0;
  for (unsigned i = 0; i <= threadIdx.x % 2; ++i) sum += __shfl_xor_sync(kAll, 1, 1);
  out[threadIdx.x] = sum;
}
__global__ void half_a_barrier(int* out) {
  if (threadIdx.x < 32) __syncthreads();
  if (threadIdx.x >= 32) __syncwarp(threadIdx.x == 32 ? 3U : kAll);
  out[threadIdx.x] = 1;
}
__global__ void reads_a_lane_that_is_not_named(int* out) {
  out[threadIdx.x] = __shfl_xor_sync(1U << threadIdx.x % 32, 1, 1);
}

template <class T>
void check_sums() {
  Random random(7);
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    cuda::host::set_order(seed);
    const auto columns = static_cast<int>(random.in(0, 100));
    const auto num_rows = static_cast<int>(random.in(1, 40));
    const unsigned threads = random.pick({32U, 64U, 256U});
    std::vector<T> rows(static_cast<std::size_t>(columns * num_rows));
    for (T& value : rows) value = static_cast<T>(random.in(0, 1000));
    std::vector<T> sums(static_cast<std::size_t>(num_rows), T{77});
    CHECK_EQ(launch_collective(sum_rows<T>, dim3(2), dim3(threads), nullptr, rows.data(), columns,
                               num_rows, sums.data()),
             cudaSuccess);
    for (int row = 0; row < num_rows; ++row) {
      const auto begin = rows.begin() + row * columns;
      if (!CHECK_EQ(sums[static_cast<std::size_t>(row)],
                    std::accumulate(begin, begin + columns, T{0}))) {
        return;
      }
    }
  }
}

int rows_turned_wrong(bool with_barrier) {
  constexpr int kColumns = 70;
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    cuda::host::set_order(seed);
    std::vector<int> rows(3 * kColumns);
    std::iota(rows.begin(), rows.end(), 0);
    CHECK_EQ(launch_collective(reverse_row, dim3(3), dim3(96), nullptr, rows.data(), kColumns,
                               with_barrier),
             cudaSuccess);
    for (int i = 0; i < 3 * kColumns; ++i) {
      wrong += rows[static_cast<std::size_t>(i)] !=
               i / kColumns * kColumns + kColumns - 1 - i % kColumns;
    }
  }
  return wrong;
}

}  // namespace

TEST(kernel_on_host, warps_sum_rows_by_shuffles) {
  check_sums<int>();
  check_sums<unsigned>();
  check_sums<float>();
}

TEST(kernel_on_host, a_barrier_of_the_block_is_needed_and_lets_go_those_that_ended) {
  CHECK_EQ(rows_turned_wrong(true), 0);
  CHECK(rows_turned_wrong(false) > 0);
}

TEST(kernel_on_host, lanes_read_each_other_and_vote) {
  std::vector<unsigned> left(64);
  std::vector<unsigned> votes(64);
  std::vector<int> any(64);
  CHECK_EQ(launch_collective(neighbours, dim3(1), dim3(64), nullptr, left.data(), votes.data(),
                             any.data()),
           cudaSuccess);
  for (unsigned i = 0; i < 64; ++i) {
    CHECK_EQ(left[i], i / 32 * 32 + (i + 31) % 32);
    CHECK_EQ(votes[i], i < 32 ? 0x49249249U : 0x92492492U);
    CHECK_EQ(any[i], 0);
  }
}

TEST(kernel_on_host, halves_of_a_warp_go_their_own_ways) {
  std::vector<unsigned> out(32);
  CHECK_EQ(launch_collective(halves, dim3(1), dim3(32), nullptr, out.data()), cudaSuccess);
  for (unsigned i = 0; i < 32; ++i) CHECK_EQ(out[i], i < 16 ? 23U : 7U);
}

TEST(kernel_on_host, what_would_hang_or_read_nothing_dies_and_says_why) {
  std::vector<int> out(64);
  const auto run = [&](void (*kernel)(int*)) {
    static_cast<void>(launch_collective(kernel, dim3(1), dim3(64), nullptr, out.data()));
  };
  CHECK_DIES("waits in __shfl_xor_sync for thread", run(uneven_loops));
  CHECK_DIES("deadlock in block 0", run(half_a_barrier));
  CHECK_DIES("does not name the lane that it reads", run(reads_a_lane_that_is_not_named));
  CHECK_DIES("use launch_collective()",
             static_cast<void>(launch(uneven_loops, dim3(1), dim3(64), nullptr, out.data())));
}

}  // namespace hscache::test
