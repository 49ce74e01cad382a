#include "tests/fake_cuda.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include "tests/kernel_on_host.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

namespace hscache::fake {
namespace {

// A moment in a stream's order.
struct Record {
  bool done = false;
};

struct Operation {
  std::vector<std::shared_ptr<Record>> after;
  std::deque<std::function<void()>> pieces;
  std::shared_ptr<Record> sets = std::make_shared<Record>();
};

enum class Schedule {
  kOnDemand,             // as late as the host's questions allow
  kPriorities,           // streams take turns by priorities that change
  kSomeAtOnce,           // some streams run when they can, the rest on demand
  kPrioritiesAtEnqueue,  // as kPriorities, and something runs at each enqueue
};

}  // namespace
}  // namespace hscache::fake

// CUDA's own opaque types.
struct CUstream_st {
  std::deque<hscache::fake::Operation> operations;
  std::uint64_t priority = 0;
  bool at_once = false;
};
struct CUevent_st {
  std::shared_ptr<hscache::fake::Record> latest;  // null: never recorded
};

namespace hscache::fake {
namespace {

struct Allocation {
  std::vector<std::byte> bytes;
  bool device = false;
  bool freed = false;
};
struct Failure {
  cudaError_t error = cudaSuccess;
  int skip = 0;
  bool lost = false;
};

// Everything of one seed. Made anew by reset(), so that seeds replay.
struct World {
  std::mt19937_64 random;
  Schedule schedule = Schedule::kOnDemand;
  bool free_waits = true;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::vector<std::unique_ptr<CUevent_st>> events;
  std::vector<std::unique_ptr<Allocation>> allocations;
  std::map<const std::byte*, std::size_t> registered;
  std::map<std::string, Failure> failures;
  cudaError_t lost = cudaSuccess;
  cudaError_t last_error = cudaSuccess;
  CUstream_st zero;
  Counters counters;
};
std::unique_ptr<World> world = std::make_unique<World>();

std::uint64_t draw(std::uint64_t below) { return world->random() % below; }

[[noreturn]] void die(const char* why) {
  std::fprintf(stderr, "fake CUDA: %s\n", why);
  std::abort();
}

std::vector<CUstream_st*> all_streams() {
  std::vector<CUstream_st*> found{&world->zero};
  for (const auto& stream : world->streams) found.push_back(stream.get());
  return found;
}

bool ready(const CUstream_st& stream) {
  if (stream.operations.empty()) return false;
  const auto& after = stream.operations.front().after;
  return std::all_of(after.begin(), after.end(), [](const auto& record) { return record->done; });
}

// Runs one piece of the first operation.
void run_piece(CUstream_st& stream) {
  Operation& operation = stream.operations.front();
  if (!operation.pieces.empty()) {
    const auto piece = std::move(operation.pieces.front());
    operation.pieces.pop_front();
    piece();
  }
  if (operation.pieces.empty()) {
    operation.sets->done = true;
    stream.operations.pop_front();
  }
}

// Runs what must run before a moment has come, and nothing else.
void demand(std::shared_ptr<Record> record) {
  for (CUstream_st* stream : all_streams()) {
    const auto holds = [&](const Operation& operation) { return operation.sets == record; };
    while (!record->done &&
           std::any_of(stream->operations.begin(), stream->operations.end(), holds)) {
      const std::vector<std::shared_ptr<Record>> after = stream->operations.front().after;
      for (const auto& before : after) {
        if (!before->done) demand(before);
      }
      if (!ready(*stream)) die("deadlock: a stream waits for what was never enqueued");
      run_piece(*stream);
    }
    if (record->done) return;
  }
  die("deadlock: asked for a moment that no stream will reach");
}

bool run_by_priority() {
  CUstream_st* chosen = nullptr;
  for (CUstream_st* stream : all_streams()) {
    if (ready(*stream) && (chosen == nullptr || stream->priority > chosen->priority)) {
      chosen = stream;
    }
  }
  if (chosen == nullptr) return false;
  run_piece(*chosen);
  if (draw(8) == 0) chosen->priority = world->random();
  return true;
}

void run_at_once() {
  for (bool ran = true; ran;) {
    ran = false;
    for (CUstream_st* stream : all_streams()) {
      while (stream->at_once && ready(*stream)) {
        run_piece(*stream);
        ran = true;
      }
    }
  }
}

std::shared_ptr<Record> push(cudaStream_t stream, Operation operation) {
  CUstream_st& queue = stream == nullptr ? world->zero : *stream;
  auto record = operation.sets;
  queue.operations.push_back(std::move(operation));
  if (world->schedule == Schedule::kSomeAtOnce) run_at_once();
  if (world->schedule == Schedule::kPrioritiesAtEnqueue) {
    for (std::uint64_t i = draw(4); i > 0; --i) run_by_priority();
  }
  return record;
}

// What every call begins with: failures that the test has asked for.
cudaError_t enter(const char* call) {
  if (world->lost != cudaSuccess) return world->last_error = world->lost;
  const auto found = world->failures.find(call);
  if (found == world->failures.end()) return cudaSuccess;
  if (found->second.skip-- > 0) return cudaSuccess;
  const Failure failure = found->second;
  world->failures.erase(found);
  if (failure.lost) world->lost = failure.error;
  return world->last_error = failure.error;
}

bool inside(const Allocation& allocation, const void* address) {
  const auto* byte = static_cast<const std::byte*>(address);
  return byte >= allocation.bytes.data() &&
         byte < allocation.bytes.data() + allocation.bytes.size();
}

// Whether the copy engine reaches an address without a detour: device, pinned or registered memory.
bool reachable(const void* address) {
  for (const auto& allocation : world->allocations) {
    if (inside(*allocation, address)) return true;
  }
  const auto* byte = static_cast<const std::byte*>(address);
  const auto next = world->registered.upper_bound(byte);
  if (next == world->registered.begin()) return false;
  const auto& [begin, bytes] = *std::prev(next);
  return byte < begin + bytes;
}

// A copy in up to four parts, reading when it runs.
std::deque<std::function<void()>> copy_pieces(void* to, const void* from, std::size_t bytes) {
  std::deque<std::function<void()>> pieces;
  const std::size_t parts = 1 + draw(4);
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t begin = bytes * i / parts;
    const std::size_t end = bytes * (i + 1) / parts;
    pieces.push_back([=] {
      std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                  end - begin);
    });
  }
  return pieces;
}

void* allocate(std::size_t bytes, bool device) {
  auto allocation = std::make_unique<Allocation>();
  allocation->device = device;
  allocation->bytes.resize(std::max<std::size_t>(bytes, 1));
  for (std::byte& byte : allocation->bytes) byte = static_cast<std::byte>(world->random());
  void* data = allocation->bytes.data();
  world->allocations.push_back(std::move(allocation));
  if (device) {
    Counters& counters = world->counters;
    counters.device_bytes += static_cast<std::int64_t>(bytes);
    counters.most_device_bytes = std::max(counters.most_device_bytes, counters.device_bytes);
  }
  return data;
}

cudaError_t release(void* data, bool device) {
  if (data == nullptr) return cudaSuccess;
  for (const auto& allocation : world->allocations) {
    if (allocation->bytes.data() != data || allocation->device != device || allocation->freed) {
      continue;
    }
    if (world->free_waits) finish();
    // Kept until the end of the world, as garbage: what still runs on it shows.
    for (std::byte& byte : allocation->bytes) byte ^= std::byte{0xA5};
    allocation->freed = true;
    if (device) world->counters.device_bytes -= static_cast<std::int64_t>(allocation->bytes.size());
    return cudaSuccess;
  }
  return world->last_error = cudaErrorInvalidValue;
}

}  // namespace

void reset(std::uint64_t seed) {
  world = std::make_unique<World>();
  world->random.seed(seed);
  world->schedule = static_cast<Schedule>(draw(4));
  world->free_waits = draw(2) == 0;
  world->zero.priority = world->random();
}

cudaStream_t make_stream() {
  world->streams.push_back(std::make_unique<CUstream_st>());
  CUstream_st& stream = *world->streams.back();
  stream.priority = world->random();
  stream.at_once = draw(2) == 0;
  return &stream;
}

void enqueue(cudaStream_t stream, std::vector<std::function<void()>> pieces) {
  Operation operation;
  operation.pieces.assign(pieces.begin(), pieces.end());
  push(stream, std::move(operation));
}

void progress() {
  if (world->schedule == Schedule::kSomeAtOnce) run_at_once();
  if (world->schedule == Schedule::kPriorities ||
      world->schedule == Schedule::kPrioritiesAtEnqueue) {
    for (std::uint64_t i = draw(6); i > 0; --i) run_by_priority();
  }
}

void finish() {
  while (run_by_priority()) {
  }
}

void fail(const std::string& call, cudaError_t error, int skip, bool lost) {
  world->failures[call] = {error, skip, lost};
}

std::vector<Registered> registered() {
  std::vector<Registered> found;
  for (const auto& [begin, bytes] : world->registered) {
    found.push_back({begin, static_cast<std::int64_t>(bytes)});
  }
  return found;
}

Counters counters() { return world->counters; }

}  // namespace hscache::fake

using namespace hscache::fake;

#define ENTER(call) \
  if (const cudaError_t refused = enter(call); refused != cudaSuccess) return refused

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  ENTER("cudaGetDeviceCount");
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  ENTER("cudaGetDevice");
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  ENTER("cudaSetDevice");
  return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  ENTER("cudaDeviceGetStreamPriorityRange");
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) {
  const cudaError_t error = world->last_error;
  world->last_error = world->lost;
  return error;
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    default:
      return "cudaErrorOther";
  }
}
const char* cudaGetErrorString(cudaError_t) { return "as the test asked for"; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  ENTER("cudaStreamCreateWithPriority");
  if (flags != cudaStreamNonBlocking) die("a side stream must not synchronise with stream 0");
  *stream = make_stream();
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its work still runs
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++world->counters.blocking_calls;
  ENTER("cudaStreamSynchronize");
  CUstream_st& queue = stream == nullptr ? world->zero : *stream;
  if (!queue.operations.empty()) demand(queue.operations.back().sets);
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  ENTER("cudaStreamIsCapturing");
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ENTER("cudaEventCreateWithFlags");
  world->events.push_back(std::make_unique<CUevent_st>());
  *event = world->events.back().get();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER("cudaEventRecord");
  Operation operation;
  event->latest = operation.sets;
  push(stream, std::move(operation));
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER("cudaEventQuery");
  if (event->latest == nullptr) return cudaSuccess;
  progress();
  const bool demanded =
      world->schedule == Schedule::kOnDemand || world->schedule == Schedule::kSomeAtOnce;
  if (demanded && !event->latest->done && draw(4) == 0) demand(event->latest);
  if (event->latest->done) return cudaSuccess;
  return world->last_error = cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ENTER("cudaStreamWaitEvent");
  if (event->latest == nullptr) return cudaSuccess;
  Operation operation;
  operation.after.push_back(event->latest);
  push(stream, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  ENTER("cudaMalloc");
  *data = allocate(bytes, true);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) { return release(data, true); }
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  ENTER("cudaHostAlloc");
  *data = allocate(bytes, false);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) { return release(data, false); }
cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  ENTER("cudaHostRegister");
  const auto* begin = static_cast<const std::byte*>(data);
  const auto next = world->registered.lower_bound(begin + bytes);
  if (next != world->registered.begin()) {
    const auto& [other, size] = *std::prev(next);
    if (other + size > begin) return world->last_error = cudaErrorHostMemoryAlreadyRegistered;
  }
  world->registered[begin] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* data) {
  ENTER("cudaHostUnregister");
  if (world->registered.erase(static_cast<const std::byte*>(data)) == 1) return cudaSuccess;
  return world->last_error = cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  ENTER("cudaMemcpyAsync");
  Operation operation;
  operation.pieces = copy_pieces(to, from, bytes);
  const bool detour = !reachable(to) || !reachable(from);
  world->counters.pageable_copies += detour;
  const auto record = push(stream, std::move(operation));
  if (detour && kind == cudaMemcpyDeviceToHost) {
    ++world->counters.blocking_calls;
    demand(record);
  }
  return cudaSuccess;
}
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                                 std::size_t count, cudaMemcpyAttributes* attributes,
                                 std::size_t* indexes, std::size_t num_attributes,
                                 cudaStream_t stream) {
  ENTER("cudaMemcpyBatchAsync");
  ++world->counters.batches;
  if (stream == nullptr || num_attributes != 1 || indexes[0] != 0) {
    return world->last_error = cudaErrorInvalidValue;
  }
  const bool any_order = attributes[0].srcAccessOrder == cudaMemcpySrcAccessOrderAny;
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), world->random);
  Operation operation;
  for (const std::size_t i : order) {
    world->counters.pageable_copies += !reachable(to[i]) || !reachable(from[i]);
    if (any_order && draw(2) == 0) {
      // The source is read now, whatever still runs before.
      const auto* begin = static_cast<const std::byte*>(from[i]);
      operation.pieces.push_back([to = to[i], early = std::vector(begin, begin + bytes[i])] {
        std::memcpy(to, early.data(), early.size());
      });
      continue;
    }
    for (auto& piece : copy_pieces(to[i], from[i], bytes[i])) {
      operation.pieces.push_back(std::move(piece));
    }
  }
  push(stream, std::move(operation));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                             std::size_t shared_bytes, cudaStream_t stream) {
  ENTER("cudaLaunchKernel");
  ++world->counters.launches;
  using hscache::cuda::host::bind_arguments;
  using hscache::cuda::host::run_block;
  if (grid.x < 1 || grid.y != 1 || grid.z != 1 || block.x < 1 || block.x > 1024 || block.y != 1 ||
      block.z != 1 || shared_bytes != 0) {
    return world->last_error = cudaErrorInvalidConfiguration;
  }
  // Arguments are read now, what they point to when the kernel runs.
  const auto bound = bind_arguments(kernel, arguments);
  if (!bound.run_thread) return world->last_error = cudaErrorInvalidDeviceFunction;
  std::vector<unsigned> blocks(grid.x);
  std::iota(blocks.begin(), blocks.end(), 0U);
  std::shuffle(blocks.begin(), blocks.end(), world->random);
  Operation operation;
  for (const unsigned index : blocks) {
    const std::uint64_t order = world->random();
    operation.pieces.push_back([=] { run_block(bound, index, grid, block, order); });
  }
  push(stream, std::move(operation));
  return cudaSuccess;
}

}  // extern "C"
