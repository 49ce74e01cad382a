// Built without ThreadSanitizer's instrumentation: what decides who runs is not part of what runs.
#include "tests/fake_cuda.h"

#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>

#include "tests/fiber.h"
#include "tests/kernel_on_host.h"

#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

// There where the sanitizer is.
extern "C" {
__attribute__((weak)) void __tsan_acquire(void* address);
__attribute__((weak)) void __tsan_release(void* address);
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* begin, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void* begin, size_t bytes);
}

namespace hscache::fake {
namespace {

using Piece = std::function<void()>;

// A moment in a stream's order.
struct Record {
  bool done = false;
  CUstream_st* stream = nullptr;
};

struct Range {
  const std::byte* begin = nullptr;
  std::size_t bytes = 0;
};

struct Operation {
  std::vector<std::shared_ptr<Record>> after;
  std::deque<std::unique_ptr<Piece>> pieces;
  std::shared_ptr<Record> sets = std::make_shared<Record>();
  std::vector<Range> memory;  // that it copies from or to
  cudaError_t fault = cudaSuccess;
  bool begun = false;

  void add(Piece piece) { pieces.push_back(std::make_unique<Piece>(std::move(piece))); }
};
// Makes an operation anew each time that it is enqueued: a graph's runs many times.
using Recipe = std::function<Operation()>;

enum class Schedule {
  kOnDemand,             // as late as the host's questions allow
  kPriorities,           // streams take turns by priorities that change
  kSomeAtOnce,           // some streams run when they can, the rest on demand
  kPrioritiesAtEnqueue,  // as kPriorities, and something runs at each enqueue
};

// What a stream does next.
struct Job {
  std::vector<Record*> knows;
  Piece* piece = nullptr;
  Record* tells = nullptr;
};

void run(const Job& job) {
  if (__tsan_acquire) {
    for (Record* record : job.knows) __tsan_acquire(record);
  }
  if (job.piece) (*job.piece)();
  delete job.piece;  // by the one that ran it
  if (__tsan_release && job.tells) __tsan_release(job.tells);
}

// Runs a stream's work as a thread of the sanitizer's, one stream after the other in the course of
// many worlds: a thread and its stack take long to make.
class Worker {
 public:
  Worker() {
    fiber_.start(
        [](void* self) {
          auto& worker = *static_cast<Worker*>(self);
          while (true) {
            fake::run(worker.job_);
            worker.fiber_.stop();
          }
        },
        this);
  }
  void run(Job job) {
    job_ = std::move(job);
    fiber_.resume();
  }
  // The host has seen all of its work, or it has seen all of the host's.
  void joins_host() {
    run({{}, nullptr, &meeting_});
    __tsan_acquire(&meeting_);
  }
  void follows_host() {
    __tsan_release(&meeting_);
    run({{&meeting_}, nullptr, nullptr});
  }

 private:
  test::Fiber fiber_{test::Fiber::Counts::kAsAThread};
  Job job_;
  Record meeting_;
};

}  // namespace
}  // namespace hscache::fake

// CUDA's own opaque types.
struct CUstream_st {
  std::deque<hscache::fake::Operation> operations;
  std::shared_ptr<hscache::fake::Record> latest;  // null: nothing was ever enqueued
  std::uint64_t priority = 0;
  bool at_once = false;
  bool blocking = false;
  bool destroyed = false;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  std::vector<hscache::fake::Recipe> captured;
  std::unique_ptr<hscache::fake::Worker> worker;  // only under ThreadSanitizer
};
struct CUevent_st {
  std::shared_ptr<hscache::fake::Record> latest;  // null: never recorded
  CUstream_st* captured_on = nullptr;             // where the latest record is part of a capture
  bool destroyed = false;
};
struct CUgraph_st {
  std::vector<hscache::fake::Recipe> operations;
};
struct CUgraphExec_st {
  std::vector<hscache::fake::Recipe> operations;
};

namespace hscache::fake {
namespace {

constexpr std::size_t kPage = 4096;
// Device memory beyond this size stays open: closing it takes longer than the work on it.
constexpr std::size_t kMostClosed = std::size_t{1} << 20;

struct Allocation {
  std::byte* data = nullptr;
  std::size_t bytes = 0;  // asked for
  std::size_t mapped =
      0;  // of device memory: whole pages, with one behind them that nobody touches
  bool freed = false;
  std::vector<std::byte> pinned;  // of host memory

  bool device() const { return mapped > 0; }
};
struct Failure {
  cudaError_t error = cudaSuccess;
  int skip = 0;
  int times = 1;
  bool lost = false;
};

// Everything of one seed. Made anew by reset(), so that seeds replay.
struct World {
  World() { add_stream(); }
  ~World();
  CUstream_st& add_stream();

  std::mt19937_64 random;
  Schedule schedule = Schedule::kOnDemand;
  bool free_waits = true;
  std::vector<std::unique_ptr<CUstream_st>> streams;  // the first is stream 0
  std::vector<std::unique_ptr<CUevent_st>> events;
  std::vector<std::unique_ptr<Allocation>> allocations;
  std::map<const std::byte*, std::size_t> registered;
  std::map<std::string, Failure> failures;
  cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
  cudaError_t lost = cudaSuccess;
  cudaError_t last_error = cudaSuccess;
  bool counts_misuse = false;
  int open = 0;  // those who have device memory open
  Counters counters;
};
// What goes from world to world: making it anew costs more than the work on it.
std::vector<std::unique_ptr<Worker>> idle_workers;
std::multimap<std::size_t, std::byte*> idle_pages;  // by mapped bytes

std::unique_ptr<World> world = std::make_unique<World>();

CUstream_st& World::add_stream() {
  streams.push_back(std::make_unique<CUstream_st>());
  CUstream_st& stream = *streams.back();
  stream.priority = random();
  if (__tsan_acquire) {
    // Now, not when it first runs: what the host does in between, it does not know of.
    if (idle_workers.empty()) {
      stream.worker = std::make_unique<Worker>();
    } else {
      stream.worker = std::move(idle_workers.back());
      idle_workers.pop_back();
    }
    stream.worker->follows_host();
  }
  return stream;
}

World::~World() {
  for (const auto& stream : streams) {
    if (!stream->worker) continue;
    stream->worker->joins_host();
    idle_workers.push_back(std::move(stream->worker));
  }
  for (const auto& allocation : allocations) {
    if (!allocation->device()) continue;
    if (__asan_unpoison_memory_region) {
      __asan_unpoison_memory_region(allocation->data, allocation->mapped);
    }
    if (allocation->mapped > kMostClosed) {
      munmap(allocation->data, allocation->mapped + kPage);
    } else {
      idle_pages.emplace(allocation->mapped, allocation->data);
    }
  }
}

std::uint64_t draw(std::uint64_t below) { return world->random() % below; }

[[noreturn]] void die(const char* why) {
  std::fprintf(stderr, "fake CUDA: %s\n", why);
  std::abort();
}

void misuse(const char* what) {
  if (!world->counts_misuse) die(what);
  ++world->counters.misuses;
}

CUstream_st& at(cudaStream_t stream) {
  CUstream_st& found = stream == nullptr ? *world->streams.front() : *stream;
  if (found.destroyed) misuse("a stream is used after its end");
  return found;
}

// --- device memory is closed to the host ---

void protect(const Allocation& allocation, int protection) {
  if (allocation.mapped > kMostClosed && protection == PROT_NONE) return;
  if (mprotect(allocation.data, allocation.mapped, protection) != 0) die("mprotect failed");
}
void protect_all(int protection) {
  for (const auto& allocation : world->allocations) {
    if (allocation->device() && allocation->mapped <= kMostClosed) {
      protect(*allocation, protection);
    }
  }
}
void open_device() {
  if (world->open++ == 0) protect_all(PROT_READ | PROT_WRITE);
}
void close_device() {
  if (--world->open == 0) protect_all(PROT_NONE);
}

struct sigaction before_us;

void on_fault(int, siginfo_t* info, void*) {
  const auto* const byte = static_cast<const std::byte*>(info->si_addr);
  for (const auto& allocation : world->allocations) {
    if (allocation->device() && byte >= allocation->data &&
        byte < allocation->data + allocation->mapped + kPage) {
      die(world->open > 0 ? "an access beyond the end of device memory"
                          : "host code touches device memory: copy it, or hold a DeviceAccess");
    }
  }
  sigaction(SIGSEGV, &before_us, nullptr);  // the access is tried again, and fails their way
}

void watch_device_memory() {
  static const bool watching = [] {
    struct sigaction ours{};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &ours, &before_us);
    return true;
  }();
  static_cast<void>(watching);
}

// --- work runs ---

// Device memory is opened when the first work runs and closed when the host's call ends: opening it
// for each piece would take longer than the work.
class Execution {
 public:
  Execution() : outer_(current) { current = this; }
  ~Execution() {
    if (opened_) close_device();
    current = outer_;
  }
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  static void begins() {
    if (current->opened_) return;
    open_device();
    current->opened_ = true;
  }

 private:
  static inline Execution* current = nullptr;
  Execution* const outer_;
  bool opened_ = false;
};

// Nothing of what was enqueued runs any more, and whoever is told so may rely on it.
void lose(cudaError_t error) {
  world->lost = error;
  for (const auto& stream : world->streams) {
    for (const Operation& operation : stream->operations) operation.sets->done = true;
    stream->operations.clear();
    if (stream->worker) stream->worker->joins_host();
  }
}

bool ready(const CUstream_st& stream) {
  if (stream.operations.empty()) return false;
  const auto& after = stream.operations.front().after;
  return std::all_of(after.begin(), after.end(), [](const auto& record) { return record->done; });
}

// Runs one piece of the first operation.
void run_piece(CUstream_st& stream) {
  Operation& operation = stream.operations.front();
  Job job;
  if (!operation.begun) {
    operation.begun = true;
    for (const auto& record : operation.after) job.knows.push_back(record.get());
    job.knows.push_back(operation.sets.get());
  }
  if (!operation.pieces.empty()) {
    job.piece = operation.pieces.front().release();
    operation.pieces.pop_front();
    Execution::begins();
  }
  const bool ends = operation.pieces.empty();
  if (ends) job.tells = operation.sets.get();
  if (stream.worker) {
    stream.worker->run(std::move(job));
  } else {
    run(job);
  }
  if (!ends) return;
  if (operation.fault != cudaSuccess) {
    lose(operation.fault);
    return;
  }
  operation.sets->done = true;
  stream.operations.pop_front();
}

// Runs what must run before a moment has come, and nothing else.
void demand(const std::shared_ptr<Record>& record) {
  while (!record->done) {
    CUstream_st& stream = *record->stream;
    const std::vector<std::shared_ptr<Record>> after = stream.operations.front().after;
    for (const auto& before : after) demand(before);
    if (!record->done) run_piece(stream);
  }
}

// The host has asked, and knows now what had been done by then.
void host_knows(const Record& record) {
  if (__tsan_acquire) __tsan_acquire(const_cast<Record*>(&record));
}

bool run_by_priority() {
  CUstream_st* chosen = nullptr;
  for (const auto& stream : world->streams) {
    if ((chosen == nullptr || stream->priority > chosen->priority) && ready(*stream)) {
      chosen = stream.get();
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
    for (const auto& stream : world->streams) {
      while (stream->at_once && ready(*stream)) {
        run_piece(*stream);
        ran = true;
      }
    }
  }
}

// --- work is enqueued ---

std::shared_ptr<Record> push(CUstream_st& stream, Operation operation) {
  const Execution execution;
  auto record = operation.sets;
  record->stream = &stream;
  // Stream 0 and blocking streams wait for each other.
  const bool is_zero = &stream == world->streams.front().get();
  for (const auto& other : world->streams) {
    const bool other_is_zero = other == world->streams.front();
    if (other->latest && ((is_zero && other->blocking) || (stream.blocking && other_is_zero))) {
      operation.after.push_back(other->latest);
    }
  }
  stream.latest = record;
  stream.operations.push_back(std::move(operation));
  if (__tsan_release) __tsan_release(record.get());
  if (world->schedule == Schedule::kSomeAtOnce) run_at_once();
  if (world->schedule == Schedule::kPrioritiesAtEnqueue) {
    for (std::uint64_t i = draw(4); i > 0; --i) run_by_priority();
  }
  return record;
}

cudaError_t refuse(cudaError_t error) { return world->last_error = error; }

cudaError_t invalidate_captures(cudaError_t error) {
  for (const auto& stream : world->streams) {
    if (stream->capture == cudaStreamCaptureStatusActive) {
      stream->capture = cudaStreamCaptureStatusInvalidated;
    }
  }
  return refuse(error);
}

// Enqueues an operation, or adds it to the graph that the stream is captured into.
cudaError_t push_or_capture(CUstream_st& stream, const Recipe& recipe) {
  if (stream.capture == cudaStreamCaptureStatusActive) {
    stream.captured.push_back(recipe);
    return cudaSuccess;
  }
  if (stream.capture == cudaStreamCaptureStatusInvalidated) {
    return refuse(cudaErrorStreamCaptureInvalidated);
  }
  if (&stream == world->streams.front().get()) {
    for (const auto& other : world->streams) {
      if (other->blocking && other->capture != cudaStreamCaptureStatusNone) {
        return invalidate_captures(cudaErrorStreamCaptureImplicit);
      }
    }
  }
  push(stream, recipe());
  return cudaSuccess;
}

// What every call begins with: failures that the test has asked for, and work that has failed.
cudaError_t enter(const char* call) {
  if (world->lost != cudaSuccess) return refuse(world->lost);
  const auto found = world->failures.find(call);
  if (found == world->failures.end()) return cudaSuccess;
  if (found->second.skip-- > 0) return cudaSuccess;
  const Failure failure = found->second;
  if (--found->second.times <= 0) world->failures.erase(found);
  if (failure.lost) lose(failure.error);
  return refuse(failure.error);
}

// Calls that a capture forbids to all threads that have not said otherwise.
bool capture_forbids() {
  if (world->thread_mode == cudaStreamCaptureModeRelaxed) return false;
  return std::any_of(world->streams.begin(), world->streams.end(), [](const auto& stream) {
    return stream->capture == cudaStreamCaptureStatusActive &&
           stream->capture_mode != cudaStreamCaptureModeRelaxed;
  });
}

// --- memory ---

enum class Reach { kDirect, kWithDetour, kNot };

// How the copy engine reaches host or device memory. Pinned, registered and device memory it
// reaches directly, as far as one allocation or registration goes.
Reach reach(const void* address, std::size_t bytes) {
  const auto* const byte = static_cast<const std::byte*>(address);
  for (const auto& allocation : world->allocations) {
    if (byte < allocation->data || byte >= allocation->data + allocation->bytes) continue;
    if (allocation->freed) misuse("work names memory that was given back");
    return byte + bytes <= allocation->data + allocation->bytes ? Reach::kDirect : Reach::kNot;
  }
  const auto next = world->registered.upper_bound(byte);
  if (next != world->registered.begin()) {
    const auto& [begin, size] = *std::prev(next);
    if (byte < begin + size) return byte + bytes <= begin + size ? Reach::kDirect : Reach::kNot;
  }
  return next != world->registered.end() && next->first < byte + bytes ? Reach::kNot
                                                                       : Reach::kWithDetour;
}

// A copy in up to four parts, reading when it runs; `early` reads now.
void add_copy(Operation& operation, void* to, const void* from, std::size_t bytes, bool early) {
  for (const void* side : {static_cast<const void*>(to), from}) {
    operation.memory.push_back({static_cast<const std::byte*>(side), bytes});
  }
  if (early) {
    const Execution execution;
    Execution::begins();
    std::vector<std::byte> read(bytes);
    std::memcpy(read.data(), from, bytes);
    operation.add([to, read = std::move(read)] { std::memcpy(to, read.data(), read.size()); });
    return;
  }
  const std::size_t parts = 1 + draw(4);
  for (std::size_t i = 0; i < parts; ++i) {
    const std::size_t begin = bytes * i / parts;
    const std::size_t end = bytes * (i + 1) / parts;
    operation.add([=] {
      std::memcpy(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
                  end - begin);
    });
  }
}

// Nothing that was enqueued touches this host memory any more.
void must_be_idle(const std::byte* begin, std::size_t bytes, const char* otherwise) {
  for (const auto& stream : world->streams) {
    for (const Operation& operation : stream->operations) {
      for (const Range& range : operation.memory) {
        if (range.begin < begin + bytes && begin < range.begin + range.bytes) {
          misuse(otherwise);
          return;
        }
      }
    }
  }
}

void fill_with_garbage(std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += sizeof(std::uint64_t)) {
    const std::uint64_t garbage = world->random();
    std::memcpy(data + i, &garbage, std::min(sizeof(garbage), bytes - i));
  }
}

void* allocate_device(std::size_t bytes) {
  Counters& counters = world->counters;
  counters.device_bytes += static_cast<std::int64_t>(bytes);
  counters.most_device_bytes = std::max(counters.most_device_bytes, counters.device_bytes);
  // Memory that was given back is the first to be used again.
  for (const auto& old : world->allocations) {
    if (!old->device() || !old->freed || old->bytes < bytes) continue;
    old->freed = false;
    old->bytes = bytes;
    return old->data;
  }
  auto allocation = std::make_unique<Allocation>();
  allocation->bytes = bytes;
  allocation->mapped = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
  const auto idle = idle_pages.find(allocation->mapped);
  if (idle != idle_pages.end()) {
    allocation->data = idle->second;
    idle_pages.erase(idle);
  } else {
    void* const pages = mmap(nullptr, allocation->mapped + kPage, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) die("no memory for a device");
    allocation->data = static_cast<std::byte*>(pages);
  }
  std::byte* const data = allocation->data;
  protect(*allocation, PROT_READ | PROT_WRITE);
  fill_with_garbage(allocation->data, bytes);
  if (__asan_poison_memory_region) {
    __asan_poison_memory_region(allocation->data + bytes, allocation->mapped - bytes);
  }
  if (world->open == 0) protect(*allocation, PROT_NONE);
  world->allocations.push_back(std::move(allocation));
  return data;
}

void* allocate_pinned(std::size_t bytes) {
  auto allocation = std::make_unique<Allocation>();
  allocation->bytes = bytes;
  allocation->pinned.resize(std::max<std::size_t>(bytes, 1));
  allocation->data = allocation->pinned.data();
  fill_with_garbage(allocation->data, bytes);
  world->allocations.push_back(std::move(allocation));
  return world->allocations.back()->data;
}

cudaError_t release(void* data, bool device) {
  if (data == nullptr) return cudaSuccess;
  for (const auto& allocation : world->allocations) {
    if (allocation->data != data || allocation->device() != device || allocation->freed) continue;
    if (world->free_waits) finish();
    must_be_idle(allocation->data, allocation->bytes,
                 "memory is given back while a copy in flight uses it");
    // What still uses it reads zeros: wrong, yet block ids that exist. The pages stay until the end
    // of the world, or until they are somebody else's.
    const DeviceAccess open;
    std::memset(allocation->data, 0, allocation->bytes);
    allocation->freed = true;
    if (device) world->counters.device_bytes -= static_cast<std::int64_t>(allocation->bytes);
    return world->lost;
  }
  return refuse(cudaErrorInvalidValue);
}

}  // namespace

void reset(std::uint64_t seed) {
  watch_device_memory();
  world = std::make_unique<World>();
  world->random.seed(seed);
  world->schedule = static_cast<Schedule>(draw(4));
  world->free_waits = draw(2) == 0;
  world->streams.front()->priority = world->random();
}

cudaStream_t make_stream(bool blocking) {
  CUstream_st& stream = world->add_stream();
  stream.at_once = draw(2) == 0;
  stream.blocking = blocking;
  return &stream;
}

void enqueue(cudaStream_t stream, std::vector<std::function<void()>> pieces) {
  Operation operation;
  for (Piece& piece : pieces) operation.add(std::move(piece));
  push(at(stream), std::move(operation));
}

void enqueue_fault(cudaStream_t stream, cudaError_t error) {
  Operation operation;
  operation.fault = error;
  push(at(stream), std::move(operation));
}

void progress() {
  const Execution execution;
  if (world->schedule == Schedule::kSomeAtOnce) run_at_once();
  if (world->schedule == Schedule::kPriorities ||
      world->schedule == Schedule::kPrioritiesAtEnqueue) {
    for (std::uint64_t i = draw(6); i > 0; --i) run_by_priority();
  }
}

void finish() {
  const Execution execution;
  while (run_by_priority()) {
  }
  for (const auto& stream : world->streams) {
    if (stream->latest) host_knows(*stream->latest);
  }
}

void fail(const std::string& call, cudaError_t error, int skip, bool lost, int times) {
  world->failures[call] = {error, skip, times, lost};
}
void fail_no_more() { world->failures.clear(); }

void count_misuse() { world->counts_misuse = true; }

DeviceAccess::DeviceAccess() { open_device(); }
DeviceAccess::~DeviceAccess() { close_device(); }

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
// Of calls that may wait for work that a capture only notes.
#define ENTER_OUTSIDE_CAPTURE(call) \
  ENTER(call);                      \
  if (capture_forbids()) return invalidate_captures(cudaErrorStreamCaptureUnsupported)

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
cudaError_t cudaStreamDestroy(cudaStream_t stream) {  // its work still runs
  at(stream).destroyed = true;
  return world->lost;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ++world->counters.blocking_calls;
  ENTER("cudaStreamSynchronize");
  CUstream_st& queue = at(stream);
  if (queue.capture != cudaStreamCaptureStatusNone || capture_forbids()) {
    return invalidate_captures(cudaErrorStreamCaptureUnsupported);
  }
  if (queue.latest == nullptr) return cudaSuccess;
  const Execution execution;
  demand(queue.latest);
  if (world->lost != cudaSuccess) return refuse(world->lost);
  host_knows(*queue.latest);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  ENTER("cudaStreamIsCapturing");
  *status = at(stream).capture;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  ENTER("cudaThreadExchangeStreamCaptureMode");
  std::swap(*mode, world->thread_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  ENTER("cudaStreamBeginCapture");
  CUstream_st& queue = at(stream);
  if (stream == nullptr || queue.capture != cudaStreamCaptureStatusNone) {
    return refuse(cudaErrorStreamCaptureUnsupported);
  }
  queue.capture = cudaStreamCaptureStatusActive;
  queue.capture_mode = mode;
  queue.captured.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  ENTER("cudaStreamEndCapture");
  CUstream_st& queue = at(stream);
  const cudaStreamCaptureStatus capture = queue.capture;
  queue.capture = cudaStreamCaptureStatusNone;
  *graph = nullptr;
  if (capture == cudaStreamCaptureStatusNone) return refuse(cudaErrorIllegalState);
  if (capture == cudaStreamCaptureStatusInvalidated) {
    return refuse(cudaErrorStreamCaptureInvalidated);
  }
  *graph = new CUgraph_st{std::move(queue.captured)};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
  ENTER("cudaGraphInstantiate");
  *runnable = new CUgraphExec_st{graph->operations};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t stream) {
  ENTER("cudaGraphLaunch");
  CUstream_st& queue = at(stream);
  for (const Recipe& operation : runnable->operations) {
    const cudaError_t answer = push_or_capture(queue, operation);
    if (answer != cudaSuccess) return answer;
  }
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runnable) {  // what was launched still runs
  delete runnable;
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  ENTER("cudaEventCreateWithFlags");
  world->events.push_back(std::make_unique<CUevent_st>());
  *event = world->events.back().get();
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event->destroyed) misuse("an event is destroyed twice");
  event->destroyed = true;
  return world->lost;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER("cudaEventRecord");
  if (event->destroyed) misuse("an event is recorded after its end");
  CUstream_st& queue = at(stream);
  event->captured_on = queue.capture == cudaStreamCaptureStatusActive ? &queue : nullptr;
  if (event->captured_on) return cudaSuccess;
  Operation operation;
  event->latest = operation.sets;
  return push_or_capture(queue, [&] { return std::move(operation); });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER("cudaEventQuery");
  if (event->destroyed) misuse("an event is asked after its end");
  if (event->captured_on) return invalidate_captures(cudaErrorCapturedEvent);
  if (capture_forbids()) return invalidate_captures(cudaErrorStreamCaptureUnsupported);
  if (event->latest == nullptr) return cudaSuccess;
  progress();
  const Execution execution;
  const bool demanded =
      world->schedule == Schedule::kOnDemand || world->schedule == Schedule::kSomeAtOnce;
  if (demanded && !event->latest->done && draw(4) == 0) demand(event->latest);
  if (world->lost != cudaSuccess) return refuse(world->lost);
  if (!event->latest->done) return refuse(cudaErrorNotReady);
  host_knows(*event->latest);
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ENTER("cudaStreamWaitEvent");
  if (event->destroyed) misuse("an event is waited for after its end");
  CUstream_st& queue = at(stream);
  // A capture of several streams is more than any test needs: each stays with its own.
  if (event->captured_on == &queue && queue.capture == cudaStreamCaptureStatusActive) {
    return cudaSuccess;
  }
  if (event->captured_on || queue.capture != cudaStreamCaptureStatusNone) {
    return invalidate_captures(cudaErrorStreamCaptureIsolation);
  }
  if (event->latest == nullptr) return cudaSuccess;
  Operation operation;
  operation.after.push_back(event->latest);
  return push_or_capture(queue, [&] { return std::move(operation); });
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  ENTER_OUTSIDE_CAPTURE("cudaMalloc");
  *data = allocate_device(bytes);
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (capture_forbids()) return invalidate_captures(cudaErrorStreamCaptureUnsupported);
  return release(data, true);
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
  ENTER_OUTSIDE_CAPTURE("cudaHostAlloc");
  *data = allocate_pinned(bytes);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  if (capture_forbids()) return invalidate_captures(cudaErrorStreamCaptureUnsupported);
  return release(data, false);
}
cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
  ENTER_OUTSIDE_CAPTURE("cudaHostRegister");
  const auto* begin = static_cast<const std::byte*>(data);
  const auto next = world->registered.lower_bound(begin + bytes);
  if (next != world->registered.begin()) {
    const auto& [other, size] = *std::prev(next);
    if (other + size > begin) return refuse(cudaErrorHostMemoryAlreadyRegistered);
  }
  world->registered[begin] = bytes;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  ENTER("cudaPointerGetAttributes");
  const bool reached = reach(data, 1) == Reach::kDirect;
  attributes->type = reached ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* data) {
  ENTER_OUTSIDE_CAPTURE("cudaHostUnregister");
  const auto found = world->registered.find(static_cast<const std::byte*>(data));
  if (found == world->registered.end()) return refuse(cudaErrorHostMemoryNotRegistered);
  must_be_idle(found->first, found->second,
               "host memory is unregistered while a copy in flight uses it");
  world->registered.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  ENTER("cudaMemcpyAsync");
  const Reach reaches[] = {reach(to, bytes), reach(from, bytes)};
  if (std::count(std::begin(reaches), std::end(reaches), Reach::kNot) > 0) {
    return refuse(cudaErrorInvalidValue);
  }
  const bool detour = std::count(std::begin(reaches), std::end(reaches), Reach::kWithDetour) > 0;
  world->counters.pageable_copies += detour;
  CUstream_st& queue = at(stream);
  const bool capturing = queue.capture != cudaStreamCaptureStatusNone;
  // A detour to the device may begin with a copy of the host's side at once.
  const bool early = detour && !capturing && kind == cudaMemcpyHostToDevice && draw(2) == 0;
  const cudaError_t answer = push_or_capture(queue, [=] {
    Operation operation;
    add_copy(operation, to, from, bytes, early);
    return operation;
  });
  if (answer == cudaSuccess && detour && !capturing && kind == cudaMemcpyDeviceToHost) {
    ++world->counters.blocking_calls;
    const Execution execution;
    demand(queue.latest);
    host_knows(*queue.latest);
  }
  return answer;
}
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes,
                                 std::size_t count, cudaMemcpyAttributes* attributes,
                                 std::size_t* indexes, std::size_t num_attributes,
                                 cudaStream_t stream) {
  ENTER("cudaMemcpyBatchAsync");
  ++world->counters.batches;
  CUstream_st& queue = at(stream);
  if (queue.capture != cudaStreamCaptureStatusNone) {
    return invalidate_captures(cudaErrorStreamCaptureUnsupported);
  }
  if (stream == nullptr || num_attributes != 1 || indexes[0] != 0) {
    return refuse(cudaErrorInvalidValue);
  }
  for (std::size_t i = 0; i < count; ++i) {
    const Reach there = reach(to[i], bytes[i]);
    const Reach here = reach(from[i], bytes[i]);
    if (there == Reach::kNot || here == Reach::kNot) return refuse(cudaErrorInvalidValue);
    world->counters.pageable_copies += there != Reach::kDirect || here != Reach::kDirect;
  }
  const bool any_order = attributes[0].srcAccessOrder == cudaMemcpySrcAccessOrderAny;
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), world->random);
  Operation operation;
  for (const std::size_t i : order) {
    // In any order a source may be read now, whatever still runs before.
    add_copy(operation, to[i], from[i], bytes[i], any_order && draw(2) == 0);
  }
  push(queue, std::move(operation));
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
    return refuse(cudaErrorInvalidConfiguration);
  }
  // Arguments are read now, what they point to when the kernel runs.
  const auto bound = bind_arguments(kernel, arguments);
  if (!bound.run_thread) return refuse(cudaErrorInvalidDeviceFunction);
  for (const void* const memory : bound.memory) {
    if (memory != nullptr && reach(memory, 1) != Reach::kDirect) {
      misuse("a kernel is given host memory that is neither pinned nor registered");
    }
  }
  return push_or_capture(at(stream), [=] {
    std::vector<unsigned> blocks(grid.x);
    std::iota(blocks.begin(), blocks.end(), 0U);
    std::shuffle(blocks.begin(), blocks.end(), world->random);
    Operation operation;
    for (const unsigned index : blocks) {
      const std::uint64_t order = world->random();
      operation.add([=] { run_block(bound, index, grid, block, order); });
    }
    return operation;
  });
}

}  // extern "C"
