#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/background_registration.h"
#include "tests/child.h"
#include "tests/harness.h"

namespace hscache::test {
namespace {

// A device that takes a byte a turn, and as many turns as the test gives it.
struct Turns {
  std::atomic<int> given{0};
  std::atomic<bool> dead{false};
};

class Slow final : public hscache::Registration {
 public:
  Slow(Turns& turns, std::int64_t bytes, std::int64_t refused_at)
      : turns_(turns), all_(bytes), refused_at_(refused_at) {}
  ~Slow() override { turns_.dead = true; }

  bool extend() override {
    while (turns_.given == 0) std::this_thread::yield();
    --turns_.given;
    if (bytes_ == refused_at_) {
      refuse("no more");
      return false;
    }
    bytes_ += 1;
    return bytes_ < all_;
  }

 private:
  Turns& turns_;
  const std::int64_t all_;
  const std::int64_t refused_at_;
};

}  // namespace

TEST(background_registration, takes_all_and_ends) {
  Turns turns;
  {
    const BackgroundRegistration registration(std::make_unique<Slow>(turns, 3, -1));
    CHECK(registration.at_work());
    CHECK_EQ(registration.bytes(), 0);
    turns.given = 3;
    registration.wait();
    CHECK(!registration.at_work());
    CHECK_EQ(registration.bytes(), 3);
    CHECK_EQ(registration.refusal(), "");
    CHECK(!turns.dead);
  }
  CHECK(turns.dead);
}

TEST(background_registration, keeps_what_was_taken_before_a_refusal) {
  Turns turns;
  turns.given = 100;
  const BackgroundRegistration registration(std::make_unique<Slow>(turns, 9, 2));
  registration.wait();
  CHECK_EQ(registration.bytes(), 2);
  CHECK_EQ(registration.refusal(), "no more");
}

TEST(background_registration, ends_after_the_piece_in_hand) {
  Turns turns;
  auto registration = std::make_unique<BackgroundRegistration>(
      std::make_unique<Slow>(turns, std::int64_t{1} << 60, -1));
  std::thread death([&] { registration.reset(); });
  turns.given = 1;
  // Whether the end came before or after that turn, there may be one more.
  while (!turns.dead) turns.given = 1;
  death.join();
  CHECK(turns.dead);
}

TEST(background_registration, stops_and_keeps_what_was_taken) {
  Turns turns;
  BackgroundRegistration registration(std::make_unique<Slow>(turns, std::int64_t{1} << 60, -1));
  turns.given = 2;
  while (registration.bytes() < 2) std::this_thread::yield();
  std::thread stopping([&] { registration.stop(); });
  while (registration.at_work()) turns.given = 1;
  stopping.join();
  const std::int64_t taken = registration.bytes();
  CHECK(taken >= 2);
  turns.given = 5;
  registration.stop();
  CHECK_EQ(registration.bytes(), taken);
  CHECK(!turns.dead);
}

TEST(background_registration, a_call_that_throws_is_a_refusal) {
  class Throws final : public hscache::Registration {
   public:
    bool extend() override { throw std::runtime_error("the device is gone"); }
  };
  const BackgroundRegistration registration(std::make_unique<Throws>());
  registration.wait();
  CHECK_EQ(registration.refusal(), "the device is gone");
  CHECK_EQ(registration.bytes(), 0);
}

TEST(background_registration, dies_in_a_forked_child) {
  Turns turns;
  auto registration = std::make_unique<BackgroundRegistration>(
      std::make_unique<Slow>(turns, std::int64_t{1} << 60, -1));
  CHECK_EQ(in_child([&] {
             const bool at_work = registration->at_work();
             registration->wait();
             registration.reset();
             return std::string(at_work || turns.dead ? "touched" : "left alone");
           }),
           "left alone");
  std::thread death([&] { registration.reset(); });
  while (!turns.dead) turns.given = 1;
  death.join();
}

}  // namespace hscache::test
