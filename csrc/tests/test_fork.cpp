// What a child process sees of an engine that its parent has.
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "core/transfer_engine.h"
#include "host/host_runtime.h"
#include "tests/child.h"
#include "tests/harness.h"
#include "tests/requests.h"
#include "tests/scripted_runtime.h"

namespace hscache::test {
namespace {

std::unique_ptr<TransferEngine> make_engine() {
  return std::make_unique<TransferEngine>(std::make_unique<HostRuntime>(), TransferOptions{});
}

bool still_works(TransferEngine& engine, Cache& cache) {
  const Request request(cache, {5, 1}, 0, {4, 4});
  const auto ticket = engine.submit(request.gather(), Backpressure::kWait);
  ticket->wait(std::nullopt);
  return ticket->state() == Ticket::State::kDone && request.holds_its_rows();
}

constexpr const char* kForked =
    "threw: the transfer engine belongs to the parent process: open a store after fork(), not "
    "before";

}  // namespace

TEST(fork, a_child_is_told_whose_engine_it_is) {
  Cache cache;
  const auto engine = make_engine();
  const Request request(cache, {5}, 0, {4});
  CHECK_EQ(in_child([&] {
             engine->submit(request.gather(), Backpressure::kWait);
             return "accepted";
           }),
           kForked);
  CHECK_EQ(in_child([&] {
             engine->drain();
             return "drained";
           }),
           kForked);
  CHECK(still_works(*engine, cache));
}

TEST(fork, a_child_closes_and_drops_the_engine) {
  Cache cache;
  auto engine = make_engine();
  CHECK(still_works(*engine, cache));  // its threads are up and wait for work
  CHECK_EQ(in_child([&] {
             engine->close();
             engine.reset();
             return "gone";
           }),
           "gone");
  CHECK(still_works(*engine, cache));
}

TEST(fork, a_childs_copy_has_nothing_pending_and_nothing_to_poll) {
  Cache cache;
  const auto script = std::make_shared<Script>();
  TransferEngine engine(script->runtime(), {}, false);
  const Request request(cache, {5}, 0, {4});
  const auto ticket = engine.submit(request.gather(), Backpressure::kWait);
  CHECK_EQ(in_child([&] {
             return std::to_string(engine.pending()) + (engine.poll() ? " polled" : " idle");
           }),
           "0 idle");
  engine.poll();
  script->run_all();
  engine.poll();
  CHECK(ticket->state() == Ticket::State::kDone);
}

TEST(fork, a_child_does_not_wait_for_a_ticket_that_cannot_end) {
  Cache cache;
  const auto script = std::make_shared<Script>();
  TransferEngine engine(script->runtime(), {}, false);
  const Request request(cache, {5}, 0, {4});
  const auto ticket = engine.submit(request.gather(), Backpressure::kWait);
  CHECK_EQ(in_child([&] {
             const bool ended = ticket->wait(std::nullopt);
             return ended && ticket->state() == Ticket::State::kFailed ? "threw: " + ticket->error()
                                                                       : "still pending";
           }),
           kForked);
  CHECK(ticket->state() == Ticket::State::kPending);
  engine.poll();
  script->run_all();
  engine.poll();
  CHECK(ticket->state() == Ticket::State::kDone);
}

TEST(fork, a_ticket_that_ended_before_stays_as_it_ended) {
  Cache cache;
  const auto engine = make_engine();
  const Request request(cache, {5}, 0, {4});
  const auto ticket = engine->submit(request.gather(), Backpressure::kWait);
  ticket->wait(std::nullopt);
  CHECK_EQ(in_child([&] {
             return ticket->wait(std::nullopt) && ticket->state() == Ticket::State::kDone
                        ? "done" + ticket->error()
                        : "changed";
           }),
           "done");
}

TEST(fork, a_child_of_a_busy_engine_is_told_too) {
  // fork() at any moment: whatever the engine's threads hold then stays held in the child.
  Cache cache;
  const auto engine = make_engine();
  std::atomic<bool> stop{false};
  std::thread submitter([&] {
    while (!stop) {
      if (!CHECK(still_works(*engine, cache))) return;
    }
  });
  const Request request(cache, {5}, 0, {4});
  for (int round = 0; round < 50; ++round) {
    const std::string answer = in_child([&] {
      engine->poll();
      engine->pending();
      engine->close();
      engine->submit(request.gather(), Backpressure::kWait);
      return "accepted";
    });
    if (!CHECK_EQ(answer, kForked)) break;
  }
  stop = true;
  submitter.join();
}

// Threads that a child starts: ThreadSanitizer does not follow them, and AddressSanitizer's own
// locks may be held at the fork by a thread that is not there any more.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST(fork, a_child_may_have_an_engine_of_its_own) {
  Cache cache;
  auto engine = make_engine();
  CHECK_EQ(in_child([&] {
             auto own = make_engine();
             engine.reset();  // must not touch the threads of the new one
             const bool worked = still_works(*own, cache);
             own.reset();
             return worked ? "worked" : "failed";
           }),
           "worked");
  CHECK(still_works(*engine, cache));
}
#endif

}  // namespace hscache::test
