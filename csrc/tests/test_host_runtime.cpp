#include <cstddef>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "host/host_runtime.h"
#include "tests/harness.h"

namespace hscache::test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr std::int64_t kBig = 2 << 20;  // long enough that what does not wait comes first

// Enqueues the copy of a whole buffer into another.
void copy_all(Stream& stream, Bytes& from, Bytes& to) {
  const Copy copy{to.data(), from.data(), static_cast<std::int64_t>(from.size())};
  stream.copy_to_host({&copy, 1});
}

void finish(Stream& stream) {
  const std::shared_ptr<Event> event = stream.record();
  while (!event->done()) std::this_thread::yield();
}

}  // namespace

TEST(host_runtime, a_stream_runs_in_order) {
  HostRuntime runtime;
  const auto stream = runtime.create_stream();
  Bytes a(kBig, std::byte{1});
  Bytes b(kBig);
  Bytes c(kBig);
  copy_all(*stream, a, b);
  copy_all(*stream, b, c);
  copy_all(*stream, c, a);
  finish(*stream);
  CHECK(a == Bytes(kBig, std::byte{1}));
}

TEST(host_runtime, an_event_is_done_only_after_what_stands_before_it) {
  HostRuntime runtime;
  const auto stream = runtime.create_stream();
  const Bytes expected(kBig, std::byte{7});
  for (int round = 0; round < 10; ++round) {
    Bytes from(kBig, std::byte{7});
    Bytes to(kBig);
    copy_all(*stream, from, to);
    finish(*stream);
    if (!CHECK(to == expected)) return;
  }
}

TEST(host_runtime, a_stream_waits_for_another_streams_event) {
  HostRuntime runtime;
  const auto first = runtime.create_stream();
  const auto second = runtime.create_stream();
  const Bytes expected(kBig, std::byte{5});
  for (int round = 0; round < 10; ++round) {
    Bytes a(kBig, std::byte{5});
    Bytes b(kBig);
    Bytes c(kBig);
    copy_all(*first, a, b);
    second->wait(first->record());
    copy_all(*second, b, c);
    finish(*second);
    if (!CHECK(c == expected)) return;
  }
}

TEST(host_runtime, a_stream_dies_after_its_work) {
  HostRuntime runtime;
  Bytes from(kBig, std::byte{9});
  Bytes to(kBig);
  {
    const auto stream = runtime.create_stream();
    copy_all(*stream, from, to);
  }
  CHECK(to == from);
}

TEST(host_runtime, streams_may_wait_for_each_other_in_turn) {
  HostRuntime runtime;
  const auto left = runtime.create_stream();
  const auto right = runtime.create_stream();
  Bytes number(1, std::byte{1});
  std::vector<Bytes> steps(100, Bytes(1));
  Bytes* from = &number;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    Stream& here = i % 2 == 0 ? *left : *right;
    Stream& there = i % 2 == 0 ? *right : *left;
    copy_all(here, *from, steps[i]);
    there.wait(here.record());
    from = &steps[i];
  }
  finish(*left);
  finish(*right);
  CHECK(steps.back() == number);
}

TEST(host_runtime, host_producers_have_no_stream) {
  HostRuntime runtime;
  CHECK(runtime.record_on(0)->done());
  CHECK_THROWS(std::invalid_argument, "the stream is 5", runtime.record_on(5));
}

}  // namespace hscache::test
