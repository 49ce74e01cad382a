// A DeviceRuntime whose work runs when, and fails where, the test says so.
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

  // The next call of that kind throws std::runtime_error, once. A copy that fails has been enqueued
  // nevertheless, to its last byte.
  void fail_next(Call call, std::string text);

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
    PagedView paged;
    RowsView rows;
    std::vector<CopySpan> plan;
  };
  using Queue = std::deque<Operation>;

  void take_fault(Call call);
  bool step(Queue& stream, bool past_waits);

  mutable std::mutex mutex_;
  std::string faults_[kCalls];
  bool producers_held_ = false;
  std::vector<std::shared_ptr<ScriptedEvent>> producers_;
  std::vector<std::shared_ptr<Queue>> streams_;
  std::vector<const std::byte*> enqueued_;
  std::int64_t bytes_outstanding_ = 0;
  std::int64_t most_bytes_outstanding_ = 0;
};

}  // namespace hscache::test
