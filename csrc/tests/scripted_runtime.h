// A DeviceRuntime whose work runs when, and fails where, the test says so. It reaches host memory,
// so that every step is one copy on the one stream of its lane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/device_runtime.h"

namespace hscache::test {

// The test's side of the device; outlives the engine. Thread-safe.
class Script : public std::enable_shared_from_this<Script> {
 public:
  // Calls that can fail.
  enum class Call { kCreateStream, kProducer, kWait, kCopy, kRecord, kDone };
  static constexpr int kCalls = 6;

  std::unique_ptr<DeviceRuntime> runtime();

  // The next calls of that kind throw std::runtime_error. A copy that fails has been enqueued
  // nevertheless, to its last byte.
  void fail_next(Call call, std::string text, int times = 1);

  // Producer events recorded from now on stay open until release_producers().
  void hold_producers();
  void release_producers();

  // Runs one operation of a stream; false where it is empty or waits.
  bool step(std::size_t stream);
  // Runs a stream, or all of them, as far as it goes; returns whether anything ran.
  bool run(std::size_t stream);
  bool run_all();

  // Of copies enqueued and not run.
  std::int64_t bytes_outstanding() const;
  std::int64_t most_bytes_outstanding() const;
  bool is_outstanding(const std::byte* destination) const;
  // Destinations of all copies so far, in the order in which they were enqueued.
  std::vector<const std::byte*> enqueued() const;

 private:
  struct ScriptedEvent;
  struct ScriptedStream;
  struct ScriptedRuntime;
  struct Operation {
    std::shared_ptr<ScriptedEvent> waits_for;
    std::shared_ptr<ScriptedEvent> completes;
    bool copies = false;
    RowsTask task;

    std::int64_t bytes() const {
      return task.length * task.paged.num_layers * task.paged.row_bytes;
    }
  };
  using Queue = std::deque<Operation>;

  void take_fault(Call call);
  bool step(Queue& stream, bool past_waits);

  mutable std::mutex mutex_;
  struct Fault {
    std::string text;
    int times = 0;
  };
  Fault faults_[kCalls];
  bool producers_held_ = false;
  std::vector<std::shared_ptr<ScriptedEvent>> producers_;
  std::vector<std::shared_ptr<Queue>> streams_;
  std::vector<const std::byte*> enqueued_;
  std::int64_t bytes_outstanding_ = 0;
  std::int64_t most_bytes_outstanding_ = 0;
};

}  // namespace hscache::test
