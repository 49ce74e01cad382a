#include "cuda/cuda_runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/mutation.h"
#include "cuda/beside_captures.h"
#include "cuda/error.h"
#include "cuda/rows.h"

namespace hscache::cuda {
namespace {

// Makes a device the calling thread's for a while.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "asking for the current device");
    if (before_ == device) return;
    check(cudaSetDevice(device), "choosing the device");
    changed_ = true;
  }
  ~OnDevice() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const BesideCaptures beside_captures_;
  int before_ = 0;
  bool changed_ = false;
};

class DeviceBuffer final : public Buffer {
 public:
  explicit DeviceBuffer(std::int64_t bytes) : Buffer(nullptr) {
    void* data = nullptr;
    check(cudaMalloc(&data, static_cast<std::size_t>(bytes)), "allocating the staging ring");
    data_ = static_cast<std::byte*>(data);
  }
  ~DeviceBuffer() override {
    const BesideCaptures beside_captures;
    static_cast<void>(cudaFree(data_));
  }
};

class PinnedBuffer final : public Buffer {
 public:
  explicit PinnedBuffer(std::int64_t bytes) : Buffer(nullptr) {
    void* data = nullptr;
    check(cudaHostAlloc(&data, static_cast<std::size_t>(bytes), cudaHostAllocDefault),
          "allocating pinned memory");
    data_ = static_cast<std::byte*>(data);
  }
  ~PinnedBuffer() override {
    const BesideCaptures beside_captures;
    static_cast<void>(cudaFreeHost(data_));
  }
};

}  // namespace

// Where registrations are cut in pieces, which no one copy may cross, and how far they have come.
// Thread-safe.
class HostPieces {
 public:
  struct Range {
    const std::byte* begin = nullptr;
    const std::byte* registered_end = nullptr;
    const std::byte* end = nullptr;
    std::int64_t piece_bytes = 0;
  };
  void set(const void* registration, const Range& range) {
    const std::lock_guard lock(mutex_);
    ranges_[registration] = range;
  }
  void remove(const void* registration) {
    const std::lock_guard lock(mutex_);
    ranges_.erase(registration);
  }

  struct Cut {
    std::vector<Copy> copies;
    bool makes_detour = false;  // some of the memory is not registered, or not yet
  };
  // The same copies, none of them across two pieces.
  Cut cut(std::span<const Copy> copies) const {
    const std::lock_guard lock(mutex_);
    Cut found;
    for (Copy rest : copies) {
      while (true) {
        std::int64_t bytes = rest.bytes;
        for (const auto& [registration, range] : ranges_) {
          for (const std::byte* const side : {static_cast<const std::byte*>(rest.to), rest.from}) {
            if (side < range.begin || side >= range.end) continue;
            bytes = std::min(bytes, range.piece_bytes - (side - range.begin) % range.piece_bytes);
            found.makes_detour |= side + bytes > range.registered_end;
          }
        }
        found.copies.push_back({rest.to, rest.from, bytes});
        if (bytes == rest.bytes) break;
        rest = {rest.to + bytes, rest.from + bytes, rest.bytes - bytes};
      }
    }
    return found;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const void*, Range> ranges_;
};

namespace {

class CudaRegistration final : public Registration {
 public:
  CudaRegistration(int device, std::shared_ptr<HostPieces> pieces, std::byte* data,
                   std::int64_t bytes, std::int64_t piece_bytes)
      : device_(device),
        pieces_(std::move(pieces)),
        data_(data),
        all_bytes_(bytes),
        piece_bytes_(piece_bytes) {
    tell();
  }
  ~CudaRegistration() override {
    const BesideCaptures beside_captures;
    for (std::int64_t begin = 0; begin < bytes_; begin += piece_bytes_) {
      static_cast<void>(cudaHostUnregister(data_ + begin));
    }
    pieces_->remove(this);
  }
  CudaRegistration(const CudaRegistration&) = delete;
  CudaRegistration& operator=(const CudaRegistration&) = delete;

  bool extend() override {
    if (bytes_ == all_bytes_) return false;
    // On a thread of its own: that keeps the device. Going back to the one that it began with, 0,
    // would make a context there.
    check(cudaSetDevice(device_), "choosing the device");
    const std::int64_t bytes = std::min(piece_bytes_, all_bytes_ - bytes_);
    const cudaError_t error =
        cudaHostRegister(data_ + bytes_, static_cast<std::size_t>(bytes), cudaHostRegisterPortable);
    if (error != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      refuse(std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")");
      return false;
    }
    bytes_ += bytes;
    tell();
    return bytes_ < all_bytes_;
  }

 private:
  void tell() { pieces_->set(this, {data_, data_ + bytes_, data_ + all_bytes_, piece_bytes_}); }

  const int device_;
  const std::shared_ptr<HostPieces> pieces_;
  std::byte* const data_;
  const std::int64_t all_bytes_;
  const std::int64_t piece_bytes_;
};

}  // namespace

class CudaEvent;

// Events cost the driver a call to make: they are used again. One goes back when nobody asks for
// its point any more, since recording it anew moves what earlier questions mean. Thread-safe.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  ~EventPool() {
    for (const cudaEvent_t event : free_) static_cast<void>(cudaEventDestroy(event));
  }
  std::shared_ptr<Event> record(cudaStream_t stream);

 private:
  friend class CudaEvent;

  cudaEvent_t take() {
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
    return event;
  }
  void put(cudaEvent_t event) {
    const std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;
};

class CudaEvent final : public Event {
 public:
  CudaEvent(std::shared_ptr<EventPool> home, cudaEvent_t event)
      : home_(std::move(home)), event_(event) {}
  ~CudaEvent() override { home_->put(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  bool done() const override {
    const BesideCaptures beside_captures;
    const cudaError_t answer = cudaEventQuery(event_);
    if (answer == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
    if (answer != cudaSuccess && !loses_context(answer) &&
        !mutated("a failed question counts as done")) {
      // The question failed, not the work, which may still run: told once that has ended, or when
      // the answer stays the same.
      static_cast<void>(cudaGetLastError());
      failed_question_ = answer;
      if (++failed_questions_ < kMostFailedQuestions) return false;
    }
    check(answer == cudaSuccess ? failed_question_.load() : answer, "running a transfer");
    return true;
  }
  cudaEvent_t raw() const { return event_; }

 private:
  const std::shared_ptr<EventPool> home_;
  const cudaEvent_t event_;
  static constexpr int kMostFailedQuestions = 1000;
  mutable std::atomic<cudaError_t> failed_question_{cudaSuccess};
  mutable std::atomic<int> failed_questions_{0};
};

std::shared_ptr<Event> EventPool::record(cudaStream_t stream) {
  auto event = std::make_shared<CudaEvent>(shared_from_this(), take());
  check(cudaEventRecord(event->raw(), stream), "recording an event");
  if (mutated("event given back early")) put(event->raw());
  return event;
}

namespace {

class CudaStream final : public Stream {
 public:
  CudaStream(int device, const unsigned* max_grid, std::shared_ptr<EventPool> events,
             std::shared_ptr<HostPieces> pieces)
      : device_(device),
        max_grid_(max_grid),
        events_(std::move(events)),
        pieces_(std::move(pieces)) {
    const OnDevice here(device);
    int lowest = 0;
    int highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for stream priorities");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, lowest),
          "making a side stream");
  }
  ~CudaStream() override {
    const BesideCaptures beside_captures;
    if (!mutated("a stream dies before its work"))
      static_cast<void>(cudaStreamSynchronize(stream_));
    static_cast<void>(cudaStreamDestroy(stream_));
  }

  void wait(const std::shared_ptr<Event>& event) override {
    const OnDevice here(device_);
    check(cudaStreamWaitEvent(stream_, static_cast<const CudaEvent&>(*event).raw(), 0),
          "ordering two streams");
  }
  std::shared_ptr<Event> record() override {
    const OnDevice here(device_);
    return events_->record(stream_);
  }

  void move_rows(Direction direction, const RowsTask& task) override {
    const OnDevice here(device_);
    check(cuda::move_rows(direction, task, stream_, *max_grid_), "launching a row kernel");
  }
  void copy_to_device(std::span<const Copy> copies) override {
    // The host's side does not change until the copy has run: it may be read at any time.
    copy(copies, cudaMemcpyHostToDevice);
  }
  void copy_to_host(std::span<const Copy> copies) override { copy(copies, cudaMemcpyDeviceToHost); }

 private:
  void copy(std::span<const Copy> copies, cudaMemcpyKind kind) {
    const OnDevice here(device_);
    const HostPieces::Cut cut = pieces_->cut(copies);
#if CUDART_VERSION >= 13000
    // Of memory that makes a detour the batch promises nothing.
    if (cut.copies.size() > 1 && !cut.makes_detour) {
      copy_batch(cut.copies);
      return;
    }
#endif
    for (const Copy& piece : cut.copies) {
      check(cudaMemcpyAsync(piece.to, piece.from, static_cast<std::size_t>(piece.bytes), kind,
                            stream_),
            "copying rows");
    }
  }

#if CUDART_VERSION >= 13000
  void copy_batch(std::span<const Copy> copies) {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<std::size_t> bytes;
    for (const Copy& piece : copies) {
      to.push_back(piece.to);
      from.push_back(piece.from);
      bytes.push_back(static_cast<std::size_t>(piece.bytes));
    }
    cudaMemcpyAttributes attributes{};
    // In stream order: device memory is still being written by the kernel before.
    attributes.srcAccessOrder = mutated("batch copy in any order") ? cudaMemcpySrcAccessOrderAny
                                                                   : cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
    check(cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), copies.size(), &attributes,
                               &first, 1, stream_),
          "copying rows");
  }
#endif

  const int device_;
  const unsigned* const max_grid_;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<HostPieces> pieces_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

CudaRuntime::CudaRuntime(int device)
    : device_(device),
      events_(std::make_shared<EventPool>()),
      pieces_(std::make_shared<HostPieces>()) {
  int count = 0;
  check(cudaGetDeviceCount(&count), "looking for CUDA devices");
  if (device < 0 || device >= count) {
    throw std::invalid_argument("CUDA device " + std::to_string(device) +
                                " is asked for, there are " + std::to_string(count) +
                                ": choose one from 0 on");
  }
}

CudaRuntime::~CudaRuntime() = default;

void CudaRuntime::enter_thread() { check(cudaSetDevice(device_), "choosing the device"); }

bool CudaRuntime::kernels_reach(const std::byte* data) const {
  cudaPointerAttributes attributes{};
  const cudaError_t error = cudaPointerGetAttributes(&attributes, data);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error == cudaSuccess && attributes.type == cudaMemoryTypeHost;
}

std::unique_ptr<Stream> CudaRuntime::create_stream() {
  return std::make_unique<CudaStream>(device_, &max_grid_, events_, pieces_);
}

std::unique_ptr<Buffer> CudaRuntime::allocate_device(std::int64_t bytes) {
  const OnDevice here(device_);
  return std::make_unique<DeviceBuffer>(bytes);
}

std::unique_ptr<Buffer> CudaRuntime::allocate_pinned(std::int64_t bytes) {
  const OnDevice here(device_);
  return std::make_unique<PinnedBuffer>(bytes);
}

std::unique_ptr<Registration> CudaRuntime::register_host(std::byte* data, std::int64_t bytes) {
  return std::make_unique<CudaRegistration>(device_, pieces_, data, bytes, piece_bytes_);
}

std::shared_ptr<Event> CudaRuntime::record_on(std::uintptr_t stream) {
  const OnDevice here(device_);
  auto* const raw = reinterpret_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(raw, &capture), "looking at the producer's stream");
  if (capture != cudaStreamCaptureStatusNone) {
    throw std::invalid_argument(
        "the producer's stream is being captured into a CUDA graph: submit transfers outside of "
        "capture");
  }
  return events_->record(raw);
}

std::string why_no_device() {
  int count = 0;
  const cudaError_t answer = cudaGetDeviceCount(&count);
  if (answer == cudaSuccess && count > 0) return "";
  static_cast<void>(cudaGetLastError());
  return answer == cudaSuccess ? "no CUDA device" : cudaGetErrorString(answer);
}

}  // namespace hscache::cuda
