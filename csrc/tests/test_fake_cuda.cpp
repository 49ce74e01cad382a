// The stand-in itself: where it must be as strict as CUDA.
#include <cuda_runtime_api.h>

#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "cuda/launch.h"
#include "cuda/rows.h"
#include "tests/fake_cuda.h"
#include "tests/harness.h"
#include "tests/races.h"

namespace hscache::test {
namespace {

std::byte* device_bytes(std::size_t bytes) {
  void* memory = nullptr;
  CHECK_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
  return static_cast<std::byte*>(memory);
}

template <class T>
T on_device(const std::byte* address) {
  const fake::DeviceAccess open;
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}
template <class T>
void put_on_device(std::byte* address, const std::vector<T>& values) {
  const fake::DeviceAccess open;
  std::memcpy(address, values.data(), values.size() * sizeof(T));
}

cudaStream_t side_stream() {
  cudaStream_t stream = nullptr;
  CHECK_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  return stream;
}

cudaError_t copy_to_device(std::byte* to, const std::vector<std::byte>& from, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyHostToDevice, stream);
}

// A cache of four blocks with one 4-byte row each, and how a gather of one row is launched on it.
struct SmallCache {
  std::byte* cache = device_bytes(16);
  std::byte* ids = device_bytes(8);
  std::byte* row = device_bytes(4);

  SmallCache() {
    put_on_device<int>(cache, {10, 11, 12, 13});
    choose_block(2);
  }
  void choose_block(std::int64_t id) { put_on_device<std::int64_t>(ids, {id}); }
  cudaError_t gather(cudaStream_t stream) const {
    const PagedView view{cache, 4, 1, 1, 4, 4, 4, 4};
    RowsTask task{.paged = view};
    task.tokens.ids = BlockTable{std::span(reinterpret_cast<const std::int64_t*>(ids), 1)};
    task.length = 1;
    task.rows = {row, 4, 4};
    return cuda::move_rows(Direction::kGather, task, stream);
  }
};

__global__ void sum_of_lanes(const int* values, int* sum) {
  int own = values[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(0xFFFFFFFFU, own, step);
  if (threadIdx.x == 0) *sum = own;
}

}  // namespace

TEST(fake_cuda, host_code_that_touches_device_memory_dies) {
  fake::reset(1);
  std::byte* const memory = device_bytes(100);
  CHECK_DIES("host code touches device memory", memory[0] = std::byte{1});
  CHECK_DIES("host code touches device memory", std::memset(memory, 0, 100));
  const fake::DeviceAccess open;
  memory[0] = std::byte{1};
}

TEST(fake_cuda, a_copy_across_two_registrations_is_refused) {
  fake::reset(1);
  std::byte* const device = device_bytes(64);
  const std::vector<std::byte> rows(64);
  auto* const data = const_cast<std::byte*>(rows.data());
  CHECK_EQ(cudaHostRegister(data, 32, 0), cudaSuccess);
  CHECK_EQ(cudaHostRegister(data + 32, 32, 0), cudaSuccess);
  const auto copy = [&](std::size_t from, std::size_t bytes) {
    return cudaMemcpyAsync(device, data + from, bytes, cudaMemcpyHostToDevice, side_stream());
  };
  CHECK_EQ(copy(16, 32), cudaErrorInvalidValue);
  CHECK_EQ(copy(32, 32), cudaSuccess);
  CHECK_EQ(cudaMemcpyAsync(device + 32, data, 33, cudaMemcpyHostToDevice, side_stream()),
           cudaErrorInvalidValue);
  CHECK_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  CHECK_EQ(fake::counters().pageable_copies, 0);
}

TEST(fake_cuda, memory_that_a_copy_in_flight_uses_may_not_be_let_go) {
  fake::reset(3);
  std::byte* const device = device_bytes(64);
  std::vector<std::byte> rows(64);
  CHECK_EQ(cudaHostRegister(rows.data(), 64, 0), cudaSuccess);
  const cudaStream_t stream = side_stream();
  // Behind work that takes long.
  fake::enqueue(stream, std::vector<std::function<void()>>(1000, [] {}));
  CHECK_EQ(copy_to_device(device, rows, stream), cudaSuccess);
  CHECK_DIES("host memory is unregistered while a copy in flight uses it",
             static_cast<void>(cudaHostUnregister(rows.data())));
  CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  CHECK_EQ(cudaHostUnregister(rows.data()), cudaSuccess);
}

TEST(fake_cuda, a_kernel_reaches_device_pinned_and_registered_memory_only) {
  fake::reset(1);
  SmallCache c;
  std::vector<std::int64_t> pageable{1};
  std::byte* const ids = std::exchange(c.ids, reinterpret_cast<std::byte*>(pageable.data()));
  CHECK_DIES("neither pinned nor registered", static_cast<void>(c.gather(side_stream())));
  CHECK_EQ(cudaHostRegister(pageable.data(), sizeof(std::int64_t), 0), cudaSuccess);
  CHECK_EQ(c.gather(side_stream()), cudaSuccess);
  fake::finish();
  CHECK_EQ(on_device<int>(c.row), 11);
  c.ids = ids;
  std::byte* const row = std::exchange(c.row, reinterpret_cast<std::byte*>(&pageable));
  CHECK_DIES("neither pinned nor registered", static_cast<void>(c.gather(side_stream())));
  c.row = row;
  CHECK_EQ(cudaFree(c.row), cudaSuccess);
  CHECK_DIES("work names memory that was given back", static_cast<void>(c.gather(side_stream())));
}

TEST(fake_cuda, handles_do_not_outlive_their_end) {
  fake::reset(1);
  const cudaStream_t stream = side_stream();
  cudaEvent_t event = nullptr;
  CHECK_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  CHECK_EQ(cudaEventRecord(event, stream), cudaSuccess);
  CHECK_EQ(cudaEventDestroy(event), cudaSuccess);
  CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
  CHECK_DIES("an event is asked after its end", static_cast<void>(cudaEventQuery(event)));
  CHECK_DIES("a stream is used after its end", static_cast<void>(cudaStreamSynchronize(stream)));
}

TEST(fake_cuda, a_fault_surfaces_at_a_later_call_about_something_else) {
  fake::reset(1);
  const cudaStream_t stream = side_stream();
  fake::enqueue_fault(stream, cudaErrorIllegalAddress);
  bool ran_after = false;
  fake::enqueue(stream, {[&] { ran_after = true; }});
  fake::finish();
  void* memory = nullptr;
  CHECK_EQ(cudaMalloc(&memory, 16), cudaErrorIllegalAddress);
  CHECK_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
  CHECK_EQ(cudaGetLastError(), cudaErrorIllegalAddress);  // it stays
  CHECK(!ran_after);
}

TEST(fake_cuda, stream_0_is_ordered_with_blocking_streams_only) {
  const RaceCount races;  // there are some: the side stream knows nothing of `step`
  int unordered = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    fake::reset(seed);
    const cudaStream_t blocking = fake::make_stream(true);
    const cudaStream_t side = side_stream();
    int step = 0;
    bool side_came_last = true;
    fake::enqueue(blocking, {[&] { CHECK_EQ(step++, 0); }});
    fake::enqueue(nullptr, {[&] { CHECK_EQ(step++, 1); }});
    fake::enqueue(side, {[&] { side_came_last = step >= 2; }});
    fake::enqueue(blocking, {[&] { CHECK_EQ(step++, 2); }});
    fake::finish();
    CHECK_EQ(step, 3);
    unordered += !side_came_last;
  }
  CHECK(unordered > 0);
}

TEST(fake_cuda, freed_memory_may_be_somebody_elses_before_its_work_has_run) {
  const RaceCount races;
  int overwritten = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    fake::reset(seed);
    std::byte* const first = device_bytes(64);
    // As the kernel of somebody who forgets to wait.
    fake::enqueue(side_stream(), {[first] { first[0] = std::byte{1}; }});
    CHECK_EQ(cudaFree(first), cudaSuccess);
    std::byte* const second = device_bytes(64);
    CHECK_EQ(second, first);
    if (on_device<std::byte>(second) != std::byte{0}) continue;
    fake::finish();
    overwritten += on_device<std::byte>(second) == std::byte{1};
  }
  CHECK(overwritten > 0);
  CHECK(!sees_races() || races.seen() > 0);
}

TEST(fake_cuda, a_graph_keeps_its_arguments_and_reads_anew_what_they_point_to) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    fake::reset(seed);
    SmallCache c;
    const cudaStream_t stream = side_stream();
    CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK_EQ(c.gather(stream), cudaSuccess);
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cudaGraphExec_t runnable = nullptr;
    CHECK_EQ(cudaGraphInstantiate(&runnable, graph, 0), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    put_on_device<int>(c.row, {7});
    fake::finish();
    CHECK_EQ(on_device<int>(c.row), 7);  // captured, not run
    for (const std::int64_t id : {2, 0, 3}) {
      c.choose_block(id);
      CHECK_EQ(cudaGraphLaunch(runnable, stream), cudaSuccess);
      CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      CHECK_EQ(on_device<int>(c.row), 10 + id);
    }
    CHECK_EQ(cudaGraphExecDestroy(runnable), cudaSuccess);
  }
}

TEST(fake_cuda, what_waits_for_work_invalidates_a_capture) {
  const auto ends_with = [](const auto& call) {
    fake::reset(1);
    const cudaStream_t stream = side_stream();
    cudaEvent_t event = nullptr;
    CHECK_EQ(cudaEventCreateWithFlags(&event, 0), cudaSuccess);
    CHECK_EQ(cudaEventRecord(event, side_stream()), cudaSuccess);
    CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    const cudaError_t refused = call(stream, event);
    CHECK(refused != cudaSuccess);
    CHECK_EQ(cudaGetLastError(), refused);
    cudaStreamCaptureStatus status{};
    CHECK_EQ(cudaStreamIsCapturing(stream, &status), cudaSuccess);
    CHECK_EQ(status, cudaStreamCaptureStatusInvalidated);
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
  };
  ends_with([](cudaStream_t, cudaEvent_t event) { return cudaEventQuery(event); });
  ends_with([](cudaStream_t stream, cudaEvent_t) { return cudaStreamSynchronize(stream); });
  ends_with([](cudaStream_t, cudaEvent_t) { return cudaStreamSynchronize(side_stream()); });
  ends_with([](cudaStream_t, cudaEvent_t) {
    void* memory = nullptr;
    return cudaMalloc(&memory, 16);
  });
  ends_with([](cudaStream_t stream, cudaEvent_t event) {
    CHECK_EQ(cudaEventRecord(event, stream), cudaSuccess);
    return cudaEventQuery(event);
  });
  ends_with(
      [](cudaStream_t stream, cudaEvent_t event) { return cudaStreamWaitEvent(stream, event, 0); });
}

TEST(fake_cuda, a_relaxed_thread_may_ask_while_others_capture) {
  fake::reset(1);
  const cudaStream_t stream = side_stream();
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  CHECK_EQ(cudaThreadExchangeStreamCaptureMode(&mode), cudaSuccess);
  CHECK_EQ(mode, cudaStreamCaptureModeGlobal);
  CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  CHECK_EQ(cudaStreamSynchronize(side_stream()), cudaSuccess);
  cudaGraph_t graph = nullptr;
  CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST(fake_cuda, warps_of_several_streams_do_not_mix) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    fake::reset(seed);
    std::vector<std::byte*> sums;
    for (int i = 0; i < 3; ++i) {
      std::byte* const values = device_bytes(32 * sizeof(int));
      put_on_device<int>(values, std::vector<int>(32, i + 1));
      sums.push_back(device_bytes(sizeof(int)));
      CHECK_EQ(cuda::launch_collective(sum_of_lanes, dim3(1), dim3(32), side_stream(),
                                       reinterpret_cast<const int*>(values),
                                       reinterpret_cast<int*>(sums.back())),
               cudaSuccess);
    }
    fake::finish();
    for (int i = 0; i < 3; ++i) {
      CHECK_EQ(on_device<int>(sums[static_cast<std::size_t>(i)]), 32 * (i + 1));
    }
  }
}

}  // namespace hscache::test
