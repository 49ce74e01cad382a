// The engine as a state machine: the test drives poll() and decides when the device runs what.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/transfer_engine.h"
#include "tests/harness.h"
#include "tests/requests.h"
#include "tests/scripted_runtime.h"

namespace hscache::test {
namespace {

using State = Ticket::State;
using Call = Script::Call;

constexpr std::int64_t kPlenty = 1 << 20;

// An engine on a scripted device, driven by the test.
struct Setup {
  explicit Setup(TransferOptions options = {2, 256, kPlenty})
      : engine(script->runtime(), options, false) {}

  std::shared_ptr<Ticket> submit(const Request& request) {
    return engine.submit(request.gather(), Backpressure::kRefuse);
  }
  // Lets the device run and the engine see it until nothing changes any more.
  void settle() {
    while (script->run_all() | engine.poll()) {
    }
  }
  // Whether the engine still does its work.
  bool works() {
    const Request request(cache, {1, 2}, 1, {5});
    const auto ticket = submit(request);
    settle();
    return ticket != nullptr && ticket->state() == State::kDone && request.holds_its_rows();
  }

  Cache cache;
  std::shared_ptr<Script> script = std::make_shared<Script>();
  TransferEngine engine;
};

bool failed_with(const Ticket& ticket, const std::string& text) {
  return CHECK(ticket.state() == State::kFailed) && CHECK_EQ(ticket.error(), text);
}

}  // namespace

TEST(transfer_engine, a_ticket_is_pending_until_its_event) {
  Setup s({1, 256, kPlenty});
  const Request request(s.cache, {5, 3}, 2, {4});
  const auto ticket = s.submit(request);
  CHECK(ticket->state() == State::kPending);
  CHECK(s.engine.poll());
  CHECK(s.script->step(0));  // the wait for the producer
  s.engine.poll();
  CHECK(ticket->state() == State::kPending);
  CHECK(request.is_untouched());
  CHECK(s.script->step(0));  // the copy
  s.engine.poll();
  CHECK(ticket->state() == State::kPending);
  CHECK(!ticket->wait(std::chrono::duration<double>(0)));
  CHECK(s.script->step(0));  // the event
  CHECK(ticket->state() == State::kPending);
  CHECK(s.engine.poll());
  CHECK(ticket->state() == State::kDone);
  CHECK(ticket->wait(std::nullopt));
  CHECK_EQ(ticket->error(), "");
  CHECK(request.holds_its_rows());
}

TEST(transfer_engine, tickets_end_in_the_order_of_the_device) {
  Setup s;
  const Request first(s.cache, {5}, 0, {4});
  const Request second(s.cache, {3}, 0, {4});
  const auto first_ticket = s.submit(first);
  const auto second_ticket = s.submit(second);
  s.engine.poll();
  s.script->run(1);
  s.engine.poll();
  CHECK(first_ticket->state() == State::kPending);
  CHECK(second_ticket->state() == State::kDone);
  CHECK_EQ(s.engine.pending(), 1);
  s.script->run(0);
  s.engine.poll();
  CHECK(first_ticket->state() == State::kDone);
}

TEST(transfer_engine, a_ticket_ends_with_its_last_piece) {
  Setup s({3, 256, kPlenty});
  const Request request(s.cache, {5, 3, 1}, 0, {4, 4, 4});
  const auto ticket = s.submit(request);
  s.engine.poll();
  for (const std::size_t stream : {2, 0}) {
    s.script->run(stream);
    s.engine.poll();
    CHECK(ticket->state() == State::kPending);
  }
  s.script->run(1);
  s.engine.poll();
  CHECK(ticket->state() == State::kDone);
  CHECK(request.holds_its_rows());
}

TEST(transfer_engine, rows_are_read_after_their_producer_wrote_them) {
  Setup s;
  s.script->hold_producers();
  const Request request(s.cache, {5, 3, 1}, 0, {4, 4, 4});  // more pieces than streams
  const auto ticket = s.submit(request);
  s.settle();
  CHECK(request.is_untouched());
  CHECK(ticket->state() == State::kPending);
  s.cache.overwrite();
  s.script->release_producers();
  s.settle();
  CHECK(ticket->state() == State::kDone);
  CHECK(request.holds_its_rows());
}

TEST(transfer_engine, bytes_in_flight_stay_below_the_bound_at_any_length) {
  constexpr std::int64_t kBound = 13 * kRowBytes;
  for (const int pieces : {1, 2, 10, 300}) {
    Random random(static_cast<std::uint64_t>(pieces));
    Setup s({2, 256, kBound});
    std::vector<std::int64_t> lengths;
    for (int i = 0; i < pieces; ++i) lengths.push_back(random.in(1, 13));
    const std::int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    const Request request(s.cache, std::vector<std::int64_t>(tokens / kBlockSize + 1, 3), 0,
                          lengths);
    const auto ticket = s.submit(request);
    while (ticket->state() == State::kPending) {
      s.engine.poll();
      CHECK(s.script->bytes_outstanding() > 0 || ticket->state() != State::kPending);
      s.script->run(static_cast<std::size_t>(random.in(0, 1)));
    }
    CHECK(s.script->most_bytes_outstanding() <= kBound);
    CHECK(ticket->state() == State::kDone);
    CHECK(request.holds_its_rows());
  }
}

TEST(transfer_engine, the_bound_is_used_in_full_again_and_again) {
  Setup s({2, 256, 8 * kRowBytes});
  const Request request(s.cache, {5, 3, 1}, 0, {4, 4, 1});
  for (int round = 0; round < 3; ++round) {
    s.submit(request);
    s.engine.poll();
    CHECK_EQ(s.script->bytes_outstanding(), 8 * kRowBytes);
    s.settle();
  }
}

TEST(transfer_engine, a_piece_above_the_bound_goes_alone) {
  Setup s({2, 256, 2 * kRowBytes});
  const Request request(s.cache, {5, 3, 1}, 0, {1, 9, 1});
  const auto ticket = s.submit(request);
  s.engine.poll();
  CHECK_EQ(s.script->bytes_outstanding(), kRowBytes);
  s.script->run_all();
  s.engine.poll();
  CHECK_EQ(s.script->bytes_outstanding(), 9 * kRowBytes);
  s.settle();
  CHECK(ticket->state() == State::kDone);
  CHECK(request.holds_its_rows());
}

TEST(transfer_engine, pieces_are_enqueued_in_the_order_of_acceptance) {
  Setup s({2, 256, 4 * kRowBytes});
  const Request first(s.cache, {5, 3}, 0, {3, 3});
  const Request second(s.cache, {1}, 0, {1});
  s.submit(first);
  s.submit(second);
  s.settle();
  CHECK(s.script->enqueued() ==
        std::vector<const std::byte*>(
            {first.destination(0), first.destination(1), second.destination(0)}));
}

TEST(transfer_engine, requests_of_later_turns_stand_behind_those_of_earlier_ones) {
  Setup s({2, 256, 4 * kRowBytes});
  const Request first(s.cache, {5, 3}, 0, {4, 4});
  const Request second(s.cache, {1}, 0, {1});
  s.submit(first);
  s.engine.poll();  // its second piece has no room yet
  s.submit(second);
  s.settle();
  CHECK(s.script->enqueued() ==
        std::vector<const std::byte*>(
            {first.destination(0), first.destination(1), second.destination(0)}));
}

TEST(transfer_engine, poll_says_whether_anything_changed) {
  Setup s;
  CHECK(!s.engine.poll());
  const Request request(s.cache, {5, 3}, 0, {4, 4});
  s.submit(request);
  CHECK(s.engine.poll());
  CHECK(!s.engine.poll());
  s.script->run(0);  // one piece of two
  CHECK(s.engine.poll());
  CHECK(!s.engine.poll());
  s.script->run_all();
  CHECK(s.engine.poll());
  CHECK(!s.engine.poll());
}

TEST(transfer_engine, requests_without_rows_are_done) {
  Setup s;
  const Request no_pieces(s.cache, {}, 0, {});
  const Request no_tokens(s.cache, {}, 0, {0});
  const auto first = s.submit(no_pieces);
  const auto second = s.submit(no_tokens);
  s.settle();
  CHECK(first->state() == State::kDone);
  CHECK(second->state() == State::kDone);
}

TEST(transfer_engine, refuses_at_max_pending_and_accepts_again) {
  Setup s({2, 2, kPlenty});
  const Request request(s.cache, {5}, 0, {4});
  const Request other(s.cache, {5}, 0, {4});
  const Request third(s.cache, {5}, 0, {4});
  s.submit(request);
  s.submit(other);
  CHECK(s.submit(third) == nullptr);
  CHECK_EQ(s.engine.pending(), 2);
  s.engine.poll();
  CHECK(s.submit(third) == nullptr);  // enqueued is not ended
  s.settle();
  CHECK(third.is_untouched());
  CHECK(s.submit(third) != nullptr);
  s.settle();
}

TEST(transfer_engine, waits_at_max_pending_until_one_ended) {
  Setup s({2, 1, kPlenty});
  const Request first(s.cache, {5}, 0, {4});
  const Request second(s.cache, {3}, 0, {4});
  const auto first_ticket = s.submit(first);
  std::atomic<bool> accepted{false};
  State first_state_then = State::kPending;
  std::shared_ptr<Ticket> second_ticket;
  std::thread waiter([&] {
    second_ticket = s.engine.submit(second.gather(), Backpressure::kWait);
    first_state_then = first_ticket->state();
    accepted = true;
  });
  for (int turn = 0; turn < 20; ++turn) {
    s.engine.poll();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(!accepted);
  s.settle();
  waiter.join();
  CHECK(first_state_then == State::kDone);
  s.settle();
  CHECK(second_ticket->state() == State::kDone);
  CHECK(second.holds_its_rows());
}

TEST(transfer_engine, a_failed_copy_fails_its_ticket_when_the_device_is_through) {
  Setup s;
  const Request request(s.cache, {5, 3}, 0, {4, 4});
  const Request other(s.cache, {1}, 0, {4});
  s.script->fail_next(Call::kCopy, "copy engine on fire");
  const auto ticket = s.submit(request);
  const auto other_ticket = s.submit(other);
  s.engine.poll();
  // It was enqueued all the same: the rows' memory is not free yet.
  CHECK(ticket->state() == State::kPending);
  s.settle();
  failed_with(*ticket, "copy engine on fire");
  CHECK(!s.script->is_outstanding(request.destination(0)));
  CHECK(other_ticket->state() == State::kDone);
  CHECK(other.holds_its_rows());
  CHECK(s.works());
}

TEST(transfer_engine, nothing_more_of_a_failed_request_is_enqueued) {
  Setup s({1, 256, kRowBytes});
  const Request request(s.cache, {5, 3}, 0, {4, 4});
  s.script->fail_next(Call::kDone, "lost");
  const auto ticket = s.submit(request);
  s.settle();
  failed_with(*ticket, "lost");
  CHECK_EQ(s.script->enqueued().size(), 1U);
  CHECK(s.works());
}

TEST(transfer_engine, a_failed_wait_fails_its_ticket_and_copies_nothing) {
  Setup s;
  const Request request(s.cache, {5}, 0, {4});
  s.script->fail_next(Call::kWait, "no such event");
  const auto ticket = s.submit(request);
  s.settle();
  failed_with(*ticket, "no such event");
  CHECK(request.is_untouched());
  CHECK(s.works());
}

TEST(transfer_engine, a_failed_record_does_not_free_memory_that_the_device_still_writes) {
  Setup s({1, 256, kPlenty});
  const Request request(s.cache, {5}, 0, {4});
  s.script->fail_next(Call::kRecord, "out of events");
  const auto ticket = s.submit(request);
  s.engine.poll();
  CHECK(ticket->state() == State::kPending || !s.script->is_outstanding(request.destination(0)));
  s.settle();
  failed_with(*ticket, "out of events");
  CHECK(!s.script->is_outstanding(request.destination(0)));
  CHECK(s.works());
}

TEST(transfer_engine, streams_that_cannot_be_made_again_fail_one_ticket) {
  Setup s({1, 256, kPlenty});
  const Request first(s.cache, {5}, 0, {4});
  const Request second(s.cache, {5}, 0, {4});
  s.script->fail_next(Call::kRecord, "out of events", 2);  // also to learn when the rest has run
  const auto first_ticket = s.submit(first);
  s.settle();
  failed_with(*first_ticket, "out of events");
  s.script->fail_next(Call::kCreateStream, "out of streams");
  const auto second_ticket = s.submit(second);
  s.settle();
  failed_with(*second_ticket, "out of streams");
  CHECK(s.works());
}

TEST(transfer_engine, a_failed_event_fails_its_ticket_after_its_other_pieces) {
  Setup s({2, 256, kPlenty});
  const Request request(s.cache, {5, 3}, 0, {4, 4});
  const auto ticket = s.submit(request);
  s.engine.poll();
  s.script->run(1);
  s.script->fail_next(Call::kDone, "illegal address");
  s.engine.poll();
  CHECK(ticket->state() == State::kPending);  // the other stream writes still
  s.script->run(0);
  s.engine.poll();
  failed_with(*ticket, "illegal address");
  CHECK(s.works());
}

TEST(transfer_engine, the_first_error_is_the_one_reported) {
  Setup s({2, 256, kPlenty});
  const Request request(s.cache, {5, 3}, 0, {4, 4});
  const auto ticket = s.submit(request);
  s.engine.poll();
  s.script->run(0);
  s.script->fail_next(Call::kDone, "the cause");
  s.engine.poll();
  s.script->run(1);
  s.script->fail_next(Call::kDone, "what followed");
  s.engine.poll();
  failed_with(*ticket, "the cause");
}

TEST(transfer_engine, an_unknown_producer_is_refused_and_nothing_stays) {
  Setup s;
  const Request request(s.cache, {5}, 0, {4});
  s.script->fail_next(Call::kProducer, "no such stream");
  CHECK_THROWS(std::runtime_error, "no such stream", s.submit(request));
  CHECK_EQ(s.engine.pending(), 0);
  CHECK(s.works());
}

TEST(transfer_engine, bad_requests_are_refused_and_nothing_stays) {
  Setup s;
  const Request good(s.cache, {5, 3}, 0, {4, 4});
  TransferRequest bad = good.gather();
  bad.pieces[1].layers.pop_back();
  CHECK_THROWS(std::invalid_argument, "a piece has places for 1 layers, the paged memory has 2",
               s.engine.submit(bad, Backpressure::kWait));
  bad = good.gather();
  bad.block_ids[1] = kBlocks;
  CHECK_THROWS(std::out_of_range, "block_ids[1] is 8", s.engine.submit(bad, Backpressure::kWait));
  bad = good.gather();
  bad.pieces[1].length = 5;
  CHECK_THROWS(std::out_of_range, "reach beyond the 8 tokens",
               s.engine.submit(bad, Backpressure::kWait));
  bad = good.gather();
  bad.pieces[0].start = -1;
  CHECK_THROWS(std::invalid_argument, "start is -1", s.engine.submit(bad, Backpressure::kWait));
  CHECK_EQ(s.engine.pending(), 0);
  s.settle();
  CHECK(good.is_untouched());
  CHECK(s.works());
}

TEST(transfer_engine, refuses_options_below_one) {
  const auto script = std::make_shared<Script>();
  for (const TransferOptions options :
       {TransferOptions{0, 1, 1}, TransferOptions{1, 0, 1}, TransferOptions{1, 1, 0}}) {
    CHECK_THROWS(std::invalid_argument, "must each be at least 1",
                 TransferEngine(script->runtime(), options, false));
  }
  script->fail_next(Call::kCreateStream, "no device");
  CHECK_THROWS(std::runtime_error, "no device", TransferEngine(script->runtime(), {}, false));
}

TEST(transfer_engine, close_fails_what_has_not_started_and_waits_for_what_is_in_flight) {
  Setup s({1, 256, 4 * kRowBytes});
  const Request running(s.cache, {5}, 0, {4});
  const Request halfway(s.cache, {5, 3}, 0, {4, 4});
  const Request waiting(s.cache, {5}, 0, {4});
  const auto running_ticket = s.submit(running);
  s.engine.poll();
  const auto halfway_ticket = s.submit(halfway);
  const auto waiting_ticket = s.submit(waiting);
  s.engine.poll();
  std::atomic<bool> closed{false};
  std::thread closer([&] {
    s.engine.close();
    closed = true;
  });
  CHECK(waiting_ticket->wait(std::nullopt));  // closing needs no device for this one
  CHECK(running_ticket->state() == State::kPending);
  CHECK(!closed);
  while (!closed) s.script->run_all();
  closer.join();
  CHECK(running_ticket->state() == State::kDone);
  CHECK(running.holds_its_rows());
  for (const auto& [ticket, request] :
       {std::pair(halfway_ticket, &halfway), std::pair(waiting_ticket, &waiting)}) {
    failed_with(*ticket, "the transfer engine was closed before this transfer was complete");
    CHECK(request->is_untouched());
  }
  CHECK_EQ(s.engine.pending(), 0);
}

TEST(transfer_engine, close_keeps_the_error_that_came_before_it) {
  Setup s({2, 256, 4 * kRowBytes});
  const Request blocking(s.cache, {5}, 0, {1});
  const Request broken(s.cache, {5, 3}, 0, {1, 4});
  s.submit(blocking);
  s.script->fail_next(Call::kDone, "broken before");
  const auto ticket = s.submit(broken);
  s.engine.poll();
  s.script->run(1);  // the first piece of `broken`; its second has no room yet
  s.engine.poll();
  std::thread closer([&] { s.engine.close(); });
  ticket->wait(std::nullopt);
  failed_with(*ticket, "broken before");
  s.script->run_all();
  closer.join();
}

TEST(transfer_engine, a_closed_engine_refuses_and_closes_again) {
  Setup s;
  s.engine.close();
  s.engine.close();
  const Request request(s.cache, {5}, 0, {4});
  CHECK_THROWS(std::runtime_error, "the transfer engine is closed", s.submit(request));
  CHECK_THROWS(std::runtime_error, "the transfer engine is closed",
               s.engine.submit(request.gather(), Backpressure::kWait));
}

TEST(transfer_engine, close_wakes_who_waits_for_room) {
  Setup s({2, 1, kPlenty});
  const Request first(s.cache, {5}, 0, {4});
  const Request second(s.cache, {5}, 0, {4});
  s.submit(first);
  s.engine.poll();
  std::thread waiter([&] {
    CHECK_THROWS(std::runtime_error, "the transfer engine is closed",
                 s.engine.submit(second.gather(), Backpressure::kWait));
  });
  std::thread closer([&] { s.engine.close(); });
  waiter.join();
  s.script->run_all();
  closer.join();
  CHECK(second.is_untouched());
}

TEST(transfer_engine, drain_waits_for_all_that_was_accepted) {
  Setup s({2, 256, 4 * kRowBytes});
  std::vector<Request> requests;
  std::vector<std::shared_ptr<Ticket>> tickets;
  for (int i = 0; i < 5; ++i)
    requests.emplace_back(s.cache, std::vector<std::int64_t>{i}, 0,
                          std::vector<std::int64_t>{3, 1});
  for (const Request& request : requests) tickets.push_back(s.submit(request));
  std::atomic<bool> drained{false};
  std::thread drainer([&] {
    s.engine.drain();
    drained = true;
  });
  while (!drained) s.script->run_all();
  drainer.join();
  for (const auto& ticket : tickets) CHECK(ticket->state() == State::kDone);
}

TEST(transfer_engine, hostile_schedules_with_faults) {
  struct Sent {
    std::unique_ptr<Request> request;
    std::shared_ptr<Ticket> ticket;
    std::vector<std::vector<std::byte>> when_ended;
  };
  for (std::uint64_t seed = 0; seed < 3'000; ++seed) {
    Random random(seed);
    const int fault_rate = random.pick({0, 0, 5, 20});
    const int poll_rate = random.pick({10, 40, 80});
    const TransferOptions options{static_cast<int>(random.in(1, 3)), random.in(1, 6),
                                  random.in(1, 24) * kRowBytes};
    Setup s(options);
    std::vector<Sent> sent;
    bool sound = true;
    const auto look = [&] {
      for (Sent& one : sent) {
        if (one.ticket->state() == State::kPending || !one.when_ended.empty()) continue;
        one.when_ended = one.request->destinations();
        for (std::size_t i = 0; i < one.when_ended.size(); ++i) {
          sound &= CHECK(!s.script->is_outstanding(one.request->destination(i)));
        }
        if (one.ticket->state() == State::kDone) {
          sound &= CHECK(one.request->holds_its_rows()) && CHECK_EQ(one.ticket->error(), "");
        } else {
          sound &= CHECK(one.ticket->error().starts_with("fault"));
        }
      }
      const std::int64_t largest = 9 * kRowBytes;
      sound &=
          CHECK(s.script->most_bytes_outstanding() <= std::max(options.staging_bytes, largest));
    };
    for (int turn = 0; turn < 60 && sound; ++turn) {
      if (random.chance(fault_rate)) {
        s.script->fail_next(static_cast<Call>(random.in(0, Script::kCalls - 1)),
                            "fault " + std::to_string(turn));
      }
      if (random.chance(30)) {
        auto request = std::make_unique<Request>(draw_request(s.cache, random));
        try {
          if (auto ticket = s.submit(*request)) sent.push_back({std::move(request), ticket, {}});
        } catch (const std::runtime_error& refused) {
          sound &= CHECK(std::string(refused.what()).starts_with("fault"));
        }
      }
      if (random.chance(60)) s.script->step(static_cast<std::size_t>(random.in(0, 4)));
      if (random.chance(poll_rate)) s.engine.poll();
      look();
    }
    s.settle();
    look();
    for (const Sent& one : sent) {
      sound &= CHECK(one.ticket->state() != State::kPending) &&
               CHECK(one.when_ended == one.request->destinations());
    }
    sound &= CHECK_EQ(s.engine.pending(), 0);
    if (!sound) {
      report_failure(__FILE__, __LINE__, "seed " + std::to_string(seed));
      return;
    }
  }
}

}  // namespace hscache::test
