// CudaRuntime and the engine on it: registration, limits, errors. Order is test_hostile_streams'.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/transfer_engine.h"
#include "cuda/cuda_runtime.h"
#include "tests/fake_cuda.h"
#include "tests/harness.h"

namespace hscache::test {
namespace {

constexpr std::int64_t kGiB = std::int64_t{1} << 30;
constexpr std::int64_t kRowBytes = 16;
constexpr std::int64_t kBlockSize = 16;

// Addresses for registration only: nothing touches them.
std::byte* nowhere() { return reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40); }

// A cache of `blocks` blocks of two layers in device memory, and rows in pinned host memory.
struct Setup {
  explicit Setup(std::int64_t blocks, std::int64_t staging_bytes = 64 << 10)
      : tokens(blocks * kBlockSize), rows(static_cast<std::size_t>(2 * tokens * kRowBytes)) {
    fake::reset(7);
    view = {.data = nullptr,
            .num_blocks = blocks,
            .num_layers = 2,
            .block_size = kBlockSize,
            .row_bytes = kRowBytes,
            .block_stride = 2 * kBlockSize * kRowBytes,
            .layer_stride = kBlockSize * kRowBytes,
            .token_stride = kRowBytes};
    void* memory = nullptr;
    CHECK_EQ(cudaMalloc(&memory, static_cast<std::size_t>(blocks * view.block_stride)),
             cudaSuccess);
    view.data = static_cast<std::byte*>(memory);
    CHECK_EQ(cudaHostRegister(rows.data(), rows.size(), 0), cudaSuccess);
    engine = std::make_unique<TransferEngine>(
        std::make_unique<cuda::CudaRuntime>(0),
        TransferOptions{.lanes = 2, .max_pending = 4, .staging_bytes = staging_bytes}, false);
  }

  std::shared_ptr<Ticket> submit(cudaStream_t after = nullptr) {
    std::vector<std::int64_t> ids(static_cast<std::size_t>(view.num_blocks));
    std::iota(ids.rbegin(), ids.rend(), 0);
    std::byte* const first = rows.data();
    return engine->submit({.direction = Direction::kGather,
                           .paged = view,
                           .block_ids = ids,
                           .pieces = {{0, tokens, {first, first + tokens * kRowBytes}}},
                           .after_stream = reinterpret_cast<std::uintptr_t>(after)},
                          Backpressure::kRefuse);
  }
  void settle(const Ticket& ticket) {
    while (ticket.state() == Ticket::State::kPending) {
      engine->poll();
      fake::progress();
    }
  }
  bool holds_its_rows() const {
    const fake::DeviceAccess open;
    for (std::int64_t layer = 0; layer < 2; ++layer) {
      for (std::int64_t token = 0; token < tokens; ++token) {
        const std::int64_t block = view.num_blocks - 1 - token / kBlockSize;
        const std::byte* source = view.data + view.offset(block, layer, token % kBlockSize);
        const std::byte* row = rows.data() + (layer * tokens + token) * kRowBytes;
        if (!std::equal(row, row + kRowBytes, source)) return false;
      }
    }
    return true;
  }

  std::int64_t tokens;
  std::vector<std::byte> rows;
  PagedView view;
  std::unique_ptr<TransferEngine> engine;
};

}  // namespace

TEST(cuda_runtime, memory_is_registered_in_pieces) {
  fake::reset(1);
  cuda::CudaRuntime runtime(0);
  const std::int64_t bytes = 700 * kGiB + (3 << 20);
  {
    const auto registration = runtime.register_host(nowhere(), bytes);
    CHECK_EQ(registration->bytes(), 0);
    while (registration->extend()) {
    }
    CHECK_EQ(registration->bytes(), bytes);
    CHECK(!registration->extend());
    CHECK_EQ(registration->refusal(), "");
    const std::vector<fake::Registered> pieces = fake::registered();
    CHECK_EQ(pieces.size(), 701U);
    std::int64_t end = 0;
    for (const fake::Registered& piece : pieces) {
      CHECK_EQ(piece.begin - nowhere(), end);
      CHECK(piece.bytes <= kGiB);
      end += piece.bytes;
    }
    CHECK_EQ(end, bytes);
  }
  CHECK(fake::registered().empty());
}

TEST(cuda_runtime, a_refused_registration_keeps_what_was_taken_and_leaves_no_error) {
  fake::reset(1);
  cuda::CudaRuntime runtime(0);
  fake::fail("cudaHostRegister", cudaErrorMemoryAllocation, 2);
  const auto registration = runtime.register_host(nowhere(), 20 * kGiB);
  while (registration->extend()) {
  }
  CHECK_EQ(registration->bytes(), 2 * kGiB);
  CHECK(registration->refusal().starts_with("cudaErrorMemoryAllocation"));
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(cuda_runtime, rows_may_go_to_memory_that_is_not_registered_yet) {
  fake::reset(1);
  auto owned = std::make_unique<cuda::CudaRuntime>(0);
  cuda::CudaRuntime& runtime = *owned;
  std::vector<std::byte> host(64, std::byte{0xEE});
  const auto device = runtime.allocate_device(64);
  const auto stream = runtime.create_stream();
  {
    const auto registration = runtime.register_host(host.data(), 64);
    const std::vector<Copy> halves{{host.data(), device->data(), 32},
                                   {host.data() + 32, device->data() + 32, 32}};
    stream->copy_to_host(halves);
    CHECK_EQ(fake::counters().batches, 0);
    CHECK_EQ(fake::counters().pageable_copies, 2);
    CHECK(!registration->extend());
    CHECK_EQ(registration->bytes(), 64);
    stream->copy_to_host(halves);
    CHECK_EQ(fake::counters().batches, 1);
    CHECK_EQ(fake::counters().pageable_copies, 2);
    fake::finish();
  }
  const fake::DeviceAccess open;
  CHECK_EQ(std::memcmp(host.data(), device->data(), 64), 0);
}

TEST(cuda_runtime, copies_are_cut_where_registered_pieces_meet) {
  fake::reset(1);
  cuda::CudaRuntime runtime(0);
  runtime.set_piece_bytes(16);
  std::vector<std::byte> host(64);
  for (std::size_t i = 0; i < 64; ++i) host[i] = static_cast<std::byte>(i + 1);
  std::vector<std::byte> back(64, std::byte{0xEE});
  const auto device = runtime.allocate_device(64);
  const auto stream = runtime.create_stream();
  const auto from = runtime.register_host(host.data(), 64);
  const auto to = runtime.register_host(back.data(), 64);
  while (from->extend()) {
  }
  while (to->extend()) {
  }
  const Copy there{device->data(), host.data() + 3, 60};
  stream->copy_to_device({&there, 1});
  const std::vector<Copy> again{{back.data() + 7, device->data(), 41},
                                {back.data() + 48, device->data() + 41, 16},
                                {back.data(), device->data() + 57, 3}};
  stream->copy_to_host(again);
  fake::finish();
  CHECK_EQ(fake::counters().pageable_copies, 0);
  for (std::int64_t i = 0; i < 60; ++i) {
    const std::int64_t at = i < 57 ? 7 + i : i - 57;
    CHECK(back[static_cast<std::size_t>(at)] == host[static_cast<std::size_t>(3 + i)]);
  }
  CHECK(back[3] == std::byte{0xEE});
}

TEST(cuda_runtime, a_device_that_is_not_there_is_refused) {
  fake::reset(1);
  CHECK_THROWS(std::invalid_argument, "CUDA device 3 is asked for, there are 1",
               cuda::CudaRuntime(3));
  fake::fail("cudaGetDeviceCount", cudaErrorInsufficientDriver);
  CHECK(!cuda::why_no_device().empty());
  CHECK_EQ(cuda::why_no_device(), "");
  CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(cuda_runtime, device_memory_is_the_same_for_a_thousand_and_a_million_tokens) {
  std::vector<std::int64_t> most;
  for (const std::int64_t tokens : {1'000, 100'000, 1'000'000}) {
    Setup s((tokens + kBlockSize - 1) / kBlockSize, 16 << 20);
    const std::int64_t cache = s.view.num_blocks * s.view.block_stride;
    const auto ticket = s.submit();
    s.settle(*ticket);
    CHECK(ticket->state() == Ticket::State::kDone);
    CHECK(s.holds_its_rows());
    most.push_back(fake::counters().most_device_bytes - cache);
  }
  CHECK_EQ(most[0], most[1]);
  CHECK_EQ(most[0], most[2]);
  CHECK(most[0] <= (16 << 20) + (256 << 10));
}

TEST(cuda_runtime, an_error_fails_its_ticket_by_name_and_the_engine_goes_on) {
  for (const char* call : {"cudaMemcpyAsync", "cudaMemcpyBatchAsync", "cudaLaunchKernel",
                           "cudaStreamWaitEvent", "cudaEventRecord", "cudaEventQuery"}) {
    Setup s(8);
    const auto good = s.submit();
    s.settle(*good);
    fake::fail(call, cudaErrorMemoryAllocation, call == std::string("cudaEventRecord") ? 1 : 0);
    const auto bad = s.submit();
    s.settle(*bad);
    CHECK(bad->state() == Ticket::State::kFailed);
    CHECK(bad->error().starts_with("cudaErrorMemoryAllocation"));
    CHECK(bad->error().find("context is lost") == std::string::npos);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    std::fill(s.rows.begin(), s.rows.end(), std::byte{0});
    const auto after = s.submit();
    s.settle(*after);
    CHECK(after->state() == Ticket::State::kDone);
    CHECK(s.holds_its_rows());
  }
}

TEST(cuda_runtime, a_lost_context_is_said_and_every_ticket_ends) {
  Setup s(64);
  const auto first = s.submit();
  const auto second = s.submit();
  s.engine->poll();
  fake::fail("cudaEventQuery", cudaErrorIllegalAddress, 0, true);
  for (int turn = 0; turn < 1'000 && s.engine->pending() > 0; ++turn) s.engine->poll();
  CHECK_EQ(s.engine->pending(), 0);
  for (const auto& ticket : {first, second}) {
    CHECK(ticket->state() == Ticket::State::kFailed);
    CHECK(ticket->error().starts_with("cudaErrorIllegalAddress"));
    CHECK(ticket->error().find("the CUDA context is lost") != std::string::npos);
  }
  CHECK_THROWS(DeviceError, "cudaErrorIllegalAddress", s.submit());
}

TEST(cuda_runtime, a_stream_that_is_captured_is_refused_and_its_capture_goes_on) {
  Setup s(8);
  const cudaStream_t stream = fake::make_stream();
  CHECK_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  CHECK_THROWS(std::invalid_argument, "is being captured into a CUDA graph", s.submit(stream));
  cudaGraph_t graph = nullptr;
  CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST(cuda_runtime, transfers_run_beside_a_capture_and_leave_it_alone) {
  const cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal,
                                         cudaStreamCaptureModeThreadLocal};
  for (const cudaStreamCaptureMode mode : modes) {
    Setup s(8);
    const cudaStream_t stream = fake::make_stream();
    CHECK_EQ(cudaStreamBeginCapture(stream, mode), cudaSuccess);
    const auto ticket = s.submit();
    s.settle(*ticket);
    CHECK(ticket->state() == Ticket::State::kDone);
    s.engine.reset();
    cudaGraph_t graph = nullptr;
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
}

TEST(cuda_runtime, rows_larger_than_a_region_are_refused) {
  Setup s(4, 4 * (kRowBytes - 1));
  CHECK_THROWS(std::invalid_argument, "set hscache_staging_bytes higher", s.submit());
}

}  // namespace hscache::test
