// What the transfer engine needs of a device: memory, streams, events, row kernels and copies.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/rows_task.h"

namespace hscache {

// A device refused or failed; the text begins with the device's own name for it. `lost` says that
// nothing will run on this device any more in this process.
class DeviceError : public std::runtime_error {
 public:
  DeviceError(const std::string& text, bool lost) : std::runtime_error(text), lost_(lost) {}
  bool lost() const { return lost_; }

 private:
  bool lost_;
};

// A point in a stream's order. Thread-safe.
class Event {
 public:
  virtual ~Event() = default;
  // Whether everything before this point has run; never blocks. Throws DeviceError when something
  // before it failed.
  virtual bool done() const = 0;
};

// Memory of a device, or host memory that it copies from without a detour. Given back when it
// dies: whoever owns it sees to it that nothing enqueued touches it any more.
class Buffer {
 public:
  virtual ~Buffer() = default;
  std::byte* data() const { return data_; }

 protected:
  explicit Buffer(std::byte* data) : data_(data) {}
  std::byte* data_;
};

// Host memory that a device copies to and from without a detour, as far as it took it; the rest is
// copied with one. Ends when it dies: before the memory goes, and after nothing enqueued uses it.
class Registration {
 public:
  virtual ~Registration() = default;
  // Has the device take more of the memory, which may take it a second. Returns whether there is
  // more to take: not where all was taken, nor where the device refused. One thread at a time.
  virtual bool extend() = 0;

  // These are thread-safe.
  std::int64_t bytes() const { return bytes_; }
  // Why not all of it was taken, in the device's own words; empty where nothing was refused.
  std::string refusal() const {
    const std::lock_guard lock(mutex_);
    return refusal_;
  }

 protected:
  void refuse(std::string why) {
    const std::lock_guard lock(mutex_);
    refusal_ = std::move(why);
  }
  std::atomic<std::int64_t> bytes_{0};

 private:
  mutable std::mutex mutex_;
  std::string refusal_;
};

// Contiguous bytes from one place to another.
struct Copy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::int64_t bytes = 0;
};

// A queue whose work runs in order, beside other streams. Enqueueing does not block, except for a
// copy from or to host memory that makes a detour, and is not thread-safe: one thread owns a
// stream. Memory given to it stays valid until what uses it has run.
// All throw DeviceError; what was enqueued by a call that throws may run nevertheless. Dies after
// its work has run.
class Stream {
 public:
  virtual ~Stream() = default;
  // What is enqueued from here on runs after `event`.
  virtual void wait(const std::shared_ptr<Event>& event) = 0;
  virtual std::shared_ptr<Event> record() = 0;
  // The ids, scales and counters of the task lie where its kernels reach them.
  virtual void move_rows(Direction direction, const RowsTask& task) = 0;
  // Between host and device, in any order among themselves. The list itself is read at once.
  virtual void copy_to_device(std::span<const Copy> copies) = 0;
  virtual void copy_to_host(std::span<const Copy> copies) = 0;
};

class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  // Whether the device's kernels reach the pool itself, so that rows go there in one step.
  virtual bool reaches_host() const = 0;
  // Called once at the beginning of a thread that does nothing but drive this device.
  virtual void enter_thread() {}
  // Where the device tells by itself when events are done: calls `wake` after each from here on, on
  // any thread, for streams made from here on, and returns true. False where it has to be asked.
  virtual bool wake_when_done(const std::function<void()>& wake) {
    static_cast<void>(wake);
    return false;
  }
  // Whether the device's kernels reach this byte of host memory: asked where reaches_host() is
  // false.
  virtual bool kernels_reach(const std::byte* data) const = 0;
  virtual std::unique_ptr<Stream> create_stream() = 0;
  virtual std::unique_ptr<Buffer> allocate_device(std::int64_t bytes) = 0;
  virtual std::unique_ptr<Buffer> allocate_pinned(std::int64_t bytes) = 0;
  // Registers host memory from a page boundary on, with each call of extend() a piece. Where the
  // device refuses, what it took until then stays; never throws for a refusal.
  virtual std::unique_ptr<Registration> register_host(std::byte* data, std::int64_t bytes) = 0;
  // An event after everything that has been enqueued so far on somebody else's stream, given as
  // the device's raw handle. Called on that stream's own thread.
  virtual std::shared_ptr<Event> record_on(std::uintptr_t stream) = 0;
};

}  // namespace hscache
