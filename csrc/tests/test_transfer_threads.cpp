// The engine with its own thread on the host runtime.
#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/transfer_engine.h"
#include "host/host_runtime.h"
#include "tests/harness.h"
#include "tests/requests.h"

namespace hscache::test {
namespace {

using State = Ticket::State;

constexpr int kThreads = 4;
constexpr TransferOptions kNarrow{2, 3, 8 * kRowBytes};  // every limit is met all the time

std::unique_ptr<DeviceRuntime> host() { return std::make_unique<HostRuntime>(); }

// Runs `body(thread number)` on several threads at once.
template <class Body>
void on_threads(const Body& body) {
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreads; ++id) threads.emplace_back([&body, id] { body(id); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

TEST(transfer_threads, concurrent_submitters_get_their_rows) {
  Cache cache;
  TransferEngine engine(host(), kNarrow);
  on_threads([&](int id) {
    Random random(static_cast<std::uint64_t>(id));
    for (int round = 0; round < 100; ++round) {
      const Request request = draw_request(cache, random);
      const auto ticket = engine.submit(request.gather(), Backpressure::kWait);
      ticket->wait(std::nullopt);
      if (!CHECK(ticket->state() == State::kDone) || !CHECK(request.holds_its_rows())) return;
    }
  });
  CHECK_EQ(engine.pending(), 0);
}

TEST(transfer_threads, many_tickets_are_held_by_one_submitter) {
  Cache cache;
  TransferEngine engine(host(), {2, 64, 8 * kRowBytes});
  on_threads([&](int id) {
    Random random(static_cast<std::uint64_t>(id) + 100);
    std::vector<std::unique_ptr<Request>> requests;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (int round = 0; round < 100; ++round) {
      requests.push_back(std::make_unique<Request>(draw_request(cache, random)));
      tickets.push_back(engine.submit(requests.back()->gather(), Backpressure::kWait));
    }
    engine.drain();
    for (std::size_t i = 0; i < tickets.size(); ++i) {
      if (!CHECK(tickets[i]->state() == State::kDone)) return;
      if (!CHECK(requests[i]->holds_its_rows())) return;
    }
  });
}

TEST(transfer_threads, refused_submitters_come_through_in_the_end) {
  Cache cache;
  TransferEngine engine(host(), kNarrow);
  on_threads([&](int id) {
    Random random(static_cast<std::uint64_t>(id) + 200);
    for (int round = 0; round < 30; ++round) {
      const Request request = draw_request(cache, random);
      std::shared_ptr<Ticket> ticket;
      while (!(ticket = engine.submit(request.gather(), Backpressure::kRefuse))) {
        std::this_thread::yield();
      }
      ticket->wait(std::nullopt);
      if (!CHECK(request.holds_its_rows())) return;
    }
  });
}

TEST(transfer_threads, callers_may_poll_beside_the_engines_thread) {
  Cache cache;
  TransferEngine engine(host(), {2, 64, 8 * kRowBytes});
  on_threads([&](int id) {
    Random random(static_cast<std::uint64_t>(id) + 400);
    for (int round = 0; round < 100; ++round) {
      const Request request = draw_request(cache, random);
      const auto ticket = engine.submit(request.gather(), Backpressure::kWait);
      while (ticket->state() == State::kPending) engine.poll();
      if (!CHECK(ticket->state() == State::kDone) || !CHECK(request.holds_its_rows())) return;
    }
  });
  CHECK_EQ(engine.pending(), 0);
}

TEST(transfer_threads, an_ended_ticket_has_made_room) {
  Cache cache;
  TransferEngine engine(host(), {2, 1, kRowBytes});
  const Request request(cache, {5}, 0, {4});
  for (int round = 0; round < 300; ++round) {
    const auto ticket = engine.submit(request.gather(), Backpressure::kRefuse);
    if (!CHECK(ticket != nullptr)) return;
    ticket->wait(std::nullopt);
  }
}

TEST(transfer_threads, a_wait_beyond_all_clocks_is_a_wait) {
  Cache cache;
  TransferEngine engine(host(), {});
  const Request request(cache, {5}, 0, {4});
  for (const double seconds : {1e10, 1e300, std::numeric_limits<double>::infinity()}) {
    const auto ticket = engine.submit(request.gather(), Backpressure::kWait);
    CHECK(ticket->wait(std::chrono::duration<double>(seconds)));
  }
}

TEST(transfer_threads, close_answers_every_submitter) {
  for (int round = 0; round < 20; ++round) {
    Cache cache;
    TransferEngine engine(host(), kNarrow);
    std::atomic<int> accepted{0};
    std::thread closer([&] {
      while (accepted < 10 * round) std::this_thread::yield();
      engine.close();
    });
    on_threads([&](int id) {
      Random random(static_cast<std::uint64_t>(id) + 300);
      while (true) {
        const Request request = draw_request(cache, random);
        std::shared_ptr<Ticket> ticket;
        try {
          ticket = engine.submit(request.gather(), Backpressure::kWait);
        } catch (const std::runtime_error& closed) {
          CHECK(std::string(closed.what()).find("closed") != std::string::npos);
          return;
        }
        ++accepted;
        ticket->wait(std::nullopt);
        CHECK(ticket->state() == State::kFailed || request.holds_its_rows());
      }
    });
    closer.join();
    CHECK_EQ(engine.pending(), 0);
  }
}

TEST(transfer_threads, concurrent_closes_all_return) {
  Cache cache;
  TransferEngine engine(host(), kNarrow);
  const Request request(cache, {5, 1}, 0, {4, 4});
  const auto ticket = engine.submit(request.gather(), Backpressure::kWait);
  on_threads([&](int) {
    engine.close();
    CHECK(ticket->state() != State::kPending);
  });
}

TEST(transfer_threads, destruction_waits_for_what_is_in_flight) {
  Cache cache;
  const Request request(cache, {5, 1}, 0, {4, 4});
  std::shared_ptr<Ticket> ticket;
  {
    TransferEngine engine(host(), {});
    ticket = engine.submit(request.gather(), Backpressure::kWait);
  }
  CHECK(ticket->state() == State::kFailed || request.holds_its_rows());
  CHECK(ticket->state() != State::kPending);
}

}  // namespace hscache::test
