#include "tests/scripted_runtime.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "core/move_rows.h"

namespace hscache::test {
struct Script::ScriptedEvent final : Event {
  explicit ScriptedEvent(Script& owner) : script(owner) {}
  bool done() const override {
    const std::lock_guard lock(script.mutex_);
    if (complete) script.take_fault(Call::kDone);
    return complete;
  }
  Script& script;  // not shared: it has the event in a queue
  bool complete = false;
};

struct Script::ScriptedStream final : Stream {
  ScriptedStream(std::shared_ptr<Script> owner, std::shared_ptr<Queue> work)
      : script(std::move(owner)), queue(std::move(work)) {}
  // As the interface asks; what it waits for is taken to have happened by then.
  ~ScriptedStream() override {
    const std::lock_guard lock(script->mutex_);
    while (script->step(*queue, true)) {
    }
  }
  void wait(const std::shared_ptr<Event>& event) override {
    const std::lock_guard lock(script->mutex_);
    script->take_fault(Call::kWait);
    Operation operation;
    operation.waits_for = std::static_pointer_cast<ScriptedEvent>(event);
    queue->push_back(std::move(operation));
  }
  void move_rows(Direction direction, const RowsTask& task) override {
    if (direction != Direction::kGather) throw std::logic_error("not scripted");
    const std::lock_guard lock(script->mutex_);
    Operation operation;
    operation.copies = true;
    operation.task = task;
    script->bytes_outstanding_ += operation.bytes();
    script->most_bytes_outstanding_ =
        std::max(script->most_bytes_outstanding_, script->bytes_outstanding_);
    script->enqueued_.push_back(task.rows.data);
    queue->push_back(std::move(operation));
    script->take_fault(Call::kCopy);
  }
  void copy_to_device(std::span<const Copy>) override { throw std::logic_error("not scripted"); }
  void copy_to_host(std::span<const Copy>) override { throw std::logic_error("not scripted"); }
  std::shared_ptr<Event> record() override {
    const std::lock_guard lock(script->mutex_);
    script->take_fault(Call::kRecord);
    Operation operation;
    operation.completes = std::make_shared<ScriptedEvent>(*script);
    queue->push_back(operation);
    return operation.completes;
  }

  const std::shared_ptr<Script> script;
  const std::shared_ptr<Queue> queue;
};

struct Script::ScriptedRuntime final : DeviceRuntime {
  explicit ScriptedRuntime(std::shared_ptr<Script> owner) : script(std::move(owner)) {}
  bool kernels_reach(const std::byte*) const override { return true; }
  std::unique_ptr<Stream> create_stream() override {
    const std::lock_guard lock(script->mutex_);
    script->take_fault(Call::kCreateStream);
    script->streams_.push_back(std::make_shared<Queue>());
    return std::make_unique<ScriptedStream>(script, script->streams_.back());
  }
  bool reaches_host() const override { return true; }
  std::unique_ptr<hscache::Buffer> allocate_device(std::int64_t) override { return nullptr; }
  std::unique_ptr<hscache::Buffer> allocate_pinned(std::int64_t) override { return nullptr; }
  std::unique_ptr<Registration> register_host(std::byte*, std::int64_t) override { return nullptr; }
  std::shared_ptr<Event> record_on(std::uintptr_t) override {
    const std::lock_guard lock(script->mutex_);
    script->take_fault(Call::kProducer);
    auto event = std::make_shared<ScriptedEvent>(*script);
    event->complete = !script->producers_held_;
    script->producers_.push_back(event);
    return event;
  }

  const std::shared_ptr<Script> script;
};

std::unique_ptr<DeviceRuntime> Script::runtime() {
  return std::make_unique<ScriptedRuntime>(shared_from_this());
}

void Script::fail_next(Call call, std::string text, int times) {
  const std::lock_guard lock(mutex_);
  faults_[static_cast<int>(call)] = {std::move(text), times};
}

void Script::take_fault(Call call) {
  Fault& fault = faults_[static_cast<int>(call)];
  if (fault.times == 0) return;
  --fault.times;
  throw std::runtime_error(fault.text);
}

void Script::hold_producers() {
  const std::lock_guard lock(mutex_);
  producers_held_ = true;
}

void Script::release_producers() {
  const std::lock_guard lock(mutex_);
  producers_held_ = false;
  for (const auto& event : producers_) event->complete = true;
}

bool Script::step(Queue& stream, bool past_waits) {
  if (stream.empty()) return false;
  const Operation& next = stream.front();
  if (next.waits_for && !next.waits_for->complete && !past_waits) return false;
  if (next.copies) {
    hscache::move_rows(Direction::kGather, next.task);
    bytes_outstanding_ -= next.bytes();
  }
  if (next.completes) next.completes->complete = true;
  stream.pop_front();
  return true;
}

bool Script::step(std::size_t stream) {
  const std::lock_guard lock(mutex_);
  return stream < streams_.size() && step(*streams_[stream], false);
}

bool Script::run(std::size_t stream) {
  bool ran = false;
  while (step(stream)) ran = true;
  return ran;
}

bool Script::run_all() {
  std::size_t streams = 0;
  {
    const std::lock_guard lock(mutex_);
    streams = streams_.size();
  }
  bool ran = false;
  for (std::size_t i = 0; i < streams; ++i) ran |= run(i);
  return ran;
}

std::int64_t Script::bytes_outstanding() const {
  const std::lock_guard lock(mutex_);
  return bytes_outstanding_;
}

std::int64_t Script::most_bytes_outstanding() const {
  const std::lock_guard lock(mutex_);
  return most_bytes_outstanding_;
}

bool Script::is_outstanding(const std::byte* destination) const {
  const std::lock_guard lock(mutex_);
  for (const auto& stream : streams_) {
    for (const Operation& operation : *stream) {
      if (operation.copies && operation.task.rows.data == destination) return true;
    }
  }
  return false;
}

std::vector<const std::byte*> Script::enqueued() const {
  const std::lock_guard lock(mutex_);
  return enqueued_;
}

}  // namespace hscache::test
