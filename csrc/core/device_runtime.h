// What the transfer engine needs of a device: streams, events and copies.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/copy_plan.h"
#include "core/paged_view.h"

namespace hscache {

// A point in a stream's order. Thread-safe.
class Event {
 public:
  virtual ~Event() = default;
  // Whether everything before this point has run; never blocks. Throws std::runtime_error with the
  // device's own words when something before it failed.
  virtual bool done() const = 0;
};

// A queue whose work runs in order, beside other streams. Enqueueing never blocks and is not
// thread-safe: one thread owns a stream. Dies after its work has run.
class Stream {
 public:
  virtual ~Stream() = default;
  // What is enqueued from here on runs after `event`.
  virtual void wait(std::shared_ptr<Event> event) = 0;
  // Copies the spans of a plan from `paged` to `rows`. Both stay untouched until it has run.
  virtual void copy(const PagedView& paged, const RowsView& rows, std::vector<CopySpan> plan) = 0;
  virtual std::shared_ptr<Event> record() = 0;
};

class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  virtual std::unique_ptr<Stream> create_stream() = 0;
  // An event after everything that the producer has enqueued so far on its own stream, given as
  // the device's raw handle. Called on the producer's thread.
  virtual std::shared_ptr<Event> record_producer(std::uintptr_t stream) = 0;
};

}  // namespace hscache
