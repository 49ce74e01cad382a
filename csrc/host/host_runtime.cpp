#include "host/host_runtime.h"

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/host_copy.h"
#include "core/move_rows.h"

namespace hscache {
namespace {

class HostEvent final : public Event {
 public:
  bool done() const override {
    const std::lock_guard lock(mutex_);
    if (done_ && failure_) std::rethrow_exception(failure_);
    return done_;
  }

  // `failure` is what some work before this point ended with, if any did.
  void complete(std::exception_ptr failure) {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
      failure_ = std::move(failure);
    }
    changed_.notify_all();
  }

  void wait() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr failure_;
};

class HostBuffer final : public Buffer {
 public:
  explicit HostBuffer(std::int64_t bytes)
      : Buffer(nullptr), memory_(static_cast<std::size_t>(bytes)) {
    data_ = memory_.data();
  }

 private:
  std::vector<std::byte> memory_;
};

class HostRegistration final : public Registration {
 public:
  explicit HostRegistration(std::int64_t bytes) { bytes_ = bytes; }
  bool extend() override { return false; }
};

class HostStream final : public Stream {
 public:
  explicit HostStream(std::function<void()> wake)
      : wake_(std::move(wake)), thread_([this] { run(); }) {}

  ~HostStream() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  void wait(const std::shared_ptr<Event>& event) override {
    enqueue([event = std::static_pointer_cast<HostEvent>(event)] { event->wait(); });
  }

  std::shared_ptr<Event> record() override {
    auto event = std::make_shared<HostEvent>();
    enqueue([this, event] {
      event->complete(std::exchange(failure_, nullptr));
      wake_();
    });
    return event;
  }

  void move_rows(Direction direction, const RowsTask& task) override {
    enqueue([direction, task] { hscache::move_rows(direction, task); });
  }
  void copy_to_device(std::span<const Copy> copies) override { copy(copies); }
  void copy_to_host(std::span<const Copy> copies) override { copy(copies); }

 private:
  void copy(std::span<const Copy> copies) {
    enqueue([copies = std::vector(copies.begin(), copies.end())] {
      for (const Copy& piece : copies) {
        copy_bytes(piece.to, piece.from, piece.bytes);
      }
    });
  }

  void enqueue(std::function<void()> work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      try {
        work();
      } catch (...) {
        failure_ = std::current_exception();  // out of memory
      }
      lock.lock();
    }
  }

  const std::function<void()> wake_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool closing_ = false;
  std::exception_ptr failure_;  // of work since the last event; the thread's own
  std::thread thread_;          // last: it uses what stands above
};

}  // namespace

std::unique_ptr<Stream> HostRuntime::create_stream() { return std::make_unique<HostStream>(wake_); }

std::unique_ptr<Buffer> HostRuntime::allocate_device(std::int64_t bytes) {
  return std::make_unique<HostBuffer>(bytes);
}

std::unique_ptr<Buffer> HostRuntime::allocate_pinned(std::int64_t bytes) {
  return std::make_unique<HostBuffer>(bytes);
}

std::unique_ptr<Registration> HostRuntime::register_host(std::byte*, std::int64_t bytes) {
  return std::make_unique<HostRegistration>(bytes);
}

std::shared_ptr<Event> HostRuntime::record_on(std::uintptr_t stream) {
  if (stream != 0) {
    throw std::invalid_argument("the stream is " + std::to_string(stream) +
                                ": rows in host memory have no stream, pass 0");
  }
  auto event = std::make_shared<HostEvent>();
  event->complete(nullptr);
  return event;
}

}  // namespace hscache
